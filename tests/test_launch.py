"""The processes of a run as a user starts and ends them: nothing is left behind, and strangers are turned away."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

from chameleon_ft.cluster import Link
from chameleon_ft.config import Batch, Checkpoint, Control, Parallel, RunConfig, Timeouts, config_to_toml
from chameleon_ft.control.wire.address import bearer, websocket_url
from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.messages import Acknowledged, Drain, Exit, Hello, HostHello, Message, Refused, Spawn
from chameleon_ft.errors import ProfileError
from chameleon_ft.observe import RunDirectory, complete_checkpoints
from chameleon_ft.profiles import Profile, write_profile
from chameleon_ft.runtime.inspection import inspect_job
from chameleon_ft.workload import LayerCost
from tests.harness import (
    Command,
    Ended,
    ScriptedView,
    StoppingView,
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

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+{}\s"  # the line of a step


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A configuration of a run that goes on until it is ended."""
    return written(small_config(tmp_path, steps=100_000, workers=4, parallel=Parallel(dp=2, pp=2)), tmp_path)


def written(config: RunConfig, directory: Path) -> Path:
    path = directory / "config.toml"
    path.write_text(config_to_toml(config))
    return path


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
    requeued = ("train", written(config, tmp_path), "--output-dir", run.path, "--resume", "auto")
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
    requeued = ("train", written(config, tmp_path), "--output-dir", run.path, "--resume", "auto")
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
        with Command("coordinator", written(config, tmp_path), "--output-dir", run.path) as coordinator:
            assert coordinator.wait() == host.wait() == 0, host.printed


def test_a_token_that_machines_have_in_common_and_the_address_that_is_routed(tmp_path: Path, run: RunDirectory) -> None:
    config = small_config(tmp_path, workers=2, steps=4, parallel=Parallel(dp=2, pp=1), control=Control(host="auto"))
    secret = {"CHAMELEON_TOKEN": "a-secret-of-all-machines"}
    with Command("coordinator", written(config, tmp_path), "--output-dir", run.path, environ=secret) as coordinator:
        coordinator.read_until("waiting for 2 workers")
        control = run.read_control()
        assert control.token == secret["CHAMELEON_TOKEN"]
        assert control.token not in coordinator.printed
        with Command("agent", "--coordinator", control.address, "--workers", "2", environ=secret) as agent:
            assert (coordinator.wait(), agent.wait()) == (0, 0), coordinator.printed + agent.printed


def test_sigterm_before_training_ends_at_once(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path, own_interpreter=True) as training:
        while not training.session()[1:]:
            pass
        with every_process_ends(training.session()):
            os.killpg(training.pid, signal.SIGTERM)
            assert training.wait() == os.EX_TEMPFAIL, training.printed
    assert not run.path.exists()


def test_a_killed_coordinator_leaves_no_process_behind(tmp_path: Path, run: RunDirectory) -> None:
    # Not even a worker that is stopped, and cannot see that it has become an orphan.
    config = small_config(tmp_path, steps=100_000, failures=(fails(2, step=4, kind="hang"),))
    with Command("train", written(config, tmp_path), "--output-dir", run.path) as training:
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
    with Command("train", written(config, tmp_path), "--output-dir", run.path) as training:
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
            "second worker": Hello(worker=1, host="10.0.0.9"),
            "unknown worker": Hello(worker=6, host="10.0.0.9"),
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


# --- workers that a launcher starts ----------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path: Path, run: RunDirectory) -> Iterator[Command]:
    config = small_config(
        tmp_path,
        steps=100_000,
        workers=3,
        parallel=Parallel(dp=3, pp=1),
        batch=Batch(micro_batches=6),
        timeouts=Timeouts(reconnect_s=2.0),
    )
    with Command("coordinator", written(config, tmp_path), "--output-dir", run.path) as command:
        yield command


def test_workers_started_directly(coordinator: Command, run: RunDirectory) -> None:
    found = coordinator.read_until(r"CHAMELEON_TOKEN=(\S+) chameleon agent --coordinator (\S+)")
    environ = {"WORLD_SIZE": "3", "CHAMELEON_TOKEN": run.read_control().token}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                Command(
                    "worker", "--coordinator", found[2], environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
            )
            for rank in range(3)
        ]
        coordinator.read_until(STEP.format(3))
        os.kill(workers[1].pid, signal.SIGKILL)
        lost_in = int(coordinator.read_until(r"worker 1 lost in step (\d+)")[1])
        coordinator.read_until(STEP.format(lost_in + 2))
        again = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}
        with Command("worker", "--run", run.path, environ=again, own_interpreter=True) as late:
            coordinator.read_until("worker 1 has joined as a spare")
            with Command("worker", "--run", run.path, environ=again) as second:
                assert second.wait() == 1
                assert "worker 1 is refused: worker 1 has joined already" in second.printed
            with Command("agent", "--run", run.path, "--workers", "1") as host:
                coordinator.read_until("worker 3 has joined as a spare")
                coordinator.signal(signal.SIGINT)
                assert coordinator.wait() == 130
                assert host.wait() == 0, host.printed
            assert late.wait() == 0, late.printed
        assert [worker.wait() for worker in workers] == [0, -signal.SIGKILL, 0]
    ended = Ended(130, run)
    assert ended.lost == {1}
    assert ended.failures[0].noticed_by in ("connection", "peer")
    assert_as_the_plain_loop(ended, steps=60)


