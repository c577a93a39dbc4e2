"""A worker answers probes and heartbeats, but does not quiesce."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.detectors.base import Finding, Lost, Signal, StopRequested, Ticked

__all__ = ["QuiesceTimeout"]


@dataclass(frozen=True, slots=True)
class QuiesceTimeout:
    """Gives up the workers that have not quiesced in time."""

    timeout_s: float  # seconds from the request to quiesce
    deadline_s: float = 0.0  # when the last request runs out, in monotonic seconds

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case StopRequested(at_s=at_s):
                return replace(self, deadline_s=at_s + self.timeout_s), ()
            case Ticked(at_s=at_s, unquiesced=workers) if at_s > self.deadline_s:
                cause = "hung: it does not leave its operation"
                return self, tuple(Lost(worker, "watchdog", cause) for worker in workers)
        return self, ()
