"""A worker is alive and stuck, and the others wait for it.

When no step is committed for longer than a step takes, every worker is asked for its current operation, and every agent
whether its processes are stopped. A worker is hung if its process is stopped, or if it computes a single operation for
many times longer than usual. A worker that waits for another is not at fault. A worker that does not answer may only be
starved of processor time; if it stays silent, its heartbeats stop.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.config import Timeouts
from chameleon_ft.control.detectors.base import (
    Finding,
    Lost,
    OperationsTimed,
    ProbeAnswered,
    Progressed,
    SendProbe,
    Signal,
    StepCommitted,
    StopRequested,
    Ticked,
)
from chameleon_ft.control.wire.messages import Position, ProcessState

__all__ = ["Watchdog"]

_STEPS: Final = 20  # recent steps whose median is the expected step time
_PATIENCE: Final = 1.25  # steps of silence before the first probe
_PATIENCE_MIN_S: Final = 0.1  # likewise, for very short steps
_FORGET: Final = 0.99  # decay of the longest operation with each report
_PROBE_EVERY: Final = 0.5  # steps between two probes


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Probes the workers when no progress is made, and gives up those whose answer shows that they are stuck."""

    timeouts: Timeouts
    steps_s: tuple[float, ...] = ()  # durations of recent steps, oldest first
    longest_operation_s: float = 0.0  # the longest recent operation; 0 before the first
    progress_at_s: float = 0.0  # when progress was made last, in monotonic seconds
    probed_at_s: float | None = None  # when the last probe was sent; None since progress was made
    probe: int = 0  # its number

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case OperationsTimed(longest_s=longest_s):
                longest_operation_s = max(longest_s, _FORGET * self.longest_operation_s)
                return replace(self, longest_operation_s=longest_operation_s), ()
            case StepCommitted(at_s=at_s, step_s=step_s):
                steps_s = (*self.steps_s, step_s)[-_STEPS:]
                return replace(self, steps_s=steps_s, progress_at_s=at_s, probed_at_s=None), ()
            case Progressed(at_s=at_s) | StopRequested(at_s=at_s):
                return replace(self, progress_at_s=at_s, probed_at_s=None), ()
            case ProbeAnswered(worker=worker, answer=answer):
                cause = self._hang(answer)
                return self, () if cause is None else (Lost(worker, "watchdog", cause),)
            case Ticked(at_s=at_s, held_up_s=held_up_s):
                forgiving = self
                if held_up_s:
                    forgiving = replace(self, progress_at_s=self.progress_at_s + held_up_s)
                return forgiving._probed(at_s)
        return self, ()

    @property
    def step_s(self) -> float:
        """Median time of recent steps; 0 before the first."""
        return statistics.median(self.steps_s) if self.steps_s else 0.0

    def _probed(self, now: float) -> tuple[Self, tuple[Finding, ...]]:
        """Send a probe if it is time for one."""
        patience_s = self._patience_s
        if now - self.progress_at_s < patience_s:
            return self, ()
        if self.probed_at_s is not None and now - self.probed_at_s < max(_PATIENCE_MIN_S, _PROBE_EVERY * patience_s):
            return self, ()
        return replace(self, probe=self.probe + 1, probed_at_s=now), (SendProbe(self.probe + 1),)

    def _hang(self, answer: Position | ProcessState) -> str | None:
        """Describe the hang that an answer shows; None if it shows none, or is outdated."""
        if answer.probe != self.probe or self.probed_at_s is None:
            return None
        match answer:
            case ProcessState(stopped=True):
                return "hung: its process is stopped"
            case Position(waiting=False, since_s=since_s) if since_s > self._operation_limit_s:
                return f"hung: in {answer.doing} for {since_s:.1f} s"
        return None

    @property
    def _patience_s(self) -> float:
        # Before the first step there is no measure, and first steps are slow: heartbeats have to suffice.
        if not self.steps_s:
            return self.timeouts.collective_timeout_s
        return max(_PATIENCE_MIN_S, _PATIENCE * self.step_s)

    @property
    def _operation_limit_s(self) -> float:
        if not self.longest_operation_s:
            return self.timeouts.rendezvous_s
        return max(self.timeouts.watchdog_min_s, self.timeouts.watchdog_factor * self.longest_operation_s)
