"""Failures that a run has seen so far, from which its model of failures is learned."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from chameleon_ft.config import Recovery
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import FailureRecord
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery import FailureModel

__all__ = ["DecisionTimes", "FailureHistory", "LatestIncident", "PastStall"]

_UNSEEN = StallModel(detect_s=0.01, stop_s=0.03, decide_s=0.05, regroup_s=0.1)
"""The phases of a stall before there was one: those of a few workers on one machine."""
_UNSEEN_HAND_OUT_S: Final = 0.01

# Workers with no more between their losses are lost in one incident: not all losses are detected at once, but within
# about the time from one heartbeat to the next.
_TOGETHER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class LatestIncident:
    """Losses at about the same moment, to which further ones may belong.

    Attributes:
        gap_s: seconds since the incident before; None for the first.
        lost_at: when the last worker was lost.
        lost: host -> workers lost so far.
        failures: hosts that lost workers; one that is lost as a whole, comes back and loses workers again counts again.
        host_failures: hosts that lost all their workers, two or more.
    """

    gap_s: float | None
    lost_at: float
    lost: Mapping[str, int] = FrozenMap({})
    failures: int = 0
    host_failures: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lost", FrozenMap(self.lost))

    def with_loss(self, host: str, left: Collection[str], now: float) -> Self:
        """Add the loss of a worker; see `FailureHistory.failed`."""
        count = self.lost.get(host, 0) + 1
        is_whole = count > 1 and host not in left
        lost = {each: number for each, number in self.lost.items() if each != host}
        return replace(
            self,
            lost_at=now,
            lost=lost if is_whole else {**lost, host: count},
            failures=self.failures + (count == 1),
            host_failures=self.host_failures + is_whole,
        )


@dataclass(frozen=True, slots=True)
class PastStall:
    """How long the phases of a stall took, in seconds; see `FailureRecord`."""

    detect_s: float | None
    stop_s: float
    regroup_s: float


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """How long decisions took, in seconds, and how long of that it took to hand out their orders."""

    decide_s: tuple[float, ...] = ()
    hand_out_s: tuple[float, ...] = ()

    def with_decision(self, decide_s: float, hand_out_s: float) -> Self:
        """Add a decision."""
        return replace(self, decide_s=(*self.decide_s, decide_s), hand_out_s=(*self.hand_out_s, hand_out_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHistory:
    """Counts failures and the time without them, and keeps how long the phases of stalls took. Times are in seconds.

    Attributes:
        settled: the failure model of all but the latest incident, to which further losses may belong.
        workers: how many are live,
        since: and from when on.
        searched: decisions that were made when they were needed.
        looked_up: decisions that had been prepared.
    """

    settled: FailureModel
    workers: int = 0
    since: float | None = None
    latest: LatestIncident | None = None
    stalls: tuple[PastStall, ...] = ()
    searched: DecisionTimes = field(default_factory=DecisionTimes)
    looked_up: DecisionTimes = field(default_factory=DecisionTimes)

    @classmethod
    def before(cls, recovery: Recovery) -> Self:
        """Return the history of a run that has not begun: what is known beforehand."""
        return cls(
            settled=FailureModel(
                worker_mtbf_s=recovery.worker_mtbf_hours * 3600,
                prior_failures=recovery.prior_weight,
                prior_host_share=recovery.host_failure_fraction,
            )
        )

    def live(self, workers: int, now: float) -> Self:
        """From `now` on, so many workers are live; what was before counts with as many as there were."""
        settled = self.settled
        if self.since is not None:
            settled = settled.observed(worker_s=self.workers * max(0.0, now - self.since))
        return replace(self, settled=settled, workers=workers, since=now)

    def failed(self, host: str, left: Collection[str], now: float) -> Self:
        """A worker was lost.

        Args:
            host: that it was on.
            left: the hosts of the workers that are live.
            now: a time in seconds, by the same clock as others.
        """
        history = self.live(len(left), now)
        latest = history.latest
        if latest is None or now - latest.lost_at > _TOGETHER_S:
            history = replace(history, settled=history.rate)
            latest = LatestIncident(None if latest is None else now - latest.lost_at, now)
        return replace(history, latest=latest.with_loss(host, left, now))

    def resumed(self, record: FailureRecord) -> Self:
        """Training has resumed after an incident."""
        return replace(self, stalls=(*self.stalls, PastStall(record.detect_s, record.stop_s, record.regroup_s)))

    def decided(self, *, looked_up: bool, decide_s: float, hand_out_s: float) -> Self:
        """A decision was carried out.

        Args:
            looked_up: whether it had been prepared.
            decide_s: seconds from the moment when all had quiesced until the orders were out.
            hand_out_s: seconds of these after it was made.
        """
        if looked_up:
            return replace(self, looked_up=self.looked_up.with_decision(decide_s, hand_out_s))
        return replace(self, searched=self.searched.with_decision(decide_s, hand_out_s))

    @property
    def rate(self) -> FailureModel:
        """The failure model as of now."""
        latest = self.latest
        if latest is None:
            return self.settled
        gap_s = math.inf if latest.gap_s is None else latest.gap_s
        return self.settled.observed(failures=latest.failures, host_failures=latest.host_failures, gap_s=gap_s)

    def hand_out_s(self, *, looked_up: bool) -> float:
        """Seconds from a decision until its orders are out: the median of those that were."""
        first, second = (self.looked_up, self.searched) if looked_up else (self.searched, self.looked_up)
        own = first.hand_out_s or second.hand_out_s
        return statistics.median(own) if own else _UNSEEN_HAND_OUT_S

    def phases(self, *, looked_up: bool) -> StallModel:
        """What the phases of the next stall will take: the medians of those that were.

        Args:
            looked_up: whether the decision will have been prepared; a search takes much longer.
        """
        decided = (self.looked_up if looked_up else self.searched).decide_s
        decide_s = statistics.median(decided) if decided else _UNSEEN.decide_s
        if not self.stalls:
            return replace(_UNSEEN, decide_s=decide_s)
        detected = [stall.detect_s for stall in self.stalls if stall.detect_s is not None]
        return StallModel(
            detect_s=statistics.median(detected) if detected else _UNSEEN.detect_s,
            stop_s=statistics.median(stall.stop_s for stall in self.stalls),
            decide_s=decide_s,
            regroup_s=statistics.median(stall.regroup_s for stall in self.stalls),
        )
