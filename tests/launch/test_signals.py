"""Signals while a launcher starts."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from chameleon_ft.launch import local
from chameleon_ft.launch.processes import signals_not_lost, unattended
from chameleon_ft.observe import RunDirectory


@pytest.mark.parametrize("is_swallowed", [True, False])
def test_ctrl_c_counts_although_a_compiler_swallows_it(*, is_swallowed: bool) -> None:
    reached: list[str] = []

    def compiled() -> None:
        with signals_not_lost():
            with contextlib.suppress(KeyboardInterrupt) if is_swallowed else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        compiled()
    assert (len(reached), signal.getsignal(signal.SIGINT)) == (is_swallowed, before)


def test_ctrl_c_while_a_coordinator_is_replaced_ends_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[MagicMock] = []

    def start_child(_: object) -> MagicMock:
        if started:
            signal.raise_signal(signal.SIGINT)
        started.append(MagicMock())
        return started[-1]

    monkeypatch.setattr(local, "Child", start_child)
    start = SimpleNamespace(run=RunDirectory(tmp_path), config=SimpleNamespace(control=SimpleNamespace(lease_s=3.0)))
    launcher = local._Launcher(start, MagicMock(), MagicMock(), MagicMock(), MagicMock())  # type: ignore[arg-type]
    with unattended(), local._signals_passed_to(launcher._pass_on):
        launcher._start_coordinator()
        launcher._start_coordinator(stands_by=True)
    replaced, standing_by = started
    replaced.process.kill.assert_not_called()
    standing_by.process.kill.assert_called_once()
