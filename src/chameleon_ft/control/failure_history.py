"""Failures that a run has seen so far, from which its model of failures is learned."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

from chameleon_ft.config import Recovery
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import FailureRecord
from chameleon_ft.recovery import FailureModel

__all__ = ["FailureHistory"]

_UNSEEN = StallModel(detect_s=0.01, stop_s=0.03, decide_s=0.05, regroup_s=0.1)
"""The phases of a stall before there was one: those of a few workers on one machine."""
_UNSEEN_HAND_OUT_S: Final = 0.01

# Workers with no more between their losses are lost in one incident: not all losses are detected at once, but within
# about the time from one heartbeat to the next.
_TOGETHER_S: Final = 2.0


@dataclass(slots=True)
class _Incident:
    """Losses at about the same moment.

    Attributes:
        gap_s: seconds since the incident before.
        lost_at: when the last worker was lost.
        lost: workers lost so far by host.
        failures: hosts that lost workers; one that is lost as a whole, comes back and loses workers again counts again.
        host_failures: hosts that lost all their workers, two or more.
    """

    gap_s: float
    lost_at: float
    lost: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    host_failures: int = 0

    def add(self, host: str, left: Collection[str], now: float) -> None:
        """Add the loss of a worker; see `FailureHistory.failed`."""
        self.lost_at = now
        self.lost[host] += 1
        self.failures += self.lost[host] == 1
        if self.lost[host] > 1 and host not in left:
            self.host_failures += 1
            del self.lost[host]


@dataclass(slots=True)
class FailureHistory:
    """Counts failures and the time without them, and keeps how long the phases of stalls took. Times are in seconds."""

    recovery: Recovery
    _settled: FailureModel = field(init=False)
    """All but the latest incident, to which further losses may belong."""
    _workers: int = 0
    _since: float | None = None
    _latest: _Incident | None = None
    _outages: list[FailureRecord] = field(default_factory=list)
    # Of decisions that were looked up, and of those that were not.
    _decide_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    _hand_out_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def __post_init__(self) -> None:
        self._settled = FailureModel(
            worker_mtbf_s=self.recovery.worker_mtbf_hours * 3600,
            prior_failures=self.recovery.prior_weight,
            prior_host_share=self.recovery.host_failure_fraction,
        )

    def live(self, workers: int, now: float) -> None:
        """From `now` on, so many workers are live; what was before counts with as many as there were."""
        if self._since is not None:
            self._settled = self._settled.observed(worker_s=self._workers * max(0.0, now - self._since))
        self._workers, self._since = workers, now

    def failed(self, host: str, left: Collection[str], now: float) -> None:
        """A worker was lost.

        Args:
            host: that it was on.
            left: the hosts of the workers that are live.
            now: a time in seconds, by the same clock as others.
        """
        self.live(len(left), now)
        latest = self._latest
        if latest is None or now - latest.lost_at > _TOGETHER_S:
            self._settled = self.rate
            latest = self._latest = _Incident(math.inf if latest is None else now - latest.lost_at, now)
        latest.add(host, left, now)

    def resumed(self, record: FailureRecord) -> None:
        """Training has gone on after an outage."""
        self._outages.append(record)

    def decided(self, *, looked_up: bool, decide_s: float, hand_out_s: float) -> None:
        """A decision was carried out.

        Args:
            looked_up: whether it had been prepared.
            decide_s: seconds from the moment when all had stopped until everyone was told.
            hand_out_s: seconds of these after it was weighed.
        """
        self._decide_s[looked_up].append(decide_s)
        self._hand_out_s[looked_up].append(hand_out_s)

    @property
    def rate(self) -> FailureModel:
        """The failure model as of now."""
        latest = self._latest
        if latest is None:
            return self._settled
        return self._settled.observed(failures=latest.failures, host_failures=latest.host_failures, gap_s=latest.gap_s)

    def hand_out_s(self, *, looked_up: bool) -> float:
        """What it takes, once a decision was weighed, until everyone is told: the median of those that were."""
        own = self._hand_out_s[looked_up] or self._hand_out_s[not looked_up]
        return statistics.median(own) if own else _UNSEEN_HAND_OUT_S

    def phases(self, *, looked_up: bool) -> StallModel:
        """What the phases of the next stall will take: the medians of those that were.

        Args:
            looked_up: whether the decision will have been prepared; a search takes much longer.
        """
        decided = self._decide_s[looked_up]
        decide_s = statistics.median(decided) if decided else _UNSEEN.decide_s
        if not self._outages:
            return replace(_UNSEEN, decide_s=decide_s)
        detected = [record.detect_s for record in self._outages if record.detect_s is not None]
        return StallModel(
            detect_s=statistics.median(detected) if detected else _UNSEEN.detect_s,
            stop_s=statistics.median(record.stop_s for record in self._outages),
            decide_s=decide_s,
            regroup_s=statistics.median(record.regroup_s for record in self._outages),
        )
