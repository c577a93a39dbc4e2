"""Finding the worker that is alive and stuck, among others that only wait for it.

When no step is committed for longer than one takes, every worker is asked what it is doing, and every supervisor
whether their processes are stopped. A worker whose process is stopped is hung, and so is one that computes a single
operation for many times longer than such operations take. One that waits for another is innocent. One that says nothing
may only be starved of processor time; if it stays silent, its heartbeats stop. Nothing here reads a clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from chameleon_ft.config import Timeouts
from chameleon_ft.control.messages import Position, ProcessState

__all__ = ["Verdict", "Watchdog"]

_STEPS = 20  # recent steps whose median is the expected step time
_PATIENCE = 1.25  # steps of silence before anyone is asked,
_PATIENCE_MIN_S = 0.1  # and not at every hiccup of steps that are over in a moment
_FORGET = 0.99  # how much of the longest operation is left when a worker reports shorter ones
_ASK_EVERY = 0.5  # steps between two rounds of questions


@dataclass(frozen=True, slots=True)
class Verdict:
    """A worker that is hung, and why it is thought to be."""

    worker: int
    reason: str


@dataclass(slots=True)
class Watchdog:
    """Says when to ask and whom to give up. All times are monotonic seconds given by the caller."""

    timeouts: Timeouts
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _longest_operation_s: float = 0.0
    _progress_at: float = 0.0
    _asked_at: float | None = None
    _probe: int = 0

    def progress(self, now: float) -> None:
        """Something went on as it should: a step was committed, or begun after a change."""
        self._progress_at = now
        self._asked_at = None

    def committed(self, now: float, *, step_s: float) -> None:
        """A step was committed."""
        self._steps_s.append(step_s)
        self.progress(now)

    def operation(self, longest_s: float) -> None:
        """A worker's longest operation in a step took this long."""
        self._longest_operation_s = max(longest_s, _FORGET * self._longest_operation_s)

    def ask(self, now: float) -> int | None:
        """Return the number of the probe to send out now; None while there is no reason to."""
        if now - self._progress_at < self._patience_s:
            return None
        if self._asked_at is not None and now - self._asked_at < max(_PATIENCE_MIN_S, _ASK_EVERY * self._patience_s):
            return None
        self._probe += 1
        self._asked_at = now
        return self._probe

    def judge(self, worker: int, answer: Position | ProcessState) -> Verdict | None:
        """Say whether a worker is hung by its answer, or by its supervisor's. An old answer says nothing."""
        if answer.probe != self._probe or self._asked_at is None:
            return None
        match answer:
            case ProcessState(stopped=True):
                return Verdict(worker, "hung: its process is stopped")
            case Position(waiting=False, since_s=since_s) if since_s > self._operation_limit_s:
                return Verdict(worker, f"hung: in {answer.doing} for {since_s:.1f} s")
        return None

    def forgive(self, seconds: float) -> None:
        """The caller was held up itself for this long; no worker is to blame for that."""
        self._progress_at += seconds

    @property
    def step_s(self) -> float:
        """Median time of recent steps; 0 before the first."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    @property
    def _patience_s(self) -> float:
        # Before the first step nothing is known, and first steps are slow: heartbeats have to do.
        if not self._steps_s:
            return self.timeouts.collective_timeout_s
        return max(_PATIENCE_MIN_S, _PATIENCE * self.step_s)

    @property
    def _operation_limit_s(self) -> float:
        if not self._longest_operation_s:
            return self.timeouts.rendezvous_s
        return max(self.timeouts.watchdog_min_s, self.timeouts.watchdog_factor * self._longest_operation_s)
