"""A worker's control connection has closed, or its heartbeats are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.detectors.base import (
    AskAgent,
    ConnectionEnded,
    Fenced,
    Finding,
    Lost,
    ProbeAnswered,
    Signal,
    Silent,
)
from chameleon_ft.control.wire.messages import ProcessState
from chameleon_ft.plan.frozen_map import FrozenMap, without


@dataclass(frozen=True, slots=True)
class ConnectionDetector:
    """Finds a worker lost when its control connection ends or when its heartbeats are missing.

    A process whose interpreter is held up, by an extension or a compiler, answers no pings, though it lives. So missing
    heartbeats prove nothing of a worker whose agent can tell that its process lives and is not stopped; the watchdog
    judges its progress. Without an agent, a worker has until the end of its first step. The heartbeats themselves are
    the server's pings. A debugger or a profiler may stop a process for a moment, so its agent has to report that twice
    in one silence.
    """

    first_step_s: float
    silences: Mapping[int, tuple[float, bool]] = FrozenMap({})  # worker -> seconds, and whether it was found stopped

    def __post_init__(self) -> None:
        object.__setattr__(self, "silences", FrozenMap(self.silences))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case ConnectionEnded(worker=worker):
                return self, (Lost(worker, "connection", "control connection closed"),)
            case Silent(worker=worker, since_s=since_s) if since_s > self.first_step_s or not (
                signal.has_agent or signal.in_first_step
            ):
                return self, (Lost(worker, "heartbeat", "no heartbeat"),)
            case Silent(worker=worker, since_s=since_s, has_agent=True):
                before_s, was_stopped = self.silences.get(worker, (0.0, False))
                silence = since_s, was_stopped and since_s >= before_s  # otherwise it has answered meanwhile
                return replace(self, silences={**self.silences, worker: silence}), (AskAgent(worker),)
            case ProbeAnswered(worker=worker, answer=ProcessState(probe=0, stopped=is_stopped)):
                since_s, was_stopped = self.silences.get(worker, (0.0, False))
                if is_stopped and was_stopped:
                    return self, (Lost(worker, "heartbeat", "no heartbeat, because its process is stopped"),)
                return replace(self, silences={**self.silences, worker: (since_s, is_stopped)}), ()
            case Fenced(worker=worker) if worker in self.silences:
                return replace(self, silences=without(self.silences, worker)), ()
        return self, ()
