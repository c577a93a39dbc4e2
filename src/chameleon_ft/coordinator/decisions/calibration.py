"""Observed durations of operations, steps and transfers, as ratios to the expected ones.

Costs are often wrong by a factor: shared processors, warm devices, a profile from another machine. So the ratios of
observed to expected seconds are kept, and their medians used: one slow step changes nothing. Reads no clock.

Times of messages between workers, by the clocks of both, and their meaning for links.

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

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Final, NamedTuple, TypeAlias

from chameleon_ft.cluster import Cluster
from chameleon_ft.coordinator.detectors import Detectors
from chameleon_ft.coordinator.detectors.slowness import SlowLinkDetector, workers_of_link
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.protocol.parts import OperationTimes
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program

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


class _ExpectedMessage(NamedTuple):
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
    _expected: dict[Ends, _ExpectedMessage] = field(default_factory=dict)

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
            expected = _ExpectedMessage(forward_s + 2 * link.latency_s + bytes_s, bytes_s)
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


_RECENT: Final = 10  # steps, or transfers, whose median counts
_PEERS: Final = 3  # workers with the same layers that compare with each other and not with others
_STEPS_NEEDED: Final = 3  # for a factor of the step: one may be a hiccup


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Factors by which observations correct predictions.

    Raises:
        ConfigError: a factor is not positive and finite.
    """

    operations: float = 1.0  # for seconds of the profile's operations; 1 without a profile
    step: float = 1.0  # for seconds of a step, beyond its operations
    transfer: float = 1.0  # for seconds of a transfer
    migration: float = 1.0  # for seconds of a migration
    slow: Mapping[int, float] = FrozenMap({})  # slow worker -> its speed relative to the others
    slow_links: Mapping[Ends, float] = FrozenMap({})  # workers of a slow link -> the share of its bandwidth that it has
    measured_links: frozenset[Ends] = frozenset()  # links of which that is known; of others it is assumed

    def __post_init__(self) -> None:
        object.__setattr__(self, "slow", FrozenMap(self.slow))
        object.__setattr__(self, "slow_links", FrozenMap(self.slow_links))
        factors = ("operations", "step", "transfer", "migration")
        named = {name: getattr(self, name) for name in factors}
        named |= {f"speed of worker {each}": speed for each, speed in self.slow.items()}
        named |= {f"share of link {ends}": share for ends, share in self.slow_links.items()}
        for name, value in named.items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"a correction must be a positive number; got {value} for {name}")

    def applied(self, costs: CostModel) -> CostModel:
        """Return the cost model with the corrected operations and speeds of workers."""
        workload, cluster = costs.workload, costs.cluster
        if self.operations != 1:
            workload = replace(
                workload,
                layers=tuple(layer.slowed(self.operations) for layer in workload.layers),
                operation_overhead_s=workload.operation_overhead_s * self.operations,
            )
        if self.slow:
            workers = tuple(replace(each, speed=each.speed * self.slow.get(each.id, 1.0)) for each in cluster.workers)
            cluster = cluster.of(workers)
        if self.slow_links:
            shares = assumed_shares(self.slow_links, self.measured_links, cluster.hosts)
            cluster = replace(cluster, slow_links=tuple((*ends, share) for ends, share in shares.items()))
        return CostModel(workload, cluster)

    def to_json(self) -> dict[str, object]:
        """Return the field `corrections` of the event `decision`."""
        return {
            "operations": self.operations,
            "step": self.step,
            "transfer": self.transfer,
            "migration": self.migration,
            "slow": {str(worker): speed for worker, speed in sorted(self.slow.items())},
            "slow_links": {f"{one}-{other}": share for (one, other), share in sorted(self.slow_links.items())},
        }


class _Expected(NamedTuple):
    """Median seconds of a worker's operations in a step by the reference costs, as `OperationTimes` has them.

    `backward_s` excludes recomputed forwards, which take `recompute_s`.
    """

    forward_s: float
    backward_s: float
    recompute_s: float


class _Ratios(NamedTuple):
    """Ratios of observed to expected seconds: of a worker's forwards, its backwards, and both together.

    That of backwards is not a number where none is expected to take time, because nothing is trained there or below.
    """

    forward: float
    backward: float
    both: float


