"""What all policies of a simulation share: times of pipelines, mixes, and what it costs to change."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar, cast

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import StallModel
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.recovery import Policy
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import FoundPlan, InfeasibleError, equal_layouts, find_plan
from chameleon_ft.simulate.by_class.cluster_layout import (
    ClusterLayout,
    Move,
    arranged,
    by_stage,
    layout_of_plan,
    layout_step,
    move_to,
)
from chameleon_ft.simulate.by_class.fastest_mix import Mix, Mixes
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, Pipelines
from chameleon_ft.simulate.by_class.replayed import ReplayedSteps
from chameleon_ft.simulate.by_class.step_times import StepTimes
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners.options import Option, SimulatorState

__all__ = ["World", "world_of"]

_T = TypeVar("_T")

# Numbers of copies that plans are looked for with; of more, all are hardly ever lost at once.
_COPIES: Final = (1, 2, 3, 4, 6, 8, 12)
_LEAST_HOST: Final = 4
# Layouts of up to so many workers are replayed as plans, hosts and detours included, and `find_plan` is asked as well.
_REPLAYED: Final = 32


@dataclass(frozen=True, slots=True)
class World:
    """The costs of a simulation, and what has been worked out of them so far.

    Attributes:
        costs: of the workload on all workers.
        parameters: what is assumed.
        times: steps by pipelines.
        mixes: the fastest pipelines by number of workers.
        replayed: steps of small layouts.
        start: what all policies begin with; None where each begins with what is fastest for it.
        redundant: see `with_redundancy`.
    """

    costs: CostModel
    parameters: Parameters
    times: StepTimes
    mixes: Mixes
    replayed: ReplayedSteps
    start: ClusterLayout | None = None
    redundant: bool = False
    _notes: dict[str, object] = field(default_factory=dict, repr=False)

    def noted(self, name: str, make: Callable[[World], _T]) -> _T:
        """What a policy makes of this world, once."""
        if name not in self._notes:
            self._notes[name] = make(self)
        return cast(_T, self._notes[name])

    def with_redundancy(self) -> World:
        """The world of Bamboo: pipelines are equal, and every stage has its successor's state and computes its forward
        once more, so that nothing has to move after a loss."""
        split_backward = self.pipelines.split_backward
        times = StepTimes(Pipelines(self.costs, split_backward=split_backward, redundant=True))
        replayed = ReplayedSteps(times)
        return replace(self, times=times, mixes=Mixes(times), replayed=replayed, redundant=True, _notes={})

    @property
    def pipelines(self) -> Pipelines:
        """Times of single pipelines."""
        return self.times.pipelines

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers."""
        return tuple(worker.id for worker in self.costs.cluster.workers)

    def step_s(self, layout: ClusterLayout, speeds: Mapping[int, float]) -> float | None:
        """Seconds of a step; None if it cannot be run."""
        if len(layout.used) <= _REPLAYED:
            step_s = self.replayed.step_s(layout, speeds)
        else:
            step = layout_step(layout, self.times, speeds)
            step_s = None if step is None else step.step_s
        if step_s is not None and self.redundant:
            step_s *= 1 + self._redundancy(layout, step_s)
        return step_s

    def _redundancy(self, layout: ClusterLayout, step_s: float) -> float:
        """By which share redundant forwards make a step longer: as far as they do not fit into the bubbles."""
        layers = self.costs.workload.layers
        forward_s = math.fsum(layer.forward_s for layer in layers) * self.times.micro_batches
        work_s = forward_s + math.fsum(layer.backward_s for layer in layers) * self.times.micro_batches
        idle_s = max(0.0, len(layout.used) * step_s - work_s)
        repeat_s = self.parameters.redundant_forward * forward_s
        return max(0.0, repeat_s - idle_s) / (len(layout.used) * step_s)

    def phases(self, state: SimulatorState) -> StallModel:
        """The phases of a stall now. Decisions on the losses of single workers and of single hosts are prepared."""
        if not state.lost:
            return self.parameters.after_change
        hosts = self.costs.cluster.hosts
        several = len({hosts[worker] for worker in state.lost}) > 1
        prepared = not (state.interrupted or several or state.running_s < self.parameters.search_s)
        return self.parameters.after_loss if prepared else self.parameters.after_surprise

    def option(
        self, kind: str, layout: ClusterLayout, current: ClusterLayout, state: SimulatorState, *, intact: bool
    ) -> Option | None:
        """The way to another layout; None if it cannot be run or reached.

        A layout that stays as it is, and is `intact`, needs no stall.
        """
        step_s = self.step_s(layout, state.speeds)
        if step_s is None:
            return None
        if layout == current and intact:
            return Option(kind=kind, plan=layout, step_s=step_s, stall_s=0.0)
        move = Move(0, 0.0) if self.redundant else move_to(layout, current, self.pipelines)
        if move is None:
            return None
        return Option(
            kind=kind,
            plan=layout,
            step_s=step_s,
            stall_s=self.phases(state).total_s + move.transfer_s,
            repeat_s=state.repeat_s,
            moved_bytes=move.num_bytes,
        )

    def from_checkpoint(
        self, kind: str, layout: ClusterLayout, step_s: float, state: SimulatorState, *, saves_first: bool
    ) -> Option:
        """All begin anew from the last checkpoint, or from one that is written first."""
        saved_s = self.parameters.checkpoint_write_s if saves_first else 0.0
        return Option(
            kind=kind,
            plan=layout,
            step_s=step_s,
            stall_s=self.parameters.restart_s + saved_s,
            repeat_s=0.0 if saves_first else state.checkpoints.unsaved_s,
            from_checkpoint=True,
            saves_first=saves_first,
        )

    def fastest_layout(
        self, current: ClusterLayout, speeds: Mapping[int, float], *, copies: int = 1
    ) -> ClusterLayout | None:
        """The fastest pipelines of all live workers; slow ones in pipelines of their own speed, cut like most others.

        None where nothing fits. With `copies`, there are so many pipelines at least.
        """
        return _layout_of(lambda workers: self.mixes.fastest(workers, copies=copies), current, speeds)

    def replicated_layouts(self, current: ClusterLayout, speeds: Mapping[int, float]) -> list[ClusterLayout]:
        """Return the fastest pipelines, those with more copies of each layer, and those that do not leave a host.

        Of few workers, also those that `find_plan` finds, and all of them with neighbours in the same stages.
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
        on_hosts = _layout_of(
            lambda workers: self.mixes.equal_within(workers, self.pipelines.per_host), current, speeds
        )
        if on_hosts is not None:
            found.append(on_hosts)
        if len(speeds) <= _REPLAYED:
            found += [arranged(cuts, sorted(speeds), current) for cuts in self._cuts_of("found", _plans_found, speeds)]
        found = [placed for layout in found for placed in self.placements(layout)]
        return [current if set(each.pipelines) == set(current.pipelines) else each for each in dict.fromkeys(found)]

    def placements(self, layout: ClusterLayout) -> list[ClusterLayout]:
        """The layout; if it is small, also with neighbours in the same stages."""
        return [layout, by_stage(layout)] if len(layout.used) <= _REPLAYED else [layout]

    def _cuts_of(
        self, name: str, find: Callable[[CostModel], Sequence[FoundPlan]], speeds: Mapping[int, float]
    ) -> Sequence[Mapping[Cut, int]]:
        """The pipelines of the plans that `find` finds for as many equal workers on as many hosts.

        Only of plans whose backward is split or fused as in all layouts.
        """
        on_hosts = sorted(Counter(self.costs.cluster.hosts[worker] for worker in speeds).values(), reverse=True)
        hosts = [f"host{number}" for number, count in enumerate(on_hosts) for _ in range(count)]
        workers = tuple(Worker(number, host, 1.0, self.pipelines.memory_bytes) for number, host in enumerate(hosts))
        links = self.costs.cluster

        def pipelines(_: World) -> list[Mapping[Cut, int]]:
            costs = CostModel(self.costs.workload, Cluster(workers, links.intra_host, links.inter_host))
            plans = [each.plan for each in find(costs)]
            layouts = [
                layout_of_plan(plan)
                for plan in plans
                if not plan.fused_workers and plan.split_backward == self.pipelines.split_backward
            ]
            return [Counter(pipeline.cut for pipeline in layout.pipelines) for layout in layouts]

        return self.noted(f"{name} for {on_hosts}", pipelines)

    def starts(self, policy: Policy, speeds: Mapping[int, float], number: int) -> list[ClusterLayout]:
        """The layouts to begin with, the best of which is taken; of `several_starts`, only that of this number."""
        if self.start is not None and self.start.used <= speeds.keys():
            return [self.start]
        if policy.starts == "several":
            return self.several_starts(speeds)[number:][:1]
        return self._anew(speeds, equal=policy.starts == "equal")

    def restarts(self, policy: Policy, speeds: Mapping[int, float], number: int) -> list[ClusterLayout]:
        """The layouts to go on with from a checkpoint, likewise."""
        if policy.starts == "several":
            return (self.several_starts(speeds)[number:] or self._anew(speeds, equal=True))[:1]
        return self._anew(speeds, equal=not policy.replans)

    def several_starts(self, speeds: Mapping[int, float]) -> list[ClusterLayout]:
        """The fastest pipelines, then more and shorter ones: they lose less with a worker.

        Of few workers, also equal pipelines of each depth, all with neighbours in the same stages if that is faster.
        """
        found = [self.fastest_layout(ClusterLayout(()), speeds, copies=copies) for copies in (1, 2)]
        found.append(self.shallow_layout(speeds))
        if len(speeds) <= _REPLAYED:
            equal = partial(equal_layouts, split_backward=self.pipelines.split_backward)
            few = [*self._cuts_of("found", _plans_found, speeds)[:1], *self._cuts_of("equal", equal, speeds)]
            found += [arranged(cuts, sorted(speeds)) for cuts in few]
        placed = (self._faster_placed(layout, speeds) for layout in found if layout is not None)
        return list(dict.fromkeys(placed))

    def _faster_placed(self, layout: ClusterLayout, speeds: Mapping[int, float]) -> ClusterLayout:
        def step_s(placed: ClusterLayout) -> float:
            seconds = self.step_s(placed, speeds)
            return math.inf if seconds is None else seconds

        return min(self.placements(layout), key=step_s)

    def shallow_layout(self, speeds: Mapping[int, float]) -> ClusterLayout | None:
        """The fastest pipelines of one depth that are not deeper than a host has workers, or than four."""
        depth = max(_LEAST_HOST, self.pipelines.per_host)
        return _layout_of(lambda workers: self.mixes.equal_within(workers, depth), ClusterLayout(()), speeds)

    def _anew(self, speeds: Mapping[int, float], *, equal: bool) -> list[ClusterLayout]:
        if not equal:
            return self.replicated_layouts(ClusterLayout(()), speeds)
        layout = self.equal_layout(ClusterLayout(()), speeds)
        return [] if layout is None else [layout]

    def equal_layout(self, current: ClusterLayout, speeds: Mapping[int, float]) -> ClusterLayout | None:
        """The fastest pipelines of one depth."""
        return _layout_of(self.mixes.equal_pipelines, current, speeds)


def _layout_of(
    mix_of: Callable[[int], Mix | None], current: ClusterLayout, speeds: Mapping[int, float]
) -> ClusterLayout | None:
    by_speed: dict[float, list[int]] = defaultdict(list)
    if set(speeds.values()) == {1.0}:
        by_speed[1.0] = list(speeds)
    else:
        for worker, speed in speeds.items():
            by_speed[speed].append(worker)
    mix = mix_of(len(by_speed[1.0]))
    if mix is None:
        # All are slow: as many of them together are as good as any.
        mix = mix_of(len(speeds))
        return None if mix is None else arranged(_cuts(mix), sorted(speeds), current)
    pipelines = list(arranged(_cuts(mix), by_speed.pop(1.0), current).pipelines)
    main = max(_cuts(mix).items(), key=lambda item: item[1])[0]
    for speed in sorted(by_speed, reverse=True):
        slow = by_speed[speed]
        pipelines += arranged({main: len(slow) // main.depth}, slow, current).pipelines
    return ClusterLayout(tuple(pipelines))


def _cuts(mix: Mix) -> dict[Cut, int]:
    return {own.cut: count for own, count in mix.counts.items()}


def world_of(costs: CostModel, parameters: Parameters, start: Plan | None = None) -> World:
    """The world of a workload and a cluster.

    Backward is split or fused as in `start`. Without one, as in the plan that `find_plan` finds for few workers, if it
    fits by class too, and otherwise as is faster for all.

    Raises PlanError where no pipelines fit the memory, or `start` has detours.
    """
    if start is not None:
        times = StepTimes(Pipelines(costs, split_backward=start.split_backward))
        return World(costs, parameters, times, Mixes(times), ReplayedSteps(times), start=layout_of_plan(start))
    workers = len(costs.cluster.workers)
    found: dict[bool, tuple[float, World]] = {}
    for split_backward in (True, False):
        times = StepTimes(Pipelines(costs, split_backward=split_backward))
        mixes = Mixes(times)
        mix = mixes.fastest(workers)
        if mix is not None:
            found[split_backward] = mix.step_s, World(costs, parameters, times, mixes, ReplayedSteps(times))
    if not found:
        raise PlanError(f"no pipelines of {workers} workers fit the memory; take more workers, or larger ones")
    fastest_s = min(step_s for step_s, _ in found.values())
    # Pipelines of one stage take as long either way, but not those of fewer workers later.
    equal = [split for split, (step_s, _) in found.items() if step_s <= fastest_s * (1 + ROUNDING)]
    preferred = _split_as_found(costs) if len(equal) == 1 else None
    return found[preferred if preferred in found else equal[0]][1]


def _plans_found(costs: CostModel) -> Sequence[FoundPlan]:
    try:
        result = find_plan(costs)
    except InfeasibleError:
        return []
    return result.best, *result.alternatives


def _split_as_found(costs: CostModel) -> bool | None:
    """Whether backward is split in the plan that is found for few workers; None for many, or if none is found."""
    if len(costs.cluster.workers) <= _REPLAYED:
        with contextlib.suppress(InfeasibleError):
            return find_plan(costs).best.plan.split_backward
    return None
