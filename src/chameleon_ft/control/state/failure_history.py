"""The failures that a run has seen so far, and the failure model learned from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.config import Recovery
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import FailureRecord
from chameleon_ft.plan.frozen_map import FrozenMap, without
from chameleon_ft.recovery import FailureModel

_DEFAULT = StallModel(detect_s=0.01, stop_s=0.03, decide_s=0.05, regroup_s=0.02)
"""Phases assumed until a stall has been measured; typical of a machine with two processors."""
_DEFAULT_REGROUP_S: Final = 0.003  # that each worker adds to the time in which communicators are formed
_DEFAULT_REGROUP_MAX_S: Final = 0.2
_DEFAULT_HAND_OUT_S: Final = 0.01

# Losses at most this far apart belong to one incident. They may not be detected at the same moment, but they are
# detected within about one heartbeat interval.
_TOGETHER_S: Final = 2.0
_RECENT: Final = 64  # stalls, and decisions, whose medians count


@dataclass(frozen=True, slots=True)
class LatestIncident:
    """The latest losses, close together in time; further losses may still be added."""

    gap_s: float | None  # seconds since the previous incident; None for the first
    lost_at: float  # when the last worker was lost
    lost: Mapping[str, int] = FrozenMap({})  # host -> workers lost so far
    failures: int = 0  # hosts that lost workers; a host that comes back and loses workers again counts again
    host_failures: int = 0  # hosts that lost all their workers, two or more

    def __post_init__(self) -> None:
        object.__setattr__(self, "lost", FrozenMap(self.lost))

    def with_loss(self, host: str, live_hosts: Collection[str], now: float) -> Self:
        """Add the loss of a worker; see `FailureHistory.failed`."""
        count = self.lost.get(host, 0) + 1
        is_whole = count > 1 and host not in live_hosts
        lost = without(self.lost, host)
        return replace(
            self,
            lost_at=now,
            lost=lost if is_whole else {**lost, host: count},
            failures=self.failures + (count == 1),
            host_failures=self.host_failures + is_whole,
        )


@dataclass(frozen=True, slots=True)
class PastStall:
    """Durations of the phases of a stall; see `FailureRecord`."""

    detect_s: float | None
    stop_s: float
    regroup_s: float


@dataclass(frozen=True, slots=True)
class PastDecision:
    """Duration of a decision, and of its last part, in which the orders were sent."""

    looked_up: bool
    decide_s: float
    hand_out_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHistory:
    """Counts failures and worker-seconds, and keeps durations of recent stalls and decisions. Times are in seconds."""

    settled: FailureModel  # failure model of all incidents but the latest, which may still grow
    workers: int = 0  # number of live workers
    since: float | None = None  # when `workers` last changed
    latest: LatestIncident | None = None
    stalls: tuple[PastStall, ...] = ()
    decisions: tuple[PastDecision, ...] = ()

    @classmethod
    def before(cls, recovery: Recovery) -> Self:
        """Return the history of a run that has not begun."""
        return cls(
            settled=FailureModel(
                worker_mtbf_s=recovery.worker_mtbf_hours * 3600,
                prior_failures=recovery.prior_weight,
                prior_host_failure_fraction=recovery.host_failure_fraction,
            )
        )

    def live(self, workers: int, now: float) -> Self:
        """Note the number of live workers from `now` on."""
        settled = self.settled
        if self.since is not None:
            settled = settled.observed(worker_s=self.workers * max(0.0, now - self.since))
        return replace(self, settled=settled, workers=workers, since=now)

    def failed(self, host: str, live_hosts: Collection[str], now: float) -> Self:
        """Note the loss of a worker on `host`; `live_hosts` are the hosts of the live workers, one per worker."""
        history = self.live(len(live_hosts), now)
        latest = history.latest
        if latest is None or now - latest.lost_at > _TOGETHER_S:
            history = replace(history, settled=history.rate)
            latest = LatestIncident(None if latest is None else now - latest.lost_at, now)
        return replace(history, latest=latest.with_loss(host, live_hosts, now))

    def resumed(self, record: FailureRecord) -> Self:
        """Note the stall of a loss, once training has resumed."""
        past = PastStall(record.detect_s, record.stop_s, record.regroup_s)
        return replace(self, stalls=(*self.stalls, past)[-_RECENT:])

    def decided(self, *, looked_up: bool, decide_s: float, hand_out_s: float) -> Self:
        """Note a decision that was carried out.

        Args:
            looked_up: whether it had been prepared.
            decide_s: seconds from the quiescing of the last worker until the orders were sent.
            hand_out_s: the part of `decide_s` after the decision was made.
        """
        return replace(self, decisions=(*self.decisions, PastDecision(looked_up, decide_s, hand_out_s))[-_RECENT:])

    @property
    def rate(self) -> FailureModel:
        """The failure model with the latest incident included."""
        latest = self.latest
        if latest is None:
            return self.settled
        gap_s = math.inf if latest.gap_s is None else latest.gap_s
        return self.settled.observed(failures=latest.failures, host_failures=latest.host_failures, gap_s=gap_s)

    def hand_out_s(self, *, looked_up: bool) -> float:
        """Median seconds from a decision until its orders are sent; over all decisions if none is of this kind."""
        own = [each.hand_out_s for each in self.decisions if each.looked_up == looked_up]
        return _median(own or (each.hand_out_s for each in self.decisions), default=_DEFAULT_HAND_OUT_S)

    def phases(self, *, looked_up: bool) -> StallModel:
        """Return the expected phases of the next stall: medians of the past ones.

        Args:
            looked_up: whether the decision will have been prepared; a search takes much longer.
        """
        stalls = self.stalls
        decided = (each.decide_s for each in self.decisions if each.looked_up == looked_up)
        detected = (stall.detect_s for stall in stalls if stall.detect_s is not None)
        default_regroup_s = min(_DEFAULT_REGROUP_MAX_S, _DEFAULT.regroup_s + _DEFAULT_REGROUP_S * self.workers)
        return StallModel(
            detect_s=_median(detected, default=_DEFAULT.detect_s),
            stop_s=_median((stall.stop_s for stall in stalls), default=_DEFAULT.stop_s),
            decide_s=_median(decided, default=_DEFAULT.decide_s),
            regroup_s=_median((stall.regroup_s for stall in stalls), default=default_regroup_s),
        )


def _median(values: Iterable[float], *, default: float) -> float:
    return statistics.median(found) if (found := list(values)) else default
