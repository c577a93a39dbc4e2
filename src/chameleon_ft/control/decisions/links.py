"""Times of messages between workers, by the clocks of both, and their meaning for links.

A message takes from its send, by the clock of its sender, until it arrives, by that of its receiver. The clocks differ
by a constant, which the sum of a time in one direction and one in the other does not contain. Of the first messages of
a channel in a step the shortest time counts: whatever else delays a message adds to it. It is judged together with a
forward of its workers, so that delays count for little that are short beside an operation, because they cost nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple, TypeAlias

from chameleon_ft.control.wire.parts import OperationTimes
from chameleon_ft.schedule import CostModel, OperationKind, Program

__all__ = ["Ends", "LinkTimes", "assumed_shares"]

Ends: TypeAlias = tuple[int, int]
"""The two workers of a link, ascending."""

_Channel: TypeAlias = tuple[int, int, bool]
"""(sender, receiver, whether forward)"""


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
            there_s, back_s = self._shortest_s(there), self._shortest_s(back)
            if there_s is None or back_s is None or there not in self._bytes or back not in self._bytes:
                continue
            link = self._costs.cluster.link(one, other)
            bytes_s = (self._bytes[there] + self._bytes[back]) / link.bytes_per_s
            forward_s = statistics.mean(self._forward_s[worker] for worker in ends)
            expected = _Expected(forward_s + 2 * link.latency_s + bytes_s, bytes_s)
            if there_s + back_s <= 0 or expected.seconds <= 0:
                return None
            self._expected[ends] = expected
            hosts = self._costs.cluster.hosts
            return (forward_s + there_s + back_s) / expected.seconds, int(hosts[one] != hosts[other])
        return None

    def _shortest_s(self, channel: _Channel) -> float | None:
        sent, arrived = self._sent.get(channel, ()), self._arrived.get(channel, ())
        return min((end - begin for begin, end in zip(sent, arrived, strict=False) if end), default=None)


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
