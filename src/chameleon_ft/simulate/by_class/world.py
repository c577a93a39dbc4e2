"""Layouts by class: those to start with, and those for the live workers, shared by all policies of a simulation."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.cluster import Worker
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.recovery import LossRisk, Policy
from chameleon_ft.recovery.failure_model import host_numbers
from chameleon_ft.registry import PLANNERS
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import FoundPlan, InfeasibleError, find_plan
from chameleon_ft.simulate.by_class.cluster_layout import (
    ClusterLayout,
    ReplayedSteps,
    arranged,
    by_stage,
    layer_rings,
    layout_of_plan,
    layout_step,
)
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, Pipelines, on_workers
from chameleon_ft.simulate.by_class.step_times import Mix, Mixes, StepTimes
from chameleon_ft.simulate.parameters import Parameters

# Numbers of copies of each layer that layouts are made with; more copies are hardly ever lost at once.
_COPIES: Final = (1, 2, 3, 4, 6, 8, 12)
_SHALLOW: Final = 4
# Layouts of up to this many workers are replayed as plans, with hosts and detours, and `find_plan` is asked as well.
_REPLAYED: Final = 32
# Layouts whose risk is kept: those of a decision, of which several ask for the same one.
_LAYOUTS: Final = 32


class World:
    """The costs of a simulation, and all that is derived from them once.

    Args:
        costs: The costs of the workload on all workers.
        parameters: assumptions.
        split_backward: True if backward is split into I and W in all layouts.
        start: the layout that all policies start with; None if each starts with the one that is fastest for it.
        redundant: True if this is the world of Bamboo: pipelines are equal, and every stage has its successor's state
            and computes its forward as well, so that nothing has to move after a loss.
    """

    def __init__(
        self,
        costs: CostModel,
        parameters: Parameters,
        *,
        split_backward: bool,
        start: ClusterLayout | None = None,
        redundant: bool = False,
    ) -> None:
        self.costs = costs
        self.parameters = parameters
        self.start = start
        self.redundant = redundant
        self.workers = tuple(worker.id for worker in costs.cluster.workers)
        self.host_numbers = host_numbers(costs.cluster.hosts)
        self.pipelines = Pipelines(costs, split_backward=split_backward, redundant=redundant)
        self.times = StepTimes(self.pipelines)
        self.mixes = Mixes(self.times)
        self.rings = lru_cache(_LAYOUTS)(self._rings)
        self._risk = lru_cache(_LAYOUTS)(self._risk_among)
        self._replayed = ReplayedSteps(self.times)
        self._cuts_on_hosts = cache(self._cuts_of)
        self._equal_layouts = partial(PLANNERS["equal"], split_backward=split_backward)

    def with_redundancy(self) -> World:
        """Return the world of Bamboo on the same workers."""
        split_backward = self.pipelines.split_backward
        return World(self.costs, self.parameters, split_backward=split_backward, start=self.start, redundant=True)

    def risk(self, layout: ClusterLayout, live: NDArray[np.int64]) -> LossRisk | None:
        """Return which of the live workers and hosts hold the layers; None if some layer has no holder."""
        return self._risk(layout, len(live), int(np.count_nonzero(np.bincount(self.host_numbers[live]))))

    def _risk_among(self, layout: ClusterLayout, num_workers: int, num_hosts: int) -> LossRisk | None:
        rings, owners = self.rings(layout), self.costs.workload.owners
        if rings is None:
            return None
        return LossRisk.of_rings(rings, self.host_numbers, num_workers=num_workers, num_hosts=num_hosts, owners=owners)

    def _rings(self, layout: ClusterLayout) -> list[NDArray[np.int64]] | None:
        return layer_rings(layout, self.host_numbers, self.pipelines.num_layers)

    def step_s(self, layout: ClusterLayout, speeds: Mapping[int, float]) -> float | None:
        """Return seconds of a step; None if it cannot be run."""
        if len(layout.used) <= _REPLAYED:
            step_s = self._replayed.step_s(layout, speeds)
        else:
            step = layout_step(layout, self.times, speeds)
            step_s = None if step is None else step.step_s
        if step_s is not None and self.redundant:
            step_s *= 1 + self._redundancy(layout, step_s)
        return step_s

    def peak_bytes(self, layout: ClusterLayout, speeds: Mapping[int, float]) -> float:
        """Return the memory of the worker that needs most in a step; infinite if the layout cannot be run."""
        step = layout_step(layout, self.times, speeds)
        runs = [] if step is None else [self.pipelines.run(own, share) for own, share in step.most.items()]
        return max((math.inf if run is None else run.peak_bytes for run in runs), default=math.inf)

    def _redundancy(self, layout: ClusterLayout, step_s: float) -> float:
        """Return the share by which redundant forwards lengthen a step: the part that does not fit into the bubbles."""
        layers = self.costs.workload.layers
        forward_s = math.fsum(layer.forward_s for layer in layers) * self.times.micro_batches
        work_s = forward_s + math.fsum(layer.backward_s for layer in layers) * self.times.micro_batches
        idle_s = max(0.0, len(layout.used) * step_s - work_s)
        repeat_s = self.parameters.redundant_forward * forward_s
        return max(0.0, repeat_s - idle_s) / (len(layout.used) * step_s)

    def starts(self, policy: Policy, speeds: Mapping[int, float], number: int) -> list[ClusterLayout]:
        """Return layouts to start with, the best of which is taken; of `several_starts`, only that of this number."""
        if self.start is not None and self.start.used <= speeds.keys():
            return [self.start]
        if policy.starts == "several":
            return self.several_starts(speeds)[number:][:1]
        return self._new_layouts(speeds, equal=policy.starts == "equal")

    def restarts(self, policy: Policy, speeds: Mapping[int, float], number: int) -> list[ClusterLayout]:
        """Return the layouts to continue with from a checkpoint, as in `starts`."""
        if policy.starts == "several":
            return (self.several_starts(speeds)[number:] or self._new_layouts(speeds, equal=True))[:1]
        return self._new_layouts(speeds, equal=not policy.replans)

    def _new_layouts(self, speeds: Mapping[int, float], *, equal: bool) -> list[ClusterLayout]:
        if not equal:
            return self.replicated_layouts(ClusterLayout(()), speeds)
        layout = self.equal_layout(ClusterLayout(()), speeds)
        return [] if layout is None else [layout]

    def several_starts(self, speeds: Mapping[int, float]) -> list[ClusterLayout]:
        """Return the fastest pipelines, then more and shorter ones, which lose less with a worker.

        The shortest ones are not deeper than a host has workers, or than four. Of few workers, also equal pipelines of
        each depth, all with neighbours in equal stages if that is faster.
        """
        found = [self.fastest_layout(ClusterLayout(()), speeds, copies=copies) for copies in (1, 2)]
        depth = max(_SHALLOW, self.pipelines.per_host)
        found.append(self._layout_of(lambda count: self.mixes.equal_within(count, depth), ClusterLayout(()), speeds))
        if len(speeds) <= _REPLAYED:
            few = [*self._cuts_found(plans_found, speeds)[:1], *self._cuts_found(self._equal_layouts, speeds)]
            found += [arranged(cuts, sorted(speeds)) for cuts in few]

        def step_s(layout: ClusterLayout) -> float:
            seconds = self.step_s(layout, speeds)
            return math.inf if seconds is None else seconds

        placed = (min(self.placements(layout), key=step_s) for layout in found if layout is not None)
        return list(dict.fromkeys(placed))

    def fastest_layout(
        self, current: ClusterLayout, speeds: Mapping[int, float], *, copies: int = 1
    ) -> ClusterLayout | None:
        """Return the fastest pipelines of all live workers, at least `copies` of them; None if nothing fits."""
        return self._layout_of(lambda count: self.mixes.fastest(count, copies=copies), current, speeds)

    def equal_layout(self, current: ClusterLayout, speeds: Mapping[int, float]) -> ClusterLayout | None:
        """Return the fastest pipelines of one depth; None if nothing fits."""
        return self._layout_of(self.mixes.equal_pipelines, current, speeds)

    def replicated_layouts(self, current: ClusterLayout, speeds: Mapping[int, float]) -> list[ClusterLayout]:
        """Return the fastest pipelines, pipelines with more copies of each layer, and pipelines within a host.

        Of few workers, also those that `find_plan` finds, and all of them with neighbours in equal stages.
        """
        if self.redundant:
            equal = self.equal_layout(current, speeds)
            return [] if equal is None else [equal]
        found: list[ClusterLayout] = []
        for copies in _COPIES:
            if found and len(found[-1].pipelines) >= copies:
                continue
            layout = self.fastest_layout(current, speeds, copies=copies)
            if layout is None:
                break
            found.append(layout)
        per_host = self.pipelines.per_host
        on_hosts = self._layout_of(lambda count: self.mixes.equal_within(count, per_host), current, speeds)
        if on_hosts is not None:
            found.append(on_hosts)
        if len(speeds) <= _REPLAYED:
            found += [arranged(cuts, sorted(speeds), current) for cuts in self._cuts_found(plans_found, speeds)]
        found = [placed for layout in found for placed in self.placements(layout)]
        return [current if set(each.pipelines) == set(current.pipelines) else each for each in dict.fromkeys(found)]

    def placements(self, layout: ClusterLayout) -> list[ClusterLayout]:
        """Return the layout; if it is small, also with neighbours in equal stages."""
        return [layout, by_stage(layout)] if len(layout.used) <= _REPLAYED else [layout]

    @staticmethod
    def _layout_of(
        mix_of: Callable[[int], Mix | None], current: ClusterLayout, speeds: Mapping[int, float]
    ) -> ClusterLayout | None:
        """Return the mix for the workers at full speed, and slow workers in pipelines of their own speed.

        The latter are cut like most others. If all workers are slow, they count as equal.
        """
        by_speed: dict[float, list[int]] = defaultdict(list)
        for worker, speed in speeds.items():
            by_speed[speed].append(worker)
        mix = mix_of(len(by_speed[1.0]))
        if mix is None:
            mix, by_speed = mix_of(len(speeds)), {1.0: list(speeds)}
        if mix is None:
            return None
        cuts = {own.cut: count for own, count in mix.counts.items()}
        pipelines = list(arranged(cuts, by_speed.pop(1.0), current).pipelines)
        main = max(cuts, key=cuts.__getitem__)
        for _, slow in sorted(by_speed.items(), reverse=True):
            pipelines += arranged({main: len(slow) // main.depth}, slow, current).pipelines
        return ClusterLayout(tuple(pipelines))

    def _cuts_found(
        self, find: Callable[[CostModel], Sequence[FoundPlan]], speeds: Mapping[int, float]
    ) -> Sequence[Mapping[Cut, int]]:
        """Return the pipelines of the plans that `find` finds for as many equal workers on as many hosts."""
        on_hosts = Counter(self.costs.cluster.hosts[worker] for worker in speeds)
        return self._cuts_on_hosts(find, tuple(sorted(on_hosts.values(), reverse=True)))

    def _cuts_of(
        self, find: Callable[[CostModel], Sequence[FoundPlan]], on_hosts: tuple[int, ...]
    ) -> Sequence[Mapping[Cut, int]]:
        """Return the cuts with the number of their pipelines, of plans whose backward is as in all layouts."""
        hosts = [f"host{number}" for number, count in enumerate(on_hosts) for _ in range(count)]
        workers = (Worker(number, host, 1.0, self.pipelines.memory_bytes) for number, host in enumerate(hosts))
        plans = [each.plan for each in find(on_workers(self.costs, workers))]
        return [
            Counter(pipeline.cut for pipeline in layout_of_plan(plan).pipelines)
            for plan in plans
            if not plan.fused_workers and plan.split_backward == self.pipelines.split_backward
        ]


@lru_cache(maxsize=2)
def world_of(costs: CostModel, parameters: Parameters, start: Plan | None = None) -> World:
    """Return the world of a workload and a cluster, which simulations of several traces share.

    Backward is split or fused as in `start`. Without one, as in the plan that `find_plan` finds for few workers, if it
    fits by class too, and otherwise as is faster for all.

    Raises:
        PlanError: no pipelines fit the memory, or `start` has detours.
    """
    if start is not None:
        return World(costs, parameters, split_backward=start.split_backward, start=layout_of_plan(start))
    workers = len(costs.cluster.workers)
    found: dict[bool, tuple[float, World]] = {}
    for split_backward in (True, False):
        world = World(costs, parameters, split_backward=split_backward)
        if (mix := world.mixes.fastest(workers)) is not None:
            found[split_backward] = mix.step_s, world
    if not found:
        raise PlanError(f"no pipelines of {workers} workers fit the memory; take more workers, or larger ones")
    fastest_s = min(step_s for step_s, _ in found.values())
    # Pipelines of one stage take as long either way, but not those of fewer workers later.
    equal = [split for split, (step_s, _) in found.items() if step_s <= fastest_s * (1 + ROUNDING)]
    preferred = equal[0]
    if len(equal) == 1 and workers <= _REPLAYED and (plans := plans_found(costs)):
        preferred = plans[0].plan.split_backward
    return found[preferred if preferred in found else equal[0]][1]


@lru_cache(maxsize=64)
def plans_found(costs: CostModel) -> Sequence[FoundPlan]:
    """Return the plans that `find_plan` finds, the fastest first; none if nothing fits.

    Several policies and planners ask for those of the same workers.
    """
    try:
        result = find_plan(costs)
    except InfeasibleError:
        return ()
    return result.best, *result.alternatives
