"""A run that is watched through its coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError

from chameleon_ft.coordinator.peers import read_part
from chameleon_ft.errors import ControlError
from chameleon_ft.launch import live_run as remote_run
from chameleon_ft.launch.live_run import remote_watcher
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import ReadRunFile
from chameleon_ft.storage.files import RunDirectory
from tests.golden import refused
from tests.report.live.lines import add, new_run, started, stepped


class Coordinator:
    """Answers as the coordinator of a run does, until it is lost."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._answers: list[str | bytes] = []
        self.is_lost = False

    def send(self, text: str | bytes) -> None:
        if self.is_lost:
            raise ConnectionClosedError(None, None)
        request = decode(text)
        assert isinstance(request, ReadRunFile)
        self._answers.append(encode(read_part(self._run, request)))

    def recv(self, timeout: float) -> str | bytes:
        return self._answers.pop()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    run = new_run(tmp_path)
    add(run, started(), stepped(0, 1.0))
    coordinator = Coordinator(run)
    connect: Callable[..., Any] = lambda *_, **__: coordinator  # noqa: E731
    monkeypatch.setattr(remote_run, "blocking_connection", connect)
    return coordinator


def test_a_coordinator_that_is_lost_is_named(coordinator: Coordinator) -> None:
    with remote_watcher("10.0.0.1:1", "token", tls=None) as watcher:
        watcher.update()
        last = watcher.report().last
        assert last is not None
        assert last.step == 0
        coordinator.is_lost = True
        with refused(ControlError):
            watcher.update()


def test_an_output_that_is_closed_is_not_the_coordinators_fault(coordinator: Coordinator) -> None:
    with pytest.raises(BrokenPipeError), remote_watcher("10.0.0.1:1", "token", tls=None):
        raise BrokenPipeError  # as `print` does
