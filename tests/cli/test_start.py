"""Starting runs: which configuration a command line means, and what is refused before any process starts."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from chameleon_ft.config import RunConfig, Skip, TrainConfig
from chameleon_ft.data import load_sources
from chameleon_ft.errors import ConfigError, LeaseError
from chameleon_ft.storage.checkpoints import complete_checkpoints, mark_complete, note_evaluation, pinned_checkpoints
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.cli.conftest import CommandLine, finished_run, nothing_listens
from tests.golden import message
from tests.stored import step_directory


def test_a_file_is_enough(chameleon: CommandLine, config_file: Path) -> None:
    config = chameleon.configured("train", config_file)
    assert isinstance(config, TrainConfig)
    assert (config.steps, config.failures[0].phase) == (20, "sync")
    assert not chameleon.launched[0].resume


def test_flags_go_over_the_file_before_and_after_it(chameleon: CommandLine, config_file: Path) -> None:
    config = chameleon.configured("train", "--steps", "30", config_file, "--model.dim=64", "--parallel.split-backward")
    assert isinstance(config, TrainConfig)
    assert (config.steps, config.model.dim, config.parallel.split_backward) == (30, 64, True)
    assert config.model.num_layers == TrainConfig().model.num_layers


def test_flags_may_set_right_what_does_not_fit_together_in_the_file(chameleon: CommandLine, config_file: Path) -> None:
    config_file.write_text(config_file.read_text().replace("workers = 4", "workers = 8"))
    message(chameleon.refused("train", config_file))
    assert chameleon.configured("train", config_file, "--parallel.dp", "4").workers == 8


def test_failures_as_a_flag(chameleon: CommandLine, config_file: Path) -> None:
    config = chameleon.configured("train", config_file, "--failures", "3:1,5:2:vote:hang")
    assert [(f.step, f.worker, f.phase, f.kind) for f in config.failures] == [
        (3, 1, "forward", "kill"),
        (5, 2, "vote", "hang"),
    ]
    chameleon("train", config_file, "--failures", "none", "--output-dir", "other")
    assert chameleon.launched[-1].config.failures == ()


def test_what_a_failure_in_a_file_leaves_out_has_its_default(chameleon: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "failures.toml"
    file.write_text('[[failures]]\nstep = 3\nworker = 1\nkind = "hang"\n')
    (failure,) = chameleon.configured("train", file).failures
    assert (failure.step, failure.worker, failure.phase, failure.kind) == (3, 1, "forward", "hang")


@pytest.mark.parametrize("failures", ["3", "3:a", "3:1:sync:kill:again", ""])
def test_a_failure_that_is_written_wrongly_is_refused(chameleon: CommandLine, config_file: Path, failures: str) -> None:
    message(chameleon.refused("train", config_file, "--failures", failures))


def test_the_run_directory_is_named_after_the_file_unless_told(chameleon: CommandLine, config_file: Path) -> None:
    default = chameleon.configured("train", config_file).output_dir
    assert default is not None
    assert default.parent == Path.cwd() / "runs"
    assert default.name.startswith("small-")
    assert chameleon.configured("train", config_file, "--output-dir", "here").output_dir == Path.cwd() / "here"
    assert RunDirectory.open(Path("here")).config() == chameleon.launched[-1].config


def test_paths_mean_the_same_from_any_directory(
    chameleon: CommandLine, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chameleon.configured("train", "--data.path", text.name, "--output-dir", "run")
    config = RunDirectory.open(Path("run")).config()
    assert isinstance(config, TrainConfig)
    assert config.data.path == str(text)


def test_the_data_is_in_the_run_directory_before_training(chameleon: CommandLine, config_file: Path) -> None:
    out = chameleon.configured("train", config_file).output_dir
    assert out is not None
    assert (out / "data").is_dir()


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "5"],
        ["--parallel.dp", "1", "--parallel.pp", "9", "--workers", "9"],
        ["--batch.micro-batches", "7"],
        ["--data.path", "nowhere.txt"],
        ["--failures", "3:9"],
        ["--failures", "99:1"],
        ["--timeouts.heartbeat-timeout-s", "99"],
        ["--control.host", "203.0.113.1"],
        ["--control.host", "no.such.host.invalid"],
        ["--job", "nowhere.py:job"],
        ["--steps", "many"],
        ["--stepz", "3"],
        ["--model.dimm", "3"],
    ],
)
def test_bad_input_is_refused(chameleon: CommandLine, config_file: Path, flags: list[str]) -> None:
    message(chameleon.refused("train", config_file, *flags))
    assert not Path("runs").exists()


def test_an_unknown_key_in_the_file_is_refused(chameleon: CommandLine, config_file: Path) -> None:
    config_file.write_text("stepz = 3\n")
    message(chameleon.refused("train", config_file))


@pytest.mark.parametrize("content", ["", "short"])
def test_data_that_is_empty_or_too_short_is_refused(chameleon: CommandLine, tmp_path: Path, content: str) -> None:
    (tmp_path / "data.txt").write_text(content)
    message(chameleon.refused("train", "--data.path", "data.txt"))


def test_ids_beyond_the_vocabulary_are_refused(chameleon: CommandLine, tmp_path: Path) -> None:
    np.full(1000, 300, dtype=np.uint16).tofile(tmp_path / "data.bin")
    message(chameleon.refused("train", "--data.path", "data.bin"))


def test_a_run_directory_that_exists_is_refused(chameleon: CommandLine, config_file: Path, tmp_path: Path) -> None:
    message(chameleon.refused("train", config_file, "--output-dir", tmp_path))


def test_an_address_in_use_is_refused(chameleon: CommandLine, config_file: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert "is in use" in chameleon.refused("train", config_file, "--control.port", port)


def test_a_model_of_the_users_own(chameleon: CommandLine, own_model: Path) -> None:
    config = chameleon.configured("run", "mine.py", "--steps", "7")
    assert (config.job, config.steps) == (str(own_model), 7)
    assert not isinstance(config, TrainConfig)


def test_arguments_of_a_job_are_flags(chameleon: CommandLine, own_model: Path) -> None:
    message(chameleon.refused("run", "mine.py", "--job.lr", "--steps", "7"))
    own_model.with_suffix(".toml").write_text('[job_arguments]\nlr = 0.1\nnorm = "rms"\n')
    flags = ("--job.lr", "3e-4", "--job.hidden-size=8")
    config = chameleon.configured("run", "mine.py", *flags, "--steps", "7", "--output-dir", "run")
    assert config.job_arguments == {"lr": "3e-4", "norm": "rms", "hidden_size": "8"}
    assert config.steps == 7


def test_the_help_of_a_job_lists_its_arguments(chameleon: CommandLine, own_model: Path) -> None:
    own_model.write_text(own_model.read_text().replace("def job():", "def job(lr: float = 0.1, *, depth: int):"))
    assert chameleon("run", "mine.py", "--help") == 0
    listed = chameleon.capture.readouterr().out
    message(listed[: listed.index("usage:")])


def test_the_file_beside_a_script_configures_it(chameleon: CommandLine, own_model: Path, config_file: Path) -> None:
    own_model.with_suffix(".toml").write_text("steps = 33\n")
    assert chameleon.configured("run", "mine.py:job", "--output-dir", "one").steps == 33
    assert chameleon.configured("run", "mine.py", config_file, "--output-dir", "two").steps == 20


def test_a_job_that_turns_out_to_be_wrong_leaves_no_directory(chameleon: CommandLine, own_model: Path) -> None:
    chameleon.error = ConfigError("this job cannot be trained")
    message(chameleon.refused("run", own_model, "--output-dir", "run"))
    assert not Path("run").exists()
    chameleon.error = None
    assert chameleon("run", own_model, "--output-dir", "run") == 0


def test_a_lease_that_cannot_be_used_leaves_no_directory(chameleon: CommandLine, own_model: Path) -> None:
    chameleon.error = LeaseError("no member can be used")
    assert chameleon("run", own_model, "--output-dir", "run") == 1
    assert not Path("run").exists()


def test_what_was_trained_before_a_job_turned_out_to_be_wrong_is_kept(
    chameleon: CommandLine, config_file: Path
) -> None:
    run = finished_run(chameleon, config_file)
    chameleon.error = ConfigError("this job cannot be trained")
    chameleon.refused("train", "--resume", run.path)
    assert RunDirectory.open(run.path).config_file.exists()


def test_a_script_that_does_not_exist_is_refused(chameleon: CommandLine) -> None:
    message(chameleon.refused("run", "nowhere.py"))


def test_resuming_takes_configuration_and_directory_from_the_run(chameleon: CommandLine, config_file: Path) -> None:
    run = finished_run(chameleon, config_file)
    config = chameleon.configured("train", "--resume", run.path, "--workers", "2", "--parallel.dp", "1")
    assert (config.workers, config.steps, config.output_dir) == (2, 20, run.path)
    assert config.failures == (), "what has happened does not happen again"
    assert chameleon.launched[-1].resume
    assert run.config().workers == 4, "nothing is changed before the model is known to be the same"


def test_resuming_may_add_steps(chameleon: CommandLine, config_file: Path) -> None:
    run = finished_run(chameleon, config_file, checkpoint=20)
    message(chameleon.refused("train", "--resume", run.path))
    assert chameleon.configured("train", "--resume", run.path, "--steps", "40").steps == 40


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.dim", "64"],
        ["--seed", "3"],
        ["--batch.micro-batches", "16"],
        ["--optimizer.lr", "1"],
        ["--output-dir", "elsewhere"],
        ["--failures", "3:8"],
    ],
)
def test_a_run_cannot_go_on_as_another_one(chameleon: CommandLine, config_file: Path, flags: list[str]) -> None:
    run = finished_run(chameleon, config_file)
    before = run.config_file.read_text()
    message(chameleon.refused("train", "--resume", run.path, *flags))
    assert run.config_file.read_text() == before


def test_a_run_goes_on_with_other_data_if_told_to(chameleon: CommandLine, config_file: Path, tmp_path: Path) -> None:
    run, other = finished_run(chameleon, config_file), tmp_path / "other.bin"
    np.arange(5_000, dtype=np.uint16).tofile(other)
    resume = ("train", "--resume", run.path, "--data.path", other)
    message(chameleon.refused(*resume))
    accepted = (*resume, "--accept-changes", "data")
    assert "model.vocab_size" in chameleon.refused(*accepted), "ids are checked, as at the start"
    (np.arange(5_000, dtype=np.uint16) % 256).tofile(other)
    assert chameleon.configured(*accepted).accept_changes == ("data",)
    launched = chameleon.launched[-1].config
    assert isinstance(launched, TrainConfig)
    assert load_sources(launched)[0].size == 5_000
    run.write_config(launched)  # as its start does
    assert chameleon.configured("train", "--resume", run.path).accept_changes == (), "for that start alone"


def test_a_run_goes_on_from_a_chosen_step(chameleon: CommandLine, config_file: Path) -> None:
    run = finished_run(chameleon, config_file)
    for step in (4, 8):
        step_directory(run.checkpoints, step).mkdir()
        mark_complete(run.checkpoints, step, model="some model", num_layers=0)
    for flags in (("--from-step", "5"), ("--from-step", "4", "--fork", "--output-dir", "fork", "--seed", "3")):
        message(chameleon.refused("train", "--resume", run.path, *flags))
    message(chameleon.refused("train", config_file, "--from-step", "4"))
    message(chameleon.refused("checkpoint", run.path, "--pin", "best"))
    for step, loss in ((4, 2.0), (8, 1.0)):
        note_evaluation(run.checkpoints, step, {"loss": loss})
    assert chameleon("checkpoint", run.path, "--pin", "best") == 0
    assert pinned_checkpoints(run.checkpoints) == [8]
    message(chameleon.refused("train", "--resume", run.path, "--from-step", "4"))
    assert chameleon("checkpoint", run.path, "--unpin", "8") == 0
    before = complete_checkpoints(run.checkpoints)
    chameleon.error = ConfigError("this job cannot be trained")
    assert chameleon("train", "--resume", run.path, "--from-step", "4") == 2
    assert complete_checkpoints(run.checkpoints) == before
    chameleon.error = None
    chameleon.configured("train", "--resume", run.path, "--fork", "--from-step", "4", "--output-dir", "fork")
    assert chameleon.launched.pop().config.forked.step == 4
    assert complete_checkpoints(run.checkpoints) == before
    chameleon.configured("train", "--resume", run.path, "--from-step", "4")
    assert complete_checkpoints(run.checkpoints) == [4]


def test_samples_are_left_out_where_a_run_goes_on(chameleon: CommandLine, config_file: Path) -> None:
    run = finished_run(chameleon, config_file)
    for step in (4, 8):
        step_directory(run.checkpoints, step).mkdir()
        mark_complete(run.checkpoints, step, model="some model", num_layers=0)
    message(chameleon.refused("train", config_file, "--skip-samples", "5"))
    message(chameleon.refused("train", "--resume", run.path, "--skip-samples", "-1"))

    def resumed(*flags: str) -> RunConfig:
        config = chameleon.configured("train", "--resume", run.path, *flags)
        run.write_config(config)  # as its start does
        return config

    first = resumed("--from-step", "4", "--skip-samples", "5")
    assert first.skips == (Skip(step=4, samples=5),)
    samples = first.batch.samples
    assert [first.first_sample(step) for step in (3, 4, 5)] == [3 * samples, 4 * samples + 5, 5 * samples + 5]
    assert [first.samples_before(step) for step in (4, 5)] == [4 * samples, 5 * samples + 5]
    assert resumed().skips == first.skips, "and so it does when it is resumed again"
    mark_complete(run.checkpoints, 8, model="some model", num_layers=0)
    assert resumed("--skip-samples", "7").skips == (*first.skips, Skip(step=8, samples=7))
    assert resumed("--skip-samples", "6").skips == (*first.skips, Skip(step=8, samples=6)), "instead"
    fork = chameleon.configured("train", "--resume", run.path, "--fork", "--skip-samples", "2", "--output-dir", "fork")
    assert fork.forked.samples == 8 * samples + 5, "as many as its state has seen"
    assert fork.first_sample(8) == 8 * samples + 5 + 2
    assert resumed("--from-step", "4", "--skip-samples", "0").skips == ()


def test_a_run_with_another_job_is_refused(chameleon: CommandLine, config_file: Path, own_model: Path) -> None:
    run = finished_run(chameleon, config_file)
    message(chameleon.refused("run", own_model, "--resume", run.path))


def test_a_run_goes_on_with_its_own_job(chameleon: CommandLine, own_model: Path) -> None:
    config = chameleon.configured("run", own_model, "--output-dir", "run", "--steps", "20")
    run = chameleon.launched.pop().run
    step_directory(run.checkpoints, 10).mkdir()
    mark_complete(run.checkpoints, 10, model="some model", num_layers=0)
    assert chameleon.configured("run", "--resume", "run").job == config.job
    assert chameleon.launched[-1].resume


def test_a_new_run_needs_a_job(chameleon: CommandLine) -> None:
    message(chameleon.refused("run", "--steps", "20"))


def test_a_run_without_a_checkpoint_cannot_go_on(chameleon: CommandLine, config_file: Path) -> None:
    run = finished_run(chameleon, config_file, checkpoint=None)
    message(chameleon.refused("train", "--resume", run.path))


def test_a_run_with_damaged_checkpoints_alone_cannot_go_on_and_the_damage_is_named(
    chameleon: CommandLine, config_file: Path
) -> None:
    run = finished_run(chameleon, config_file)
    (mark,) = run.checkpoints.glob("*/complete.json")
    mark.write_text(mark.read_text()[:-5])
    refused = chameleon.refused("train", "--resume", run.path)
    assert f"no complete checkpoint to resume from ({mark} is not as it was written)" in refused
    assert mark.exists(), "nothing is changed before a run starts"


def test_a_live_run_is_not_started_again(chameleon: CommandLine, config_file: Path) -> None:
    run = finished_run(chameleon, config_file)
    run.write_control(ControlAddress(address="127.0.0.1:1", token="secret", pid=os.getpid()))
    code = os.EX_UNAVAILABLE
    message(chameleon.refused("train", "--resume", run.path, code=code))
    assert "is still live" in chameleon.refused(
        "train", config_file, "--output-dir", run.path, "--resume", "auto", code=code
    )


@pytest.mark.parametrize("change", [{"started": 1}, {"host": "elsewhere"}, {"host": None, "started": None}])
def test_the_number_of_a_living_process_alone_does_not_make_a_run_live(
    chameleon: CommandLine, config_file: Path, change: dict[str, object]
) -> None:
    run = finished_run(chameleon, config_file)
    run.write_control(ControlAddress(address="127.0.0.1:1", token="secret", pid=os.getpid()))
    values = {**json.loads(run.control_file.read_text()), **change}
    run.control_file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    chameleon.knocks = [nothing_listens]
    assert chameleon("train", "--resume", run.path) == 0


def test_a_run_on_another_host_is_live_if_its_coordinator_answers(chameleon: CommandLine, config_file: Path) -> None:
    run = finished_run(chameleon, config_file)
    run.write_control(ControlAddress(address="127.0.0.1:1", token="secret", pid=1))
    values = {**json.loads(run.control_file.read_text()), "host": "elsewhere"}
    run.control_file.write_text(json.dumps(values))
    refused = chameleon.refused("train", "--resume", run.path, code=os.EX_UNAVAILABLE)
    assert "is still live in process 1 on elsewhere" in refused


def test_a_directory_that_is_no_run_cannot_go_on(chameleon: CommandLine, tmp_path: Path) -> None:
    message(chameleon.refused("train", "--resume", tmp_path))


def test_a_coordinator_is_prepared_like_a_run(chameleon: CommandLine, config_file: Path) -> None:
    assert chameleon.configured("coordinator", config_file, "--control.host", "127.0.0.1").steps == 20


def test_unknown_keys_and_flags_are_refused_by_name(
    chameleon: CommandLine, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message(chameleon.refused("train", config_file, "--out", "here"))
    run = finished_run(chameleon, config_file)
    recorded = run.config_file.read_text()
    assert "\nheartbeat_timeout_s = " in recorded
    run.config_file.write_text(recorded.replace("\nheartbeat_timeout_s = ", "\nheartbeat_s = "))
    capsys.readouterr()
    message(chameleon.refused("train", "--resume", run.path, "--steps", "40"))
