"""Coordinators that die again and again, and the launcher that replaces them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from chameleon_ft.config import TrainConfig
from chameleon_ft.coordinator.events import Moment
from chameleon_ft.coordinator.journal import Journal
from chameleon_ft.launch import local
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.coordinator.histories import new_state
from tests.stored import event_lines

OWN, ELSEWHERE = "127.0.0.1:4000", "127.0.0.2:4000"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run", TrainConfig())
    run.write_control(ControlAddress(address=OWN, token="t", pid=1))
    return run


def write_journal(run: RunDirectory, *standbys: str) -> None:
    with FileQueue() as files:
        state = replace(new_state(), standbys=dict(enumerate(standbys)))
        Journal(run.journal_file(1), files).begin(state, Moment(unix_s=1.0, monotonic_s=1.0))


@pytest.fixture
def launched(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> tuple[local._Launcher, list[bool]]:
    """Return a launcher, and for each coordinator that it starts whether that one gives way to others."""
    started: list[bool] = []

    def start_child(target: Callable[..., None]) -> MagicMock:
        assert isinstance(target, partial)
        started.append(target.keywords["gives_way"])
        return MagicMock(process=MagicMock(exitcode=-signal.SIGKILL))

    monkeypatch.setattr(local, "ForkedProcess", start_child)
    config = SimpleNamespace(steps=9, control=SimpleNamespace(lease_s=3.0))
    control = ControlAddress(address=OWN, token="t", pid=1)
    start = SimpleNamespace(run=run, config=config)
    launcher = local._Launcher(start, control, MagicMock(), MagicMock(), MagicMock())  # type: ignore[arg-type]
    launcher._start_coordinator()
    return launcher, started


def lose_coordinators(launcher: local._Launcher, number: int) -> list[str | None]:
    """Have so many coordinators die; return how the run ended after each, None if it goes on."""
    ends: list[str | None] = []
    for _ in range(number):
        assert launcher._coordinator is not None
        ends.append(launcher._replace(launcher._coordinator))
    return ends


def test_a_run_is_left_to_a_coordinator_that_stands_by(
    run: RunDirectory, launched: tuple[local._Launcher, list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, started = launched
    write_journal(run, ELSEWHERE)
    assert lose_coordinators(launcher, 3) == [None] * 3
    assert started == [False, False, False, True]
    assert capsys.readouterr().out.endswith(
        "3 coordinators have died without a step between them, the last one by SIGKILL; the run is left to the one "
        f"that stands by at {ELSEWHERE}\n"
    )
    launcher._agent.kill.assert_not_called()  # type: ignore[attr-defined]
    assert lose_coordinators(launcher, 1) == ["failed"]


def test_without_one_the_run_ends(run: RunDirectory, launched: tuple[local._Launcher, list[bool]]) -> None:
    launcher, started = launched
    write_journal(run)
    assert lose_coordinators(launcher, 3) == [None, None, "failed"]
    assert started == [False] * 3
    assert not run.control_file.exists()
    assert event_lines(run)[-1]["status"] == "failed"


def test_a_run_that_another_coordinator_leads_is_left_as_it_is(
    run: RunDirectory, launched: tuple[local._Launcher, list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, _ = launched
    write_journal(run)
    run.write_control(ControlAddress(address=ELSEWHERE, token="t", pid=1))
    assert lose_coordinators(launcher, 3)[-1] == "failed"
    assert "another coordinator leads the run, and this machine and its workers leave it" in capsys.readouterr().out
    assert run.control_file.exists()
    assert not run.summary_file.exists()