@dataclass(slots=True)
class Calibration:
    """Keeps the observations of recent steps, and derives corrections from them.

    The first step after a change allocates buffers and opens connections, so it counts only for a worker without other
    observations. If a worker gets other layers, its old observations count until there are new ones.

    Attributes:
        slow: slow worker -> its speed relative to the others, as the detector of slowness has found it.
        slow_links: workers of a slow link -> the usual time of a micro-batch over it by the present one, likewise.
    """

    # Whether the reference costs tell layers apart, as a profile's do; otherwise only workers that run equal layers can
    # be compared with each other.
    knows_layers: bool
    slow: Mapping[int, float] = FrozenMap({})
    slow_links: Mapping[Ends, float] = FrozenMap({})
    _slow_links: SlowLinkDetector | None = None
    _links: LinkTimes = field(default_factory=LinkTimes)
    _plan: Plan | None = None
    _program: Program | None = None
    _reference: CostModel | None = None
    _expected: dict[int, _Expected | None] = field(default_factory=dict)
    _seen: dict[int, deque[_Ratios]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_RECENT)))
    _before: dict[int, _Ratios] = field(default_factory=dict)
    _has_begun: set[int] = field(default_factory=set)
    _steps: int = 0
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _step: float = 1.0
    _estimated: tuple[Cluster, float, float] | None = None
    _groups: dict[int, int | None] = field(default_factory=dict)
    _transfers: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _migrations: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def begin(self, plan: Plan, program: Program, reference: CostModel) -> None:
        """Begin to observe steps of this program; `reference` are the costs without any corrections."""
        for worker in list(self._seen):
            assert self._plan is not None
            if self._plan.placement.ranges_of(worker) != plan.placement.ranges_of(worker):
                self._before[worker] = _median_of(self._seen.pop(worker))
        self._plan, self._program, self._reference = plan, program, reference
        self._links.begin(program, reference)
        self._groups = _groups_of(plan, knows_layers=self.knows_layers)
        self._expected.clear()
        self._has_begun.clear()
        self._estimated = None
        self._steps = 0
        self._steps_s.clear()

    def operations(self, worker: int, times: OperationTimes) -> tuple[float, int | None] | None:
        """Record the operations of a worker of the plan in a step.

        Return the ratio of observed to expected seconds of its operations and the group of workers that compare with
        it, None for all; or None if this step is no measure of the worker's speed.
        """
        if worker not in self._expected:
            self._expected[worker] = self._expect(worker)
        expected = self._expected[worker]
        if expected is None or times.forward_s <= 0:
            return None
        forward = times.forward_s / expected.forward_s
        if not expected.backward_s:
            return self._note(worker, _Ratios(forward, math.nan, forward))
        backward = (times.backward_s - forward * expected.recompute_s) / expected.backward_s
        if backward <= 0:
            return None
        observed_s = forward * expected.forward_s + backward * expected.backward_s
        both = observed_s / (expected.forward_s + expected.backward_s)
        return self._note(worker, _Ratios(forward, backward, both))

    def _note(self, worker: int, seen: _Ratios) -> tuple[float, int | None] | None:
        if worker in self._has_begun:
            self._seen[worker].append(seen)
            return seen.both, self._groups[worker]
        self._has_begun.add(worker)
        self._before.setdefault(worker, seen)
        return None

    def learn(self, detectors: Detectors) -> None:
        """Take over the speeds of slow workers and links, as the detectors have found them."""
        self.slow = detectors.slowness.speeds
        if self._slow_links is not detectors.slow_links:
            self._slow_links = detectors.slow_links
            speeds = self._slow_links.speeds
            self.slow_links = {ends: speeds[each] for each in speeds if (ends := workers_of_link(each)) is not None}

    def links(self, worker: int, step: int, times: OperationTimes) -> dict[Ends, tuple[float, int]]:
        """Record when a worker sent and received messages in a step.

        Return for each link that is now measured: the ratio of observed to expected seconds of a message each way and a
        forward, and whether it is inside a host (0) or not (1): links of a kind compare with each other.
        """
        return self._links.reported(worker, step, times) if worker in self._has_begun else {}

    @property
    def corrections(self) -> Corrections:
        """The corrections for workers and links that are slow."""
        shares = {ends: self._links.share_of(ends, speed) for ends, speed in self.slow_links.items()}
        return Corrections(slow=self.slow, slow_links=shares, measured_links=self._links.known)

    def step(self, step_s: float) -> None:
        """Record the duration of a committed step."""
        self._steps += 1
        if self._steps > 1:
            self._steps_s.append(step_s)

    def transfer(self, *, expected_s: float, observed_s: float) -> None:
        """Record the duration of a transfer."""
        if expected_s > 0 and observed_s > 0:
            self._transfers.append(observed_s / expected_s)

    def migration(self, *, expected_s: float, observed_s: float) -> None:
        """Record the duration of a migration."""
        if expected_s > 0 and observed_s > 0:
            self._migrations.append(observed_s / expected_s)

    @property
    def rates(self) -> tuple[float, float] | None:
        """Ratios of observed to reference seconds, of forwards and of backwards; None before the first."""
        recent = self._medians()
        if recent is None:
            return None
        # Before any worker that trains layers was observed, as in `OperationRate`.
        return recent.forward, 2 * recent.forward if math.isnan(recent.backward) else recent.backward

    @property
    def both(self) -> float:
        """Ratio of observed to expected seconds of forwards and backwards together; 1 before the first."""
        recent = self._medians()
        return 1.0 if recent is None else recent.both

    @property
    def transfers(self) -> float:
        """Median ratio of observed to expected seconds of the transfers; 1 before the first."""
        return statistics.median(self._transfers) if self._transfers else 1.0

    @property
    def migrations(self) -> float | None:
        """Median ratio of observed to expected seconds of the migrations; None before the first."""
        return statistics.median(self._migrations) if self._migrations else None

    def unexplained(self, costs: CostModel) -> float:
        """Return the ratio of the median recent step to its estimate, for the plan in force with these costs.

        Before some steps of the plan were run: the previous value; 1 if there is none.
        """
        if len(self._steps_s) >= _STEPS_NEEDED:
            self._step = statistics.median(self._steps_s) / self._estimate_s(costs)
        return self._step

    def step_s(self, costs: CostModel) -> float:
        """Return the seconds of a step of the plan in force."""
        return self.unexplained(costs) * self._estimate_s(costs)

    def _estimate_s(self, costs: CostModel) -> float:
        """Estimate a step of the plan in force: by a replay for other workers, in proportion for other layer times."""
        assert self._plan is not None
        assert self._program is not None
        work_s = math.fsum(costs.workload.layer_times_s)
        if self._estimated is None or self._estimated[0] != costs.cluster:
            estimate = estimate_step(self._plan, self._program, costs)
            self._estimated = (costs.cluster, work_s, estimate.step_s)
        _, then_s, step_s = self._estimated
        return step_s * work_s / then_s

    def _expect(self, worker: int) -> _Expected | None:
        assert self._program is not None
        assert self._reference is not None
        by_kind: dict[OperationKind, list[Operation]] = defaultdict(list)
        for operation in self._program.of(worker):
            by_kind[operation.kind].append(operation)
        forward_s, _ = _medians_s(self._reference, worker, by_kind[OperationKind.FORWARD])
        backward_s, with_recompute_s = _medians_s(self._reference, worker, by_kind[OperationKind.BACKWARD])
        if not backward_s:
            halves = (OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD)
            medians = [_medians_s(self._reference, worker, by_kind[kind]) for kind in halves]
            backward_s, with_recompute_s = sum(each for each, _ in medians), sum(each for _, each in medians)
        if forward_s <= 0:
            return None
        return _Expected(forward_s, backward_s, with_recompute_s - backward_s)

    def _medians(self) -> _Ratios | None:
        """Return the medians over the workers of the plan; over all others if there are no observations of these."""
        own = () if self._program is None else self._program.workers
        found = [each for worker in own if (each := self._median(worker)) is not None]
        found = found or [each for worker in self._before if (each := self._median(worker)) is not None]
        return _median_of(found) if found else None

    def _median(self, worker: int) -> _Ratios | None:
        seen = self._seen.get(worker)
        return _median_of(seen) if seen else self._before.get(worker)


def _groups_of(plan: Plan, *, knows_layers: bool) -> dict[int, int | None]:
    """Return the group of each worker: the first worker that runs the same layers.

    None for a worker without enough peers if the costs tell layers apart, so that it compares with all others.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for worker in plan.workers:
        alike[plan.placement.ranges_of(worker)].append(worker)
    return {
        worker: None if knows_layers and len(workers) < _PEERS else workers[0]
        for workers in alike.values()
        for worker in workers
    }


def _median_of(seen: Iterable[_Ratios]) -> _Ratios:
    columns = ([each for each in column if not math.isnan(each)] for column in zip(*seen, strict=True))
    return _Ratios(*(statistics.median(column) if column else math.nan for column in columns))


def _medians_s(costs: CostModel, worker: int, operations: Sequence[Operation]) -> tuple[float, float]:
    """Return median seconds of operations without and with recomputed forwards; zero if there are none."""
    if not operations:
        return 0.0, 0.0
    return (
        statistics.median(costs.compute_s(worker, operation.kind, operation.layers) for operation in operations),
        statistics.median(costs.operation_s(worker, operation) for operation in operations),
    )
