"""The processes of a run as a user starts and ends them: nothing is left behind, and strangers are turned away."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from chameleon_ft.cluster import Link
from chameleon_ft.config import Batch, Checkpoint, Control, Parallel, RunConfig
from chameleon_ft.cost.profile import Profile
from chameleon_ft.errors import ProfileError
from chameleon_ft.protocol.address import bearer, websocket_url
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import Exit, Hello, Message, Refused
from chameleon_ft.protocol.parts import Member
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.profiles import write_profile
from chameleon_ft.worker.inspection import inspect_job
from chameleon_ft.workload import LayerCost
from tests.configs import write_config
from tests.harness import (
    Command,
    Ended,
    ScriptedView,
    assert_as_the_plain_loop,
    assert_trained_as_if_nothing_failed,
    create_run,
    every_process_ends,
    fails,
    in_thread,
    resume_here,
    small_config,
    train_here,
)
from tests.histories import StoppingView

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+{}\s"  # the line of a step


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A configuration of a run that goes on until it is ended."""
    return write_config(small_config(tmp_path, steps=100_000, workers=4, parallel=Parallel(dp=2, pp=2)), tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def first_to_end(commands: Sequence[Command]) -> Command:
    """Wait until one of these commands has ended, and return it."""
    watched = {os.pidfd_open(each.pid): each for each in commands}
    try:
        ready, _, _ = select.select(list(watched), [], [], 60.0)
        return watched[ready[0]]
    finally:
        for descriptor in watched:
            os.close(descriptor)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_run_with_a_checkpoint_and_it_can_be_resumed(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path, own_interpreter=True) as training:
        training.read_until(STEP.format(3))
        processes = training.session()
        with every_process_ends(processes):
            training.interrupt_all()  # a terminal sends it to the workers as well
            assert training.wait() == 130
    steps = len(run.steps())
    assert complete_checkpoints(run.checkpoints) == [steps]
    assert not run.control_file.exists()
    with Command("train", "--resume", run.path, "--steps", steps + 2) as resumed:
        assert resumed.wait() == 0, resumed.printed
        with every_process_ends(resumed.session()):
            pass
    assert_as_the_plain_loop(Ended(0, run), steps=60)
    assert len(run.steps()) == steps + 2


def test_a_second_ctrl_c_ends_it_at_once(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with every_process_ends(training.session()):
            training.interrupt_all()
            training.interrupt_all()
            assert training.wait() == 130
    assert "interrupted by the user" in training.printed


def test_sigterm_ends_a_run_with_a_checkpoint_and_asks_to_resume_it(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with every_process_ends(training.session()):
            os.killpg(training.pid, signal.SIGTERM)
            assert training.wait() == os.EX_TEMPFAIL
    ended = Ended(os.EX_TEMPFAIL, run)
    assert complete_checkpoints(run.checkpoints) == [len(run.steps())]
    assert (ended.summary["status"], ended.failures) == ("terminated", [])
    assert_as_the_plain_loop(ended, steps=60)


def test_one_command_starts_a_run_resumes_it_and_has_nothing_left_to_do(tmp_path: Path, run: RunDirectory) -> None:
    config = small_config(tmp_path, steps=60, workers=2, parallel=Parallel(dp=2, pp=1))
    requeued = ("train", write_config(config, tmp_path), "--output-dir", run.path, "--resume", "auto")
    with Command(*requeued) as first:
        first.read_until(STEP.format(3))
        first.signal(signal.SIGTERM)
        assert first.wait() == os.EX_TEMPFAIL
    for printed in ("all steps are trained", "all of its 60 steps are done"):
        with Command(*requeued) as again:
            assert again.wait() == 0
            assert printed in again.printed
    ended = Ended(0, run)
    assert ended.steps == [*range(60)]
    assert_as_the_plain_loop(ended)


def test_of_commands_that_start_or_resume_a_run_at_once_one_does(tmp_path: Path, run: RunDirectory) -> None:
    config = small_config(tmp_path, steps=100_000, workers=2, parallel=Parallel(dp=2, pp=1))
    requeued = ("train", write_config(config, tmp_path), "--output-dir", run.path, "--resume", "auto")
    for _ in range(2):  # it is started, and then resumed
        with ExitStack() as stack:
            both = [stack.enter_context(Command(*requeued)) for _ in range(2)]
            loser = first_to_end(both)
            (winner,) = (each for each in both if each is not loser)
            assert loser.wait() == os.EX_UNAVAILABLE, loser.printed
            assert f"{run.path}: this run is still live in process" in loser.printed
            winner.read_until(STEP.format(r"\d+"))
            with Command(*requeued) as beside:
                assert beside.wait() == os.EX_UNAVAILABLE, beside.printed
            winner.signal(signal.SIGTERM)
            assert winner.wait() == os.EX_TEMPFAIL, winner.printed
    ended = Ended(os.EX_TEMPFAIL, run)
    assert ended.steps == [*range(len(ended.steps))]
    assert len(ended.events("started")) == 2
    assert not list(tmp_path.glob("run-before-*")), "the directory of the other one is left alone"
    assert not (run.path / "lock").exists()


def test_an_agent_may_come_before_its_coordinator(tmp_path: Path, run: RunDirectory) -> None:
    config = small_config(tmp_path, steps=5, workers=2, parallel=Parallel(dp=2, pp=1))
    with Command("agent", "--run", run.path, "--workers", "2") as host:
        host.read_until("waiting up to 300 s for the coordinator of")
        with Command("coordinator", write_config(config, tmp_path), "--output-dir", run.path) as coordinator:
            assert coordinator.wait() == host.wait() == 0, host.printed


def test_a_token_that_machines_have_in_common_and_the_address_that_is_routed(tmp_path: Path, run: RunDirectory) -> None:
    config = small_config(tmp_path, workers=2, steps=4, parallel=Parallel(dp=2, pp=1), control=Control(host="auto"))
    secret = {"CHAMELEON_TOKEN": "a-secret-of-all-machines"}
    file = write_config(config, tmp_path)
    with Command("coordinator", file, "--output-dir", run.path, environ=secret) as coordinator:
        coordinator.read_until("waiting for 2 workers")
        control = run.read_control()
        assert control.token == secret["CHAMELEON_TOKEN"]
        assert control.token not in coordinator.printed
        with Command("agent", "--coordinator", control.address, "--workers", "2", environ=secret) as agent:
            assert (coordinator.wait(), agent.wait()) == (0, 0), coordinator.printed + agent.printed


def test_a_killed_coordinator_leaves_no_process_behind(tmp_path: Path, run: RunDirectory) -> None:
    # Not even a worker that is stopped, and cannot see that it has become an orphan.
    config = small_config(tmp_path, steps=100_000, failures=(fails(2, step=4, kind="hang"),))
    with Command("train", write_config(config, tmp_path), "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with every_process_ends(training.session()):
            training.signal(signal.SIGKILL)
            assert training.wait() == -signal.SIGKILL
    assert run.control_file.exists(), "it had no time to withdraw it"
    with Command("inject", run.path, "--worker", "1") as injecting:
        assert injecting.wait() == 2
        assert "this run is not live any more" in injecting.printed


def test_by_default_a_killed_coordinator_loses_only_the_steps_since_a_checkpoint(
    tmp_path: Path, run: RunDirectory
) -> None:
    layout = {"workers": 4, "parallel": Parallel(dp=2, pp=2)}
    config = small_config(tmp_path, steps=100_000, checkpoint=Checkpoint(), **layout)
    with Command("train", write_config(config, tmp_path), "--output-dir", run.path) as training:
        step = 0
        while not complete_checkpoints(run.checkpoints):
            training.read_until(STEP.format(step))
            step += 1
        with every_process_ends(training.session()):
            training.signal(signal.SIGKILL)
            training.wait()
    (newest,) = complete_checkpoints(run.checkpoints)
    killed_at = len(run.steps())
    view = StoppingView(run, lambda ended: ended.steps[-1] >= killed_at, more_steps=2)
    resumed = resume_here(Ended(0, run), view=view)
    assert resumed.code == 130
    assert resumed.steps[: killed_at + 1] == [*range(killed_at), newest]
    assert_as_the_plain_loop(resumed, steps=60)


def test_a_failure_is_injected_by_a_command(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with Command("inject", run.path, "--worker", "2", "--kind", "kill") as injecting:
            assert injecting.wait() == 0, injecting.printed
        assert training.read_until(r"worker (\d+) lost")[1] == "2"
        training.interrupt_all()
        assert training.wait() == 130
    ended = Ended(130, run)
    assert [(failure.worker, failure.cause) for failure in ended.failures] == [(2, "SIGKILL")]
    assert_as_the_plain_loop(ended, steps=60)


# --- strangers -------------------------------------------------------------------------------------------------------


def test_strangers_are_refused_and_logged_and_training_goes_on(tmp_path: Path, run: RunDirectory) -> None:
    answers: dict[str, str] = {}

    def bother() -> None:
        control = run.read_control()
        try:
            connect(websocket_url(control.address), additional_headers=bearer("wrong"), proxy=None)
        except InvalidStatus as error:
            answers["token"] = str(error.response.status_code)
        said: dict[str, Message | str] = {
            "garbage": "hello?",
            "role": Exit(reason="stop it"),
            "second worker": Hello(member=Member(1, 0), host="10.0.0.9"),
            "unknown worker": Hello(member=Member(6, 0), host="10.0.0.9"),
        }
        for name, message in said.items():
            with connect(
                websocket_url(control.address), additional_headers=bearer(control.token), proxy=None
            ) as connection:
                connection.send(message if isinstance(message, str) else encode(message))
                answer = decode(connection.recv())
                assert isinstance(answer, Refused)
                answers[name] = answer.reason
                with pytest.raises(ConnectionClosed):
                    connection.recv()
        done.set()

    done = threading.Event()
    view = ScriptedView(at_step={2: in_thread(bother), 3: lambda: None})
    config = small_config(tmp_path, steps=60)
    ended = train_here(config, run.path, view=view)
    assert done.is_set(), f"it was answered only {answers}"
    assert answers == {
        "token": "401",
        "garbage": answers["garbage"],
        "role": "'exit' from a peer that has not joined",
        "second worker": "worker 1 has joined already",
        "unknown worker": "worker 6 does not exist: the run has 6, numbered from 0",
    }
    assert answers["garbage"].startswith("not a message of this protocol")
    assert [event["reason"] for event in ended.events("refused")] == [
        "wrong join token",
        *(answers[name] for name in ("garbage", "role", "second worker", "unknown worker")),
    ]
    assert (ended.code, ended.failures) == (0, [])
    assert_as_the_plain_loop(ended, steps=60)


# --- what cannot be started ------------------------------------------------------------------------------------------


def test_a_job_that_cannot_be_loaded_starts_no_worker(tmp_path: Path) -> None:
    job = tmp_path / "broken.py"
    job.write_text("import no_such_module\n")
    config = RunConfig(job=str(job), workers=2, parallel=Parallel(dp=1, pp=2), batch=Batch(micro_batches=2))
    with pytest.raises(Exception, match="no_such_module"):
        train_here(config, tmp_path / "run")


def test_a_host_without_the_device_starts_no_worker(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("it may have one")
    config = write_config(small_config(tmp_path, steps=2).model_copy(update={"device": "npu"}), tmp_path)
    with Command("train", config, "--output-dir", tmp_path / "run") as training:
        training.read_until('warning: device = "npu" with backend = "gloo" has not been run on any Ascend NPU yet')
        training.read_until('chameleon train: device = "npu": the package torch_npu is not installed')
        assert training.wait() == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("made_for", "message"),
    [
        ({}, None),
        ({"model": "0123"}, "is of another model: it was made for '0123'"),
        ({"dtype": "bfloat16"}, "is of another dtype: it was made for 'bfloat16', and is to be used for 'float32'"),
        ({"device": "NVIDIA H100"}, "is of another device: it was made for 'NVIDIA H100'"),
        ({"threads": 2}, "is of another threads: it was made for 2, and is to be used for 1"),
        ({"versions": {"torch": "1.0"}}, "is of another version of"),
    ],
)
def test_a_profile_of_something_else_starts_no_worker(
    made_for: dict[str, object], message: str | None, tmp_path: Path
) -> None:
    config = small_config(tmp_path, steps=2)
    job = inspect_job(config)
    layers = tuple(LayerCost(f"layer {index}", 1e-3, 1e-3, 1e-3) for index in range(job.num_layers))
    profile = Profile(
        name="the one of the test",
        fingerprint=replace(job.profiled_as(config), **made_for),  # type: ignore[arg-type]
        source="measured",
        provenance="by hand",
        layers=layers,
        intra_host=Link(1e-4, 1e9),
    )
    write_profile(profile, tmp_path / "profile.json")
    config = config.model_copy(update={"profile": tmp_path / "profile.json"})
    if message is None:
        assert_trained_as_if_nothing_failed(train_here(config, tmp_path / "run"))
        return
    with pytest.raises(ProfileError, match=message):
        train_here(config, tmp_path / "run")
    assert not list((tmp_path / "run" / "logs").iterdir())


def test_runs_follow_each_other_in_one_process(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=3, workers=2, parallel=Parallel(dp=1, pp=2))
    for number in range(3):
        assert_trained_as_if_nothing_failed(train_here(config, tmp_path / f"run-{number}"))
    assert create_run(config, tmp_path / "run-3").steps() == []
