"""What a run has seen of failures so far, for the next decision to reckon with."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from chameleon_ft.config import Recovery
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import FailureRecord
from chameleon_ft.recovery import FailureRate

__all__ = ["Experience"]

_UNSEEN = StallModel(detect_s=0.01, stop_s=0.03, decide_s=0.05, regroup_s=0.1)
"""The phases of a stall before there was one: those of a few workers on one machine."""


@dataclass(slots=True)
class Experience:
    """Counts failures and the time without them, and keeps how long the phases of stalls took. Times are in seconds."""

    recovery: Recovery
    _rate: FailureRate = field(init=False)
    _workers: int = 0
    _since: float | None = None
    _outages: list[FailureRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rate = FailureRate(
            worker_mtbf_s=self.recovery.worker_mtbf_hours * 3600, prior_failures=self.recovery.prior_weight
        )

    def live(self, workers: int, now: float) -> None:
        """From `now` on, so many workers are live; what was before counts with as many as there were."""
        if self._since is not None:
            self._rate = self._rate.observed(worker_s=self._workers * max(0.0, now - self._since))
        self._workers, self._since = workers, now

    def failed(self, workers: int, now: float) -> None:
        """A worker was lost, and so many are left."""
        self.live(workers, now)
        self._rate = self._rate.observed(failures=1)

    def resumed(self, record: FailureRecord) -> None:
        """Training has gone on after an outage."""
        self._outages.append(record)

    @property
    def rate(self) -> FailureRate:
        """How soon the next failure is to be expected."""
        return self._rate

    @property
    def phases(self) -> StallModel:
        """What the phases of the next stall will take: the medians of those that were."""
        if not self._outages:
            return _UNSEEN
        detected = [record.detect_s for record in self._outages if record.detect_s is not None]
        return StallModel(
            detect_s=statistics.median(detected) if detected else _UNSEEN.detect_s,
            stop_s=statistics.median(record.stop_s for record in self._outages),
            decide_s=statistics.median(record.decide_s for record in self._outages),
            regroup_s=statistics.median(record.regroup_s for record in self._outages),
        )
