"""Requests to the coordinator of a live run, over a real connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from threading import Thread

import pytest
from websockets.sync.server import ServerConnection, serve

from chameleon_ft.config import Control, TrainConfig
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.launch import live_run as asking
from chameleon_ft.launch.live_run import (
    checkpoint,
    drain,
    inject,
    stop,
    wait_until_out,
    wait_until_over,
    wait_until_saved,
)
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import CheckpointState, Drain, Finish, Inject, Message, Refused, SaveCheckpoint
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.golden import refused
from tests.report.records import failure_record


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose records have a damaged line."""
    run = RunDirectory.create(tmp_path / "run", TrainConfig(control=Control(lease_s=0.2)))
    run.events_file.write_bytes(bytes(60) + b"\n")
    return run


@contextmanager
def live(run: RunDirectory, answer: Callable[[Message], Message] | None = None) -> Iterator[list[Message]]:
    """Have a coordinator give this answer inside the block, or else none; return the requests that it gets."""
    requests: list[Message] = []

    def handler(connection: ServerConnection) -> None:
        for text in connection:
            requests.append(decode(text))
            if answer is not None:
                connection.send(encode(answer(requests[-1])))

    with serve(handler, "127.0.0.1", 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        run.write_control(ControlAddress(address=f"127.0.0.1:{server.socket.getsockname()[1]}", token="t", pid=1))
        try:
            yield requests
        finally:
            server.shutdown()
            thread.join()


def record(run: RunDirectory, *events: dict[str, object]) -> None:
    with run.events_file.open("a") as file:
        file.writelines(json.dumps({"time": 1.0, **event}) + "\n" for event in events)


def test_drained_are_the_workers_that_the_coordinator_names(run: RunDirectory) -> None:
    with live(run, lambda _: Drain(workers=(2, 3))) as requests:
        assert drain(run, workers=[3, 2, 3]) == (2, 3)
        assert drain(run, host="10.0.0.2") == (2, 3)
    assert requests == [Drain(workers=(2, 3)), Drain(host="10.0.0.2")]


def test_a_refusal_is_an_error(run: RunDirectory) -> None:
    with live(run, lambda _: Refused(reason="none would be left")):
        with refused(ControlError):
            drain(run, workers=[0])
        with refused(ControlError):
            inject(run, worker=0, kind="kill", phase=None, step=None)


def test_a_step_without_a_phase_is_its_forward(run: RunDirectory) -> None:
    with live(run, lambda message: message) as requests:
        inject(run, worker=1, kind="hang", phase=None, step=7)
    assert requests == [Inject(worker=1, kind="hang", phase="forward", step=7)]


def test_a_run_that_is_not_live_is_named(run: RunDirectory) -> None:
    with refused(ConfigError):
        drain(run, workers=[0])
    with live(run):
        pass
    with refused(ConfigError):
        drain(run, workers=[0])


def test_it_waits_until_each_worker_is_drained_or_lost(run: RunDirectory) -> None:
    record(run, {"event": "drained", "worker": 3}, {"event": "checkpoint", "step": 9})
    with live(run):
        waiting = Thread(target=wait_until_out, args=(run, (1, 2, 3)), kwargs={"after": 1}, daemon=True)
        waiting.start()
        drained: list[dict[str, object]] = [{"event": "drained", "worker": worker} for worker in (1, 3)]
        joined: dict[str, object] = {"event": "joined", "worker": 2, "host": "10.0.0.2"}
        for event in (drained[0], joined, drained[1], failure_record(9, worker=2).to_json()):
            waiting.join(timeout=0.3)
            assert waiting.is_alive()
            record(run, event)
        waiting.join()


def test_it_does_not_wait_for_workers_that_stay(run: RunDirectory) -> None:
    record(run, {"event": "drained", "worker": 1}, {"event": "drain_failed", "workers": [2, 4], "reason": "no memory"})
    with live(run):
        wait_until_out(run, (1,), after=0)
        with refused(ControlError):
            wait_until_out(run, (1, 2), after=0)


def test_it_waits_no_longer_than_the_run(run: RunDirectory) -> None:
    with live(run):
        waiting = Thread(target=wait_until_out, args=(run, (1,)), kwargs={"after": 0}, daemon=True)
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive()
        run.remove_control()
    waiting.join()
    wait_until_out(run, (1,), after=0)


def test_it_waits_for_the_successor_of_a_coordinator_that_is_lost(run: RunDirectory) -> None:
    with live(run):
        waiting = Thread(target=wait_until_out, args=(run, (1,)), kwargs={"after": 0}, daemon=True)
        waiting.start()
        waiting.join(timeout=0.3)
    with refusing(run, HTTPStatus.SERVICE_UNAVAILABLE):
        waiting.join(timeout=0.3)
        assert waiting.is_alive()
    with live(run):
        record(run, {"event": "drained", "worker": 1})
        waiting.join()


@contextmanager
def refusing(run: RunDirectory, status: HTTPStatus) -> Iterator[None]:
    """Have something at the address of the coordinator refuse connections inside the block."""
    with serve(lambda _: None, "127.0.0.1", 0, process_request=lambda c, _: c.respond(status, "no")) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        run.write_control(ControlAddress(address=f"127.0.0.1:{server.socket.getsockname()[1]}", token="t", pid=1))
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_a_coordinator_that_does_not_lead_or_answer_is_no_run_that_is_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing(run, HTTPStatus.UNAUTHORIZED), refused(ConfigError):
        drain(run, workers=[1])
    with refusing(run, HTTPStatus.SERVICE_UNAVAILABLE), refused(ControlError):
        drain(run, workers=[0])
    monkeypatch.setattr(asking, "_ANSWER_TIMEOUT_S", 0.2)
    with live(run) as received, refused(ControlError):
        drain(run, workers=[0])
    assert received == [Drain(workers=(0,))]


def test_a_coordinator_that_is_lost_is_reported(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_ENDING_S", 0.2)
    with live(run):
        pass
    with refused(ConfigError):
        wait_until_out(run, (1,), after=0)


def test_a_checkpoint_and_the_end_are_asked_for(run: RunDirectory) -> None:
    with live(run, lambda message: SaveCheckpoint(committed=7) if message == SaveCheckpoint() else message) as requests:
        assert checkpoint(run) == 7
        stop(run)
        stop(run, at_once=True)
    assert requests == [SaveCheckpoint(), Finish(), Finish(at_once=True)]
    with live(run, lambda _: Refused(reason="it has not begun")), refused(ControlError):
        checkpoint(run)


def test_it_waits_for_the_checkpoint_that_was_asked_for(run: RunDirectory) -> None:
    record(run, {"event": "checkpoint", "step": 9}, {"event": "checkpoint", "step": 6})
    with live(run):
        waiting = Thread(target=wait_until_saved, args=(run, 7), kwargs={"after": 1}, daemon=True)
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive(), "those before do not count"
        record(run, {"event": "checkpoint", "step": 8})
        waiting.join()
        assert wait_until_saved(run, 7, after=1) == 8
        record(run, {"event": "checkpoint_failed", "step": 9, "error": "disk full"})
        with refused(ControlError):
            wait_until_saved(run, 9, after=1)


def test_what_the_files_of_a_run_cannot_tell_its_coordinator_does(run: RunDirectory) -> None:
    """Of a checkpoint that cannot be written because the disk is full, nothing can be written either."""
    why = "[Errno 28] No space left on device, at events.jsonl"
    answers = [CheckpointState(committed=7), *[CheckpointState(committed=7, late=why)] * 2]
    failed = CheckpointState(committed=7, failed=(9, "disk full"), late=why)
    told: list[str] = []
    with (
        live(run, lambda _: answers.pop(0) if answers else failed) as requests,
        refused(ControlError),
    ):
        wait_until_saved(run, 7, after=0, delayed=told.append)
    assert told == [why]
    assert requests == [CheckpointState(committed=7)] * 4


def test_a_run_may_be_over_before_it_says_so(run: RunDirectory) -> None:
    with live(run):
        pass
    waiting = Thread(target=wait_until_over, args=(run,), daemon=True)
    waiting.start()
    waiting.join(timeout=0.3)
    assert waiting.is_alive(), "its end may be on the way"
    run.remove_control()
    waiting.join()


def test_it_waits_for_the_end(run: RunDirectory) -> None:
    with live(run):
        waiting = Thread(target=wait_until_over, args=(run,), daemon=True)
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive()
        run.remove_control()
    waiting.join()
