"""Times of messages between workers, by the clocks of both, and their meaning for links.

A message takes from its send, by the clock of its sender, until it arrives, by that of its receiver. The clocks differ
by a constant, which the sum of a time in one direction and one in the other does not contain. Of the first messages of
a channel in a step the shortest time counts: whatever else delays a message adds to it.

On a busy host a worker that waits gets a processor late, and one that does not wait seems to. This does not hit all
channels alike: a worker that is usually behind finds its messages there, or waits for a single one in a step.
So a delay counts only if it is more than twice as long as messages to the two hosts are usually late; or if a forward
takes twice the expected time with it, because messages queue on so slow a link, and are late for that reason alone.

The time is judged together with a forward of the two workers, so that delays count for little that are short beside an
operation, because they cost nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, NamedTuple, TypeAlias

from chameleon_ft.control.wire.parts import OperationTimes
from chameleon_ft.schedule import CostModel, OperationKind, Program

Ends: TypeAlias = tuple[int, int]
"""The two workers of a link, ascending."""

_TIMES_LATE: Final = 2.0  # now and then a single message is that late

_Channel: TypeAlias = tuple[int, int, bool]
"""(sender, receiver, whether forward)"""


class _Delays(NamedTuple):
    """Seconds of the messages of a channel in a step that their receiver has waited for."""

    shortest_s: float
    mean_s: float
    number: int

    @classmethod
    def of(cls, sent_s: Sequence[float], arrived_s: Sequence[float]) -> _Delays | None:
        """Return those of messages that were sent and arrived at these times, 0 if not waited for; None if none was."""
        found = [arrived - sent for sent, arrived in zip(sent_s, arrived_s, strict=False) if arrived]
        return cls(min(found), statistics.fmean(found), len(found)) if found else None

    @property
    def lateness_s(self) -> float | None:
        """By how much the others were later than the shortest, in the mean; None if there is only one."""
        return None if self.number == 1 else (self.mean_s - self.shortest_s) * self.number / (self.number - 1)


class _Expected(NamedTuple):
    """Seconds of a forward and of a message in each direction: in all, and the part that depends on the bandwidth."""

    seconds: float
    bytes_s: float


@dataclass(slots=True)
class LinkTimes:
    """Collects the reports of the workers of a program, and compares them with the expected times of messages."""

    _now: frozenset[Ends] = frozenset()  # links that were measured under this program
    _before: frozenset[Ends] = frozenset()  # and under the one before it
    _costs: CostModel | None = None
    _bytes: dict[_Channel, int] = field(default_factory=dict)  # of a message
    _step: int = -1
    _sent: dict[_Channel, tuple[float, ...]] = field(default_factory=dict)
    _arrived: dict[_Channel, tuple[float, ...]] = field(default_factory=dict)
    _forward_s: dict[int, float] = field(default_factory=dict)  # of each worker
    # Host of receivers -> the lateness of each of their channels in this step, and the median in the one before.
    _lateness_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _usual_lateness_s: dict[str, float] = field(default_factory=dict)
    _expected: dict[Ends, _Expected] = field(default_factory=dict)

    def begin(self, program: Program, costs: CostModel) -> None:
        """Begin to observe the steps of a program; `costs` are those without corrections."""
        self._costs = costs
        self._before, self._now = self._now, frozenset()
        sizes: dict[_Channel, set[int]] = defaultdict(set)
        for worker in program.workers:
            for operation in program.of(worker):
                if operation.send_to is not None:
                    forward = operation.kind is OperationKind.FORWARD
                    layer = operation.layers.stop - 1 if forward else operation.layers.start - 1
                    sizes[worker, operation.send_to, forward].add(costs.message_bytes(layer))
        # The times of messages of several sizes do not compare.
        self._bytes = {channel: own.pop() for channel, own in sizes.items() if len(own) == 1}
        self._next(-1)

    def reported(self, worker: int, step: int, times: OperationTimes) -> dict[Ends, tuple[float, int]]:
        """Take in a worker's report of a step; see `Calibration.links`."""
        if step < self._step:
            return {}
        if step > self._step:
            self._next(step)
        self._forward_s[worker] = times.forward_s
        peers = set()
        for each in times.channels:
            self._sent[worker, each.peer, each.forward] = each.sent_s
            self._arrived[each.peer, worker, each.forward] = each.arrived_s
            peers.add(each.peer)
        found = {}
        for peer in sorted(peers):
            ends = min(worker, peer), max(worker, peer)
            if (measured := self._measured(ends)) is not None:
                found[ends] = measured
        self._now |= found.keys()
        return found

    @property
    def known(self) -> frozenset[Ends]:
        """The links that were measured lately."""
        return self._now | self._before

    def share_of(self, ends: Ends, speed: float) -> float:
        """Return the share of its bandwidth that a link has over which micro-batches take 1 / `speed` times as long."""
        if (expected := self._expected.get(ends)) is None or not expected.bytes_s:
            return speed
        rest_s = expected.seconds - expected.bytes_s
        return min(1.0, expected.bytes_s / (expected.seconds / speed - rest_s))

    def _next(self, step: int) -> None:
        self._step = step
        if self._lateness_s:
            self._usual_lateness_s = {host: statistics.median(own) for host, own in self._lateness_s.items()}
        self._lateness_s.clear()
        self._sent.clear()
        self._arrived.clear()
        self._forward_s.clear()

    def _measured(self, ends: Ends) -> tuple[float, int] | None:
        """Return (observed / expected seconds of messages each way and a forward, kind of link), or None."""
        assert self._costs is not None
        one, other = ends
        # A pipeline sends activations one way and gradients the other.
        for first, second in (ends, (other, one)):
            there, back = (first, second, True), (second, first, False)
            delays = [each for channel in (there, back) if (each := self._delays(channel)) is not None]
            if len(delays) < 2:
                continue
            link, hosts = self._costs.cluster.link(one, other), self._costs.cluster.hosts
            bytes_s = (self._bytes[there] + self._bytes[back]) / link.bytes_per_s
            forward_s = statistics.mean(self._forward_s[worker] for worker in ends)
            expected = _Expected(forward_s + 2 * link.latency_s + bytes_s, bytes_s)
            messages_s = sum(each.shortest_s for each in delays)
            if messages_s <= 0 or expected.seconds <= 0:
                return None
            self._expected[ends] = expected
            late_s = _TIMES_LATE * sum(self._usual_lateness_s.get(hosts[worker], 0.0) for worker in ends)
            late_s = min(late_s, expected.seconds)
            for (_, receiver, _), each in zip((there, back), delays, strict=True):
                if each.lateness_s is not None:
                    self._lateness_s[hosts[receiver]].append(each.lateness_s)
            seconds = forward_s + messages_s
            if expected.seconds < seconds <= expected.seconds + late_s:
                seconds = expected.seconds
            return seconds / expected.seconds, int(hosts[one] != hosts[other])
        return None

    def _delays(self, channel: _Channel) -> _Delays | None:
        """Return the delays of a channel in this step; None if they are no measure."""
        if channel not in self._bytes:
            return None
        return _Delays.of(self._sent.get(channel, ()), self._arrived.get(channel, ()))


