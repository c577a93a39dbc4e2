"""A worker's process has ended, as the agent that started it reports."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Self

from chameleon_ft.control.detectors.base import Finding, Lost, ProcessExited, Signal


@dataclass(frozen=True, slots=True)
class ProcessExitDetector:
    """Finds a worker lost as soon as its process is reaped."""

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        if isinstance(signal, ProcessExited):
            return self, (Lost(signal.worker, "child", describe_exit(signal.exit_code)),)
        return self, ()


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended, from its exit code as `subprocess` gives it; None if it is not known."""
    if exit_code is None:
        return "its process has ended"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