def test_sigterm_drains_workers_started_directly(coordinator: Command, run: RunDirectory) -> None:
    coordinator.read_until("waiting for 3 workers")
    with ExitStack() as stack:
        first, *others = [
            stack.enter_context(
                Command("worker", "--run", run.path, environ={"RANK": rank, "WORLD_SIZE": "3", "LOCAL_RANK": rank})
            )
            for rank in "012"
        ]
        coordinator.read_until(STEP.format(3))
        for worker in others:
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0, worker.printed
        first.signal(signal.SIGTERM)
        assert first.wait() == coordinator.wait() == os.EX_TEMPFAIL
    ended = Ended(os.EX_TEMPFAIL, run)
    assert {event["worker"] for event in ended.events("drained")} == {1, 2}
    assert ended.lost == set()
    assert complete_checkpoints(run.checkpoints) == [len(run.steps())]
    assert_as_the_plain_loop(ended, steps=60)


def test_workers_end_with_a_coordinator_that_is_killed(coordinator: Command, run: RunDirectory) -> None:
    found = coordinator.read_until(r"CHAMELEON_TOKEN=(\S+) chameleon agent --coordinator (\S+)")
    environ = {"CHAMELEON_TOKEN": run.read_control().token}
    with Command("agent", "--coordinator", found[2], "--workers", "3", environ=environ) as host:
        coordinator.read_until(STEP.format(1))
        with every_process_ends([*coordinator.session(), *host.session()]):
            coordinator.signal(signal.SIGKILL)
            assert coordinator.wait() == -signal.SIGKILL
            assert host.wait() == 1
        assert "the connection to the coordinator is lost" in host.printed


# --- drained hosts ---------------------------------------------------------------------------------------------------


def acknowledged(connection: int) -> Acknowledged:
    return Acknowledged(connection=connection, received=0, term=1, lease_s=30.0, reconnect_s=0.0)


@contextmanager
def coordinator_that(*, drains: bool) -> Iterator[tuple[str, threading.Event]]:
    """Run a coordinator that has an agent start worker 0, and drains it or never does.

    Yields its address, and an event that is set once the worker has joined.
    """
    ranks: list[ServerConnection] = []
    has_joined = threading.Event()

    def handler(connection: ServerConnection) -> None:
        for text in connection:
            match decode(text):
                case HostHello():
                    connection.send(
                        encode(Acknowledged(connection=1, received=0, term=1, lease_s=30.0, reconnect_s=0.0))
                    )
                    connection.send(encode(Spawn(workers=(0,), incarnations=(1,))))
                case Hello():
                    connection.send(
                        encode(Acknowledged(connection=2, received=0, term=1, lease_s=30.0, reconnect_s=0.0))
                    )
                    ranks.append(connection)
                    has_joined.set()
                case Drain() if drains:
                    connection.send(encode(Drain(workers=(0,))))
                    for member in {*ranks, connection}:
                        with suppress(ConnectionClosed):  # a rank that has been told before
                            member.send(encode(Exit(reason="drained", is_drained=True)))

    with serve(handler, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.socket.getsockname()[1]}", has_joined
        finally:
            server.shutdown()
            thread.join()


def test_sigterm_drains_the_workers_of_an_agent() -> None:
    with (
        coordinator_that(drains=True) as (address, has_joined),
        Command("agent", "--coordinator", address, "--workers", "1", "--token", "t") as host,
    ):
        assert has_joined.wait(60)
        with every_process_ends(host.session()):
            os.killpg(host.pid, signal.SIGTERM)  # a batch system sends it to the workers as well
            assert host.wait() == 0, host.printed
        assert "draining the workers of this agent" in host.printed


def test_a_second_sigterm_ends_an_agent_whose_workers_do_not_leave() -> None:
    with (
        coordinator_that(drains=False) as (address, has_joined),
        Command("agent", "--coordinator", address, "--workers", "1", "--token", "t") as host,
    ):
        assert has_joined.wait(60)
        with every_process_ends(host.session()):
            host.signal(signal.SIGTERM)
            host.read_until("draining the workers of this agent")
            time.sleep(1.1)  # signals that come earlier are the same one
            host.signal(signal.SIGTERM)
            assert host.wait() == os.EX_TEMPFAIL


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
    config = tmp_path / "run.toml"
    config.write_text(config_to_toml(small_config(tmp_path, steps=2).model_copy(update={"device": "npu"})))
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
