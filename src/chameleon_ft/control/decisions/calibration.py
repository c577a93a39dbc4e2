"""Observed durations of operations, steps and transfers, as ratios to the expected ones.

Costs are often wrong by a factor: shared processors, warm devices, a profile from another machine. So the ratios of
observed to expected seconds are kept, and their medians used: one slow step changes nothing. Reads no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from chameleon_ft.cluster import Cluster
from chameleon_ft.control.decisions.links import Ends, LinkTimes, assumed_shares
from chameleon_ft.control.detectors import Detectors
from chameleon_ft.control.detectors.slow_links import SlowLinkDetector, workers_of_link
from chameleon_ft.control.wire.parts import OperationTimes
from chameleon_ft.errors import ConfigError
from chameleon_ft.estimate import estimate_step
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program

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
    """Ratios of observed to expected seconds: of a worker's forwards, its backwards, and both together."""

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
        backward = (times.backward_s - forward * expected.recompute_s) / expected.backward_s
        if backward <= 0:
            return None
        observed_s = forward * expected.forward_s + backward * expected.backward_s
        seen = _Ratios(forward, backward, observed_s / (expected.forward_s + expected.backward_s))
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
        return None if recent is None else (recent.forward, recent.backward)

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
        if forward_s <= 0 or backward_s <= 0:
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
    return _Ratios(*map(statistics.median, zip(*seen, strict=True)))


def _medians_s(costs: CostModel, worker: int, operations: Sequence[Operation]) -> tuple[float, float]:
    """Return median seconds of operations without and with recomputed forwards; zero if there are none."""
    if not operations:
        return 0.0, 0.0
    return (
        statistics.median(costs.compute_s(worker, operation.kind, operation.layers) for operation in operations),
        statistics.median(costs.operation_s(worker, operation) for operation in operations),
    )
