"""A worker's control connection has closed, or its heartbeats are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from chameleon_ft.control.detectors.base import (
    AskAgent,
    ConnectionEnded,
    Finding,
    Lost,
    ProbeAnswered,
    Signal,
    Silent,
)
from chameleon_ft.control.wire.messages import ProcessState

__all__ = ["ConnectionDetector"]


@dataclass(frozen=True, slots=True)
class ConnectionDetector:
    """Finds a worker lost when its control connection ends or when its heartbeats are missing.

    A process whose interpreter is held up, by an extension or a compiler, answers no pings, though it lives. So missing
    heartbeats prove nothing of a worker whose agent can tell that its process lives and is not stopped; the watchdog
    judges its progress. Without an agent, a worker has until the end of its first step. The heartbeats themselves are
    the server's pings.
    """

    first_step_s: float

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case ConnectionEnded(worker=worker):
                return self, (Lost(worker, "connection", "control connection closed"),)
            case Silent(worker=worker, since_s=since_s) if since_s > self.first_step_s or not (
                signal.has_agent or signal.in_first_step
            ):
                return self, (Lost(worker, "heartbeat", "no heartbeat"),)
            case Silent(worker=worker, has_agent=True):
                return self, (AskAgent(worker),)
            case ProbeAnswered(worker=worker, answer=ProcessState(probe=0, stopped=True)):
                return self, (Lost(worker, "heartbeat", "no heartbeat, because its process is stopped"),)
        return self, ()
