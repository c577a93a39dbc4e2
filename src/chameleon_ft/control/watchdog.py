"""Finding the worker that is alive and stuck, among others that only wait for it.

When no step is committed for longer than one takes, every worker is asked what it is doing. One that waits for another
is innocent. One that does not answer, or that computes a single operation for many times longer than such operations
take, is hung. Nothing here reads a clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from chameleon_ft.config import Timeouts
from chameleon_ft.control.messages import Position

__all__ = ["Verdict", "Watchdog"]

_STEPS = 20  # recent steps whose median is the expected step time
_PATIENCE = 1.25  # steps of silence before anyone is asked,
_PATIENCE_MIN_S = 0.1  # and not at every hiccup of steps that are over in a moment
_ANSWER_STEPS = 0.75  # steps that an answer may take,
_ANSWER_MIN_S = 0.3  # but not less than a busy host needs to run a thread


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
    _probe: int = 0
    _asked_at: float | None = None
    _unanswered: set[int] = field(default_factory=set)
    _stuck: dict[int, str] = field(default_factory=dict)

    def progress(self, now: float) -> None:
        """Something went on as it should: a step was committed, or begun after a change."""
        self._progress_at = now
        self._asked_at = None
        self._unanswered.clear()
        self._stuck.clear()

    def committed(self, now: float, *, step_s: float, longest_operation_s: float) -> None:
        """A step was committed."""
        self._steps_s.append(step_s)
        self._longest_operation_s = max(longest_operation_s, 0.9 * self._longest_operation_s)
        self.progress(now)

    def ask(self, now: float, workers: Collection[int]) -> int | None:
        """Return the number of the probe to send to `workers` now; None while there is no reason or one is out."""
        if self._asked_at is not None or now - self._progress_at < self._patience_s:
            return None
        self._probe += 1
        self._asked_at = now
        self._unanswered = set(workers)
        self._stuck.clear()
        return self._probe

    def answer(self, worker: int, position: Position) -> None:
        """Take in a worker's answer; one to an older probe counts for nothing."""
        if position.probe != self._probe:
            return
        self._unanswered.discard(worker)
        if not position.waiting and position.since_s > self._operation_limit_s:
            self._stuck[worker] = f"in {position.doing} for {position.since_s:.1f} s"

    def verdicts(self, now: float) -> list[Verdict]:
        """Return who is hung, once the answers are in or overdue. After that it asks again."""
        if self._asked_at is None:
            return []
        overdue = now - self._asked_at > self._answer_s
        if self._unanswered and not overdue:
            return []
        hung = [Verdict(w, f"no answer for {now - self._asked_at:.1f} s") for w in sorted(self._unanswered)]
        hung += [Verdict(worker, reason) for worker, reason in sorted(self._stuck.items())]
        self._asked_at = None
        self._progress_at = now
        return hung

    def forgive(self, seconds: float) -> None:
        """The caller was held up itself for this long; no worker is to blame for that."""
        self._progress_at += seconds
        if self._asked_at is not None:
            self._asked_at += seconds

    @property
    def _expected_step_s(self) -> float | None:
        return statistics.median(self._steps_s) if self._steps_s else None

    @property
    def _patience_s(self) -> float:
        # Before the first step nothing is known, and first steps are slow: heartbeats have to do.
        expected = self._expected_step_s
        return self.timeouts.collective_s if expected is None else max(_PATIENCE_MIN_S, _PATIENCE * expected)

    @property
    def _answer_s(self) -> float:
        expected = self._expected_step_s
        return self.timeouts.heartbeat_s if expected is None else max(_ANSWER_MIN_S, _ANSWER_STEPS * expected)

    @property
    def _operation_limit_s(self) -> float:
        if not self._longest_operation_s:
            return self.timeouts.rendezvous_s
        return max(self.timeouts.watchdog_min_s, self.timeouts.watchdog_factor * self._longest_operation_s)
