"""`--resume auto`: one command that starts a run, resumes it, and has nothing left to do."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import NoReturn

import pytest

from chameleon_ft.config import RunConfig, TrainConfig
from chameleon_ft.data import corpus
from chameleon_ft.errors import ConfigError, DataError
from chameleon_ft.storage.checkpoints import mark_complete
from chameleon_ft.storage.files import RunDirectory
from tests.cli.conftest import CommandLine
from tests.golden import message
from tests.stored import step_directory


def auto(config_file: Path, *flags: str) -> list[str | Path]:
    return ["train", config_file, "--output-dir", "here", "--resume", "auto", *flags]


def stop_after_checkpoint(step: int) -> RunDirectory:
    """Write a checkpoint of the run in the directory, as one that has stopped after it."""
    run = RunDirectory.open(Path("here"))
    step_directory(run.checkpoints, step).mkdir()
    mark_complete(run.checkpoints, step, model="some model", num_layers=0)
    return run


def test_auto_starts_a_run_and_resumes_it(chameleon: CommandLine, config_file: Path) -> None:
    chameleon.configured(*auto(config_file))
    run = stop_after_checkpoint(10)
    config = chameleon.configured(*auto(config_file, "--steps", "40"))
    assert [each.resume for each in chameleon.launched] == [False, True]
    assert (config.output_dir, config.steps) == (run.path, 40)
    assert config.failures == (), "what has happened does not happen again"
    chameleon.launched.clear()
    message(chameleon.refused(*auto(config_file, "--seed", "3")))


def test_a_directory_whose_data_cannot_be_written_is_removed(
    chameleon: CommandLine, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise DataError("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "prepare_data", fail)
        assert "no space is left" in chameleon.refused("train", config_file, "--output-dir", "here")
    assert not Path("here").exists()
    chameleon.configured("train", config_file, "--output-dir", "here")


def no_locks(*_: object) -> NoReturn:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("comes", ["before it looks for files", "before it writes"])
def test_where_there_are_no_locks_a_start_of_another_host_has_precedence(
    chameleon: CommandLine, config_file: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    if comes == "before it writes":

        def create(path: Path, _: RunConfig) -> NoReturn:
            (path / "lock").write_text("process 7 on elsewhere\n")
            raise ConfigError("it cannot be made")

        monkeypatch.setattr(RunDirectory, "create", create)
    else:
        check_data = corpus.check_data

        def check(config: TrainConfig) -> corpus.DataSummary:
            (Path("here") / "lock").write_text("process 7 on elsewhere\n")
            (Path("here") / "config.toml").touch()
            return check_data(config)

        monkeypatch.setattr(corpus, "check_data", check)
    told = chameleon.refused(*auto(config_file), code=os.EX_UNAVAILABLE)
    assert "here: this run is still live in process 7 on elsewhere; wait" in told


def test_a_file_that_appears_in_the_directory_meanwhile_is_kept(
    chameleon: CommandLine, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_data = corpus.check_data

    def check(config: TrainConfig) -> corpus.DataSummary:
        (Path("here") / "output.txt").touch()
        return check_data(config)

    monkeypatch.setattr(corpus, "check_data", check)
    message(chameleon.refused(*auto(config_file)))
    assert (Path("here") / "output.txt").exists()


def test_auto_has_nothing_to_do_once_all_steps_are_done(chameleon: CommandLine, config_file: Path) -> None:
    chameleon.configured(*auto(config_file))
    stop_after_checkpoint(20)
    chameleon.launched.clear()
    assert chameleon(*auto(config_file)) == 0
    assert chameleon.launched == []
    assert chameleon.capture.readouterr().out.endswith("all of its 20 steps are done\n")


@pytest.mark.parametrize("begun", ["empty", "killed", "trained"])
def test_auto_begins_anew_without_a_checkpoint_and_keeps_the_files(
    chameleon: CommandLine, config_file: Path, begun: str
) -> None:
    here = Path("here")
    if begun == "trained":
        chameleon.configured(*auto(config_file))
        (here / "metrics.jsonl").write_text("")
    else:
        here.mkdir()
    if begun == "killed":  # before it had written its configuration
        (here / "checkpoints").mkdir()
        (here / ".config.toml.7").touch()
    chameleon.configured(*auto(config_file))
    assert not chameleon.launched[-1].resume
    kept = list(Path().glob("here-before-*"))
    assert len(kept) == (0 if begun == "empty" else 1)
    assert begun != "trained" or (kept[0] / "metrics.jsonl").exists()


def test_auto_needs_a_directory_that_is_that_of_a_run(chameleon: CommandLine, config_file: Path) -> None:
    message(chameleon.refused("train", config_file, "--resume", "auto"))
    Path("here").mkdir()
    Path("here/thesis.txt").write_text("")
    message(chameleon.refused(*auto(config_file)))
    assert Path("here/thesis.txt").exists()


def test_auto_does_not_begin_anew_beside_damaged_checkpoints(chameleon: CommandLine, config_file: Path) -> None:
    chameleon.configured(*auto(config_file))
    run = stop_after_checkpoint(10)
    (mark,) = (path for path in run.checkpoints.rglob("*") if path.is_file())
    mark.write_text("{")
    chameleon.launched.clear()
    message(chameleon.refused(*auto(config_file)))
