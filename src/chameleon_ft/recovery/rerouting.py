"""Data rerouting: the lost workers' share of the micro-batches goes to the other holders of their layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan.placement import LayerRange, Placement
from chameleon_ft.plan.plan import Hop, Plan, Route
from chameleon_ft.schedule._engine import Rules
from chameleon_ft.schedule._trials import ROUNDING, Trials
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit
from chameleon_ft.schedule.program import OperationKind

__all__ = ["reroute"]

# Operations that may be scheduled in search of a better spread: some tens of milliseconds. A plan so large that the
# rules alone take more than that keeps the spread by load.
_EFFORT: Final = 16_000
# F, and B or I and W. Two in a plan with fused backward, which only makes its search end earlier.
_OPERATIONS_PER_HOP: Final = 3


def reroute(
    plan: Plan,
    lost: Collection[int],
    costs: CostModel,
    *,
    ceiling: Mapping[int, InFlightLimit] | None = None,
) -> Plan:
    """The plan without the lost workers: same placement otherwise, their hops spread over live holders of the layers.

    The spread starts from a greedy one by load and is improved by moving and swapping hops, as long as the schedules
    that `best_program` tries get shorter and the effort, a fixed number of scheduled operations, lasts. So it is good,
    not proven optimal. Hops of live workers stay where they are. Works on any plan, also one that was rerouted before.
    Deterministic. Workers that `plan` does not have are ignored.

    Args:
        plan: what was running.
        lost: the workers that are gone.
        costs: how long operations and messages take.
        ceiling: what each worker can keep at most; the same that `best_program` is going to get.

    Raises:
        NoHolderError: layers whose last holder is lost.
        PlanError: the workload has another number of layers than the plan.
    """
    placement = plan.placement.without(lost)
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    detours = _Detours(plan, placement)
    if not detours.gaps:
        return Plan(placement, plan.routes, plan.split_backward)
    start = _spread_by_load(detours, _Loads(plan, placement, costs))
    first = detours.plan(start)
    return detours.plan(_improved(detours, start, Trials(first, costs, ceiling)))


@dataclass(frozen=True, slots=True)
class _Gap:
    """Layers on a route that have lost their worker, and those that can run them: the same for every layer."""

    layers: LayerRange
    holders: tuple[int, ...]


class _Detours:
    """The routes of a plan with gaps where workers are lost; an assignment is a worker for each gap, in order."""

    def __init__(self, plan: Plan, placement: Placement) -> None:
        self._placement = placement
        self._split = plan.split_backward
        self.gaps: list[_Gap] = []
        # Hops that stay, and indices of gaps.
        self._parts: list[list[Hop | int]] = []
        for route in plan.routes:
            parts: list[Hop | int] = []
            for hop in route.hops:
                if placement.holds(hop.worker, hop.layers):
                    parts.append(hop)
                    continue
                for layers in _equally_held(placement, hop.layers):
                    parts.append(len(self.gaps))
                    self.gaps.append(_Gap(layers, placement.holders(layers.start)))
            self._parts.append(parts)

    def routes(self, assignment: Sequence[int]) -> list[tuple[Hop, ...]]:
        """The hops of every route."""
        routes: list[tuple[Hop, ...]] = []
        for parts in self._parts:
            hops: list[Hop] = []
            for part in parts:
                hop = Hop(assignment[part], self.gaps[part].layers) if isinstance(part, int) else part
                if hops and hops[-1].worker == hop.worker:
                    hop = Hop(hop.worker, LayerRange(hops.pop().layers.start, hop.layers.stop))
                hops.append(hop)
            routes.append(tuple(hops))
        return routes

    def plan(self, assignment: Sequence[int]) -> Plan:
        routes = tuple(Route(index, hops) for index, hops in enumerate(self.routes(assignment)))
        return Plan(self._placement, routes, self._split)


class _Loads:
    """Seconds that each live worker computes in a step."""

    def __init__(self, plan: Plan, placement: Placement, costs: CostModel) -> None:
        self._costs = costs
        self._work_s: dict[Hop, float] = {}
        self.load_s = dict.fromkeys(placement.workers, 0.0)
        for route in plan.routes:
            for hop in route.hops:
                if hop.worker in self.load_s:
                    self.load_s[hop.worker] += self.work_s(hop)

    def work_s(self, hop: Hop) -> float:
        if hop not in self._work_s:
            self._work_s[hop] = sum(
                self._costs.compute_s(hop.worker, kind, hop.layers)
                for kind in (OperationKind.FORWARD, OperationKind.BACKWARD)
            )
        return self._work_s[hop]


def _equally_held(placement: Placement, layers: LayerRange) -> Iterator[LayerRange]:
    """`layers` cut where their holders change."""
    start = layers.start
    for layer in layers:
        if layer + 1 == layers.stop or placement.holders(layer + 1) != placement.holders(start):
            yield LayerRange(start, layer + 1)
            start = layer + 1


def _spread_by_load(detours: _Detours, loads: _Loads) -> list[int]:
    """Each gap in turn to the holder that would have the least to do with it."""
    assignment: list[int] = []
    for gap in detours.gaps:
        load_s, worker = min(
            (loads.load_s[holder] + loads.work_s(Hop(holder, gap.layers)), holder) for holder in gap.holders
        )
        loads.load_s[worker] = load_s
        assignment.append(worker)
    return assignment


def _improved(detours: _Detours, start: list[int], trials: Trials) -> list[int]:
    """`start` after moves and swaps of gaps that made the step shorter, under the best rules first, then the others."""
    routes = detours.routes(start)
    most = _EFFORT // (_OPERATIONS_PER_HOP * sum(map(len, routes)))
    ranked = trials.ranked(routes)
    best, step_s = start, ranked[0][1].step_s
    for rules, _ in ranked:
        best, step_s = _climbed(detours, best, step_s, trials, rules, most)
    return best


def _climbed(
    detours: _Detours, start: list[int], step_s: float, trials: Trials, rules: Rules, most: int
) -> tuple[list[int], float]:
    """What first improvements lead to under `rules`, and its time: a local optimum unless `most` trials are made."""
    best = start
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(detours, best):
            if trials.count >= most:
                return best, step_s
            found_s = trials.run(detours.routes(neighbour), rules).step_s
            if found_s < step_s * (1 - ROUNDING):
                best, step_s, improved = neighbour, found_s, True
                break
    return best, step_s


def _neighbours(detours: _Detours, assignment: list[int]) -> Iterator[list[int]]:
    """Assignments that differ in one gap, or in two that have changed places."""
    for index, gap in enumerate(detours.gaps):
        for holder in gap.holders:
            if holder != assignment[index]:
                yield [*assignment[:index], holder, *assignment[index + 1 :]]
    for i, gap in enumerate(detours.gaps):
        for j in range(i + 1, len(detours.gaps)):
            other = detours.gaps[j]
            if assignment[i] != assignment[j] and assignment[j] in gap.holders and assignment[i] in other.holders:
                swapped = list(assignment)
                swapped[i], swapped[j] = assignment[j], assignment[i]
                yield swapped