def assumed_shares(
    slow: Mapping[Ends, float], measured: Collection[Ends], hosts: Mapping[int, str]
) -> dict[Ends, float]:
    """Return the shares of all slow links between the workers of `hosts`, those that were not measured included.

    The fault of a slow link may be at either end. It is assumed at a worker, or between hosts at a host, of which all
    measured links of the kind are slow: its other links are then about as slow as the best of these.
    """
    best: dict[tuple[bool, str | int], float] = {}  # (whether between hosts, worker or host) -> best of its links
    for one, other in {*measured, *slow}:
        if one in hosts and other in hosts:
            between, share = hosts[one] != hosts[other], slow.get((one, other), 1.0)
            ends: Sequence[str | int] = (one, other, hosts[one], hosts[other]) if between else (one, other)
            for end in ends:
                best[between, end] = max(share, best.get((between, end), 0.0))

    def share_at(worker: int, *, between: bool) -> float:
        own = best.get((between, worker))
        if own is None and between:
            own = best.get((True, hosts[worker]))
        return 1.0 if own is None else own

    found: dict[Ends, float] = {}
    for ends in combinations(sorted(hosts), 2):
        between = hosts[ends[0]] != hosts[ends[1]]
        share = 1.0 if ends in measured else min(share_at(worker, between=between) for worker in ends)
        if (share := slow.get(ends, share)) < 1:
            found[ends] = share
    return found
