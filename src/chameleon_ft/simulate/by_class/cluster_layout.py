"""A plan of thousands of workers: pipelines by what they hold, with gaps where workers were lost."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.presets import Recompute
from chameleon_ft.recovery import LossRisk
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, PipelineClass, Pipelines, recomputed_layers, uniform
from chameleon_ft.simulate.by_class.step_times import ClassStep, StepTimes

__all__ = [
    "ClusterLayout",
    "LayoutPipeline",
    "Move",
    "arranged",
    "by_stage",
    "layout_of_plan",
    "layout_risk",
    "layout_step",
    "move_to",
    "plan_of_layout",
]


@dataclass(frozen=True, slots=True)
class LayoutPipeline:
    """A pipeline on workers, stage by stage; None where the worker of a stage is lost."""

    cut: Cut
    workers: tuple[int | None, ...]

    @property
    def whole(self) -> bool:
        """Whether no worker is lost."""
        return None not in self.workers

    @property
    def live(self) -> tuple[int, ...]:
        """The workers that are left."""
        return tuple(worker for worker in self.workers if worker is not None)


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Pipelines side by side. Micro-batches are shared anew with every change, and so are no part of it."""

    pipelines: tuple[LayoutPipeline, ...]
    used: frozenset[int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        used: set[int | None] = set()
        used.update(*(pipeline.workers for pipeline in self.pipelines))
        used.discard(None)
        object.__setattr__(self, "used", frozenset(used))

    def without(self, lost: Collection[int]) -> ClusterLayout:
        """The layout with gaps where these workers were."""
        if self.used.isdisjoint(lost):
            return self
        gone = set(lost)
        return ClusterLayout(
            tuple(
                pipeline
                if gone.isdisjoint(pipeline.workers)
                else LayoutPipeline(pipeline.cut, tuple(None if each in gone else each for each in pipeline.workers))
                for pipeline in self.pipelines
            )
        )

    @property
    def has_gaps(self) -> bool:
        """Whether a worker is missing anywhere."""
        return not all(pipeline.whole for pipeline in self.pipelines)

    def held(self) -> dict[int, LayerRange]:
        """What each worker holds."""
        return {
            worker: layers
            for pipeline in self.pipelines
            for worker, layers in zip(pipeline.workers, pipeline.cut.stages, strict=True)
            if worker is not None
        }


@dataclass(frozen=True, slots=True)
class Move:
    """State that goes to workers which lack it.

    Attributes:
        num_bytes: of all of it.
        transfer_s: seconds until the last has arrived.
    """

    num_bytes: int
    transfer_s: float


def arranged(wanted: Mapping[Cut, int], workers: Sequence[int], current: ClusterLayout | None = None) -> ClusterLayout:
    """So many pipelines of each cut on these workers; those of `current` that are whole and wanted stay as they are.

    The others are made of the workers that are left, neighbours by number together, so that they share hosts; within a
    pipeline, stages go to workers in the order of what they hold.
    """
    free = set(workers)
    left = dict(wanted)
    pipelines: list[LayoutPipeline] = []
    held: Mapping[int, LayerRange] = {}
    if current is not None:
        held = current.held()
        for pipeline in current.pipelines:
            if left.get(pipeline.cut, 0) and free.issuperset(pipeline.workers):
                left[pipeline.cut] -= 1
                free.difference_update(pipeline.live)
                pipelines.append(pipeline)
    pool = sorted(free)
    for cut, count in sorted(left.items(), key=lambda item: (-item[0].depth, item[0])):
        for _ in range(count):
            own, pool = pool[: cut.depth], pool[cut.depth :]
            own.sort(key=lambda worker: held[worker].start if worker in held else math.inf)
            pipelines.append(LayoutPipeline(cut, tuple(own)))
    return ClusterLayout(tuple(pipelines))


def by_stage(layout: ClusterLayout) -> ClusterLayout:
    """The pipelines with neighbouring workers in the same stages: gradients cross hosts less, activations more."""
    order = sorted(
        (position / pipeline.cut.depth, number, position)
        for number, pipeline in enumerate(layout.pipelines)
        for position in range(pipeline.cut.depth)
    )
    places: dict[int, dict[int, int]] = defaultdict(dict)
    for worker, (_, number, position) in zip(sorted(layout.used), order, strict=True):
        places[number][position] = worker
    return ClusterLayout(
        tuple(
            LayoutPipeline(pipeline.cut, tuple(places[number][each] for each in range(pipeline.cut.depth)))
            for number, pipeline in enumerate(layout.pipelines)
        )
    )


def layout_of_plan(plan: Plan) -> ClusterLayout:
    """The pipelines of a plan. Raises PlanError where micro-batches make detours, so that there are none."""
    ways = dict.fromkeys(route.hops for route in plan.routes)
    workers = [hop.worker for hops in ways for hop in hops]
    if len(set(workers)) < len(workers):
        raise PlanError("the plan has detours; begin with a plan of pipelines side by side")
    return ClusterLayout(
        tuple(
            LayoutPipeline(
                Cut(tuple(hop.layers.stop for hop in hops), _most_recomputed(plan, hops)),
                tuple(hop.worker for hop in hops),
            )
            for hops in ways
        )
    )


def _most_recomputed(plan: Plan, hops: Sequence[Hop]) -> Recompute:
    """How those of the workers recompute that recompute most."""
    own = [plan.recompute[hop.worker] for hop in hops if hop.worker in plan.recompute]
    if any(layers.full for layers in own):
        return Recompute.FULL
    return Recompute.SELECTIVE if own else Recompute.NONE


def plan_of_layout(layout: ClusterLayout, times: StepTimes) -> Plan | None:
    """The plan of a layout without gaps, on workers of speed 1; None if it does not fit the memory."""
    counts = Counter(PipelineClass(pipeline.cut) for pipeline in layout.pipelines)
    step = times.step(counts)
    if step is None:
        return None
    shares = [step.most.get(PipelineClass(pipeline.cut), 0) for pipeline in layout.pipelines]
    too_many = sum(shares) - times.micro_batches
    for number, share in enumerate(shares):
        less = min(1 if share else 0, too_many)
        shares[number] -= less
        too_many -= less
    used = [(pipeline, share) for pipeline, share in zip(layout.pipelines, shares, strict=True) if share]
    held: dict[int, tuple[LayerRange, ...]] = {}
    recompute: dict[int, RecomputedLayers] = {}
    routes: list[Route] = []
    for pipeline, share in used:
        hops = tuple(map(Hop, pipeline.live, pipeline.cut.stages))
        held.update((hop.worker, (hop.layers,)) for hop in hops)
        recompute.update(recomputed_layers(pipeline.cut, hops))
        routes += [Route(number, hops) for number in range(len(routes), len(routes) + share)]
    placement = Placement(times.pipelines.num_layers, held)
    return Plan(placement, tuple(routes), times.pipelines.split_backward, recompute)


def layout_step(layout: ClusterLayout, times: StepTimes, speeds: Mapping[int, float]) -> ClassStep | None:
    """The step of a layout; None if it does not fit the memory or a layer has no holder.

    Where pipelines have gaps, micro-batches make detours. Of a layer that g pipelines lack, the holders do the work of
    all; so with the most gaps of any layer for g, a layout with gaps takes at least as long as one with g pipelines
    fewer, and that is what it is taken to take. `search.reroute` comes near to that where there are many pipelines. It
    cuts hops between layers, so that shares need not be whole: they are multiples of one over the layers of the
    shortest stage, where all pipelines are alike.
    """
    whole, broken = _counted(layout, speeds)
    if broken:
        missing = Counter(layer for own in broken for layer in own[1])
        most = max(missing.values())
        alike = Counter(own for own, _ in broken)
        kept = len(broken) - most
        if not whole and not kept:
            return None
        for own, count in alike.most_common():
            taken = min(count, kept)
            whole[own] += taken
            kept -= taken
    step = times.step(whole)
    if step is None or len(whole) > 1 or not layout.has_gaps:
        return step
    ((own, count),) = whole.items()
    pieces = min(map(len, own.cut.stages))
    share, part = divmod(math.ceil(times.micro_batches * pieces / count), pieces)
    if not part or not share:
        return step
    low_s, high_s = (times.pipelines.program_s(own, each) for each in (share, share + 1))
    program_s = low_s + (high_s - low_s) * part / pieces
    return replace(step, step_s=step.step_s - step.program_s + program_s, program_s=program_s)


def move_to(new: ClusterLayout, current: ClusterLayout, pipelines: Pipelines) -> Move | None:
    """What has to move to a new layout; None where a layer has no holder, or what arrives does not fit beside the old.

    The time is that of the worker that sends or receives most, at the bandwidth between hosts: sources and rounds of
    `chameleon_ft.transfer` come to that but for a few messages.
    """
    stays = set(current.pipelines)
    held: dict[int, LayerRange] | None = None
    total = largest = 0
    lacking: Counter[int] = Counter()
    for pipeline in new.pipelines:
        if pipeline in stays:
            continue
        held = current.held() if held is None else held
        for worker, layers in zip(pipeline.workers, pipeline.cut.stages, strict=True):
            if worker is None or held.get(worker) == layers:
                continue
            had = held.get(worker)
            missing = [layer for layer in layers if had is None or layer not in had]
            received = sum(map(pipelines.layer_state_bytes, missing))
            lacking.update(missing)
            total += received
            largest = max(largest, received)
            before = 0 if had is None else pipelines.held_bytes(had)
            if pipelines.memory_bytes is not None and before + received > pipelines.memory_bytes:
                return None
    if held is None or not lacking:
        return Move(0, 0.0)
    holders = _holders(held.values(), pipelines.num_layers)
    if any(not holders[layer] for layer in lacking):
        return None
    sent = max(-(-count // holders[layer]) * pipelines.layer_state_bytes(layer) for layer, count in lacking.items())
    return Move(total, pipelines.costs.cluster.inter_host.message_s(max(largest, sent)))


def layout_risk(layout: ClusterLayout, hosts: Mapping[int, str], num_layers: int) -> LossRisk | None:
    """Return which workers and hosts hold the layers of a layout; None if some layer has no holder.

    Args:
        layout: gaps are allowed.
        hosts: the host of each live worker, of those outside the layout too.
        num_layers: of the model.
    """
    by_stage: dict[LayerRange, list[int]] = defaultdict(list)
    for pipeline in layout.pipelines:
        for worker, layers in zip(pipeline.workers, pipeline.cut.stages, strict=True):
            if worker is not None:
                by_stage[layers].append(worker)
    # Neighbouring layers mostly belong to the same stages.
    stages = {tuple(own for own in by_stage if layer in own) for layer in range(num_layers)}
    if () in stages:
        return None
    holders = [[worker for own in each for worker in by_stage[own]] for each in stages]
    return LossRisk.of(holders, hosts)


def _counted(
    layout: ClusterLayout, speeds: Mapping[int, float]
) -> tuple[Counter[PipelineClass], list[tuple[PipelineClass, tuple[int, ...]]]]:
    """Whole pipelines by class, and those with gaps, as if they were whole, with the layers that they lack."""
    slow = {worker for worker, speed in speeds.items() if speed != 1.0}
    plain: Counter[Cut] = Counter()
    whole: Counter[PipelineClass] = Counter()
    broken: list[tuple[PipelineClass, tuple[int, ...]]] = []
    for pipeline in layout.pipelines:
        if not slow and pipeline.whole:
            plain[pipeline.cut] += 1
            continue
        live = pipeline.live
        own = PipelineClass(pipeline.cut)
        if slow and not slow.isdisjoint(live):
            known = [1.0 if worker is None else speeds[worker] for worker in pipeline.workers]
            own = PipelineClass(pipeline.cut, uniform(known))
        if len(live) == len(pipeline.workers):
            whole[own] += 1
        elif live:
            gaps = (
                layer
                for worker, layers in zip(pipeline.workers, pipeline.cut.stages, strict=True)
                if worker is None
                for layer in layers
            )
            broken.append((own, tuple(gaps)))
    whole.update({PipelineClass(cut): count for cut, count in plain.items()})
    return whole, broken


def _holders(held: Iterable[LayerRange], num_layers: int) -> list[int]:
    counts = Counter(held)
    holders = [0] * num_layers
    for layers, count in counts.items():
        for layer in layers:
            holders[layer] += count
    return holders
