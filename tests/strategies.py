"""Hypothesis strategies for the pure part, from layers and workers to plans and losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route, data_pipeline_plan
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule.records import components
from chameleon_ft.workload import LayerCost, Workload

# Equal times are common on purpose: ties are where orders go wrong.
seconds = st.one_of(st.sampled_from([0.5, 1.0, 1.0, 2.0]), st.floats(0.01, 3.0))
speeds = st.one_of(st.just(1.0), st.sampled_from([0.5, 2.0]), st.floats(0.2, 4.0))
links = st.builds(
    Link,
    latency_s=st.one_of(st.just(0.0), st.floats(0.0, 2.0)),
    bytes_per_s=st.one_of(st.just(math.inf), st.floats(1.0, 1000.0)),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with a cost model for it."""

    plan: Plan
    costs: CostModel


@dataclass(frozen=True, slots=True)
class Shape:
    """Equal pipelines: their number, their depth, and the micro-batches of each."""

    dp: int
    pp: int
    share: int


shapes = st.builds(Shape, dp=st.integers(1, 4), pp=st.integers(1, 5), share=st.integers(1, 8))


def equal_costs(
    *,
    layers: int,
    micro_batches: int,
    workers: int,
    forward_s: float = 1.0,
    input_grad_s: float = 1.0,
    weight_grad_s: float = 1.0,
    latency_s: float = 0.0,
    gradient_bytes: int = 0,
) -> CostModel:
    """Return the cost model of equal layers on equal workers."""
    cost = LayerCost("layer", forward_s, input_grad_s, weight_grad_s, gradient_bytes=gradient_bytes)
    link = Link(latency_s, math.inf)
    return CostModel(
        Workload((cost,) * layers, micro_batches, 1),
        Cluster(tuple(Worker(worker, "host") for worker in range(workers)), link, link),
    )


def pipelines(shape: Shape, *, split_backward: bool = False) -> Plan:
    """Return the plan of a shape with one layer per stage."""
    return data_pipeline_plan(
        layer_costs=[1.0] * shape.pp,
        dp=shape.dp,
        pp=shape.pp,
        micro_batches=shape.dp * shape.share,
        split_backward=split_backward,
    )


def recomputing(plan: Plan, workers: Iterable[int]) -> Plan:
    """Return the plan with these workers recomputing all their layers."""
    return dataclasses.replace(plan, recompute={w: RecomputedLayers.in_full(plan.placement.span(w)) for w in workers})


@st.composite
def some_recompute(draw: st.DrawFn, plan: Plan) -> Plan:
    """Draw a plan with any of its workers recomputing any range of their layers, in full or in part selectively."""
    recompute: dict[int, RecomputedLayers] = {}
    for worker in draw(st.sets(st.sampled_from(plan.workers))):
        held = st.sampled_from(plan.placement.layers_of(worker))
        first, last = sorted((draw(held), draw(held)))
        recompute[worker] = RecomputedLayers(first, last + 1, draw(st.integers(0, last + 1 - first)))
    return dataclasses.replace(plan, recompute=recompute)


def workloads(layers: int, micro_batches: int) -> st.SearchStrategy[Workload]:
    """Draw workloads of `layers` unequal layers."""
    cost = st.builds(
        LayerCost,
        name=st.just("layer"),
        forward_s=seconds,
        input_grad_s=seconds,
        weight_grad_s=seconds,
        output_bytes=st.integers(0, 100),
        selective_s=st.sampled_from([0.0, 0.1]),
    )
    return st.builds(
        Workload,
        layers=st.lists(cost, min_size=layers, max_size=layers).map(tuple),
        micro_batches=st.just(micro_batches),
        micro_batch_size=st.integers(1, 4),
        operation_overhead_s=st.sampled_from([0.0, 0.0, 0.1]),
    )


@st.composite
def cost_models(draw: st.DrawFn, plan: Plan) -> CostModel:
    """Draw cost models for `plan`: unequal layers, workers of different speeds on one or several hosts."""
    count = max(plan.workers) + 1
    workers = tuple(
        Worker(worker, draw(st.sampled_from(["host a", "host b"])), draw(speeds)) for worker in range(count)
    )
    workload = draw(workloads(plan.placement.num_layers, plan.micro_batches))
    return CostModel(workload, Cluster(workers, draw(links), draw(links)))


@st.composite
def layer_cuts(draw: st.DrawFn, layers: int) -> list[LayerRange]:
    """Draw a division of `layers` layers into stages."""
    inner = draw(st.sets(st.integers(1, layers - 1))) if layers > 1 else set()
    edges = [0, *sorted(inner), layers]
    return [LayerRange(start, stop) for start, stop in pairwise(edges)]


@st.composite
def placements(draw: st.DrawFn, *, several_ranges: bool) -> Placement:
    """Draw placements of one to four pipelines of any depths, in which every layer has a holder.

    With `several_ranges`, a worker may hold stages of several pipelines, or several of one.
    """
    layers = draw(st.integers(1, 7))
    ranges: dict[int, list[LayerRange]] = {}
    for _ in range(draw(st.integers(1, 4))):
        for stage in draw(layer_cuts(layers)):
            open_to = [
                worker
                for worker, held in ranges.items()
                if all(other.stop <= stage.start or stage.stop <= other.start for other in held)
            ]
            if several_ranges and open_to and draw(st.booleans()):
                ranges[draw(st.sampled_from(open_to))].append(stage)
            else:
                ranges[len(ranges)] = [stage]
    return Placement(layers, {worker: tuple(held) for worker, held in ranges.items()})


@st.composite
def routes(draw: st.DrawFn, placement: Placement, micro_batch: int) -> Route:
    """Draw routes through a placement, by any holders and with hops of any length."""
    hops: list[Hop] = []
    layer = 0
    while layer < placement.num_layers:
        worker = draw(st.sampled_from(placement.holders(layer)))
        held = next(held for held in placement.ranges_of(worker) if layer in held)
        # Usually up to the end of the worker's range, as in real plans.
        stop = draw(st.one_of(st.just(held.stop), st.integers(layer + 1, held.stop)))
        hops.append(Hop(worker, LayerRange(layer, stop)))
        layer = stop
    return Route(micro_batch, tuple(hops))


@st.composite
def plans(draw: st.DrawFn, *, several_ranges: bool = True, max_micro_batches: int = 10) -> Plan:
    """Draw any plans: unequal pipelines, detours, workers twice on a route."""
    placement = draw(placements(several_ranges=several_ranges))
    micro_batches = draw(st.integers(1, max_micro_batches))
    ways = [draw(routes(placement, 0)).hops for _ in range(draw(st.integers(1, 4)))]
    return Plan(
        placement,
        tuple(Route(m, draw(st.sampled_from(ways))) for m in range(micro_batches)),
        draw(st.booleans()),
    )


@st.composite
def some_fused(draw: st.DrawFn, plan: Plan) -> Plan:
    """Draw a plan with fused backward in any of its components, if it splits backward."""
    every = components(plan.routes) if plan.split_backward else []
    fused = [worker for own in every if draw(st.booleans()) for worker in own.workers]
    return dataclasses.replace(plan, fused_workers=frozenset(fused))


@st.composite
def planned(draw: st.DrawFn, *, several_ranges: bool = True) -> Planned:
    """Draw any plans with cost models."""
    plan = draw(plans(several_ranges=several_ranges))
    return Planned(plan, draw(cost_models(plan)))


@st.composite
def mixed(draw: st.DrawFn, cases: st.SearchStrategy[Planned]) -> Planned:
    """Draw these cases with fused backward in some components of their plans."""
    case = draw(cases)
    return dataclasses.replace(case, plan=draw(some_fused(case.plan)))


@st.composite
def pipelined(draw: st.DrawFn) -> Planned:
    """Draw plans of equal pipelines, with unequal layers and workers."""
    shape = draw(shapes)
    plan = pipelines(shape, split_backward=draw(st.booleans()))
    return Planned(plan, draw(cost_models(plan)))


def losses(plan: Plan, most: int = 4) -> st.SearchStrategy[list[int]]:
    """Draw one to `most` workers of `plan` to lose; layers may be left without a holder."""
    return st.lists(st.sampled_from(plan.workers), min_size=1, max_size=most, unique=True)


def survivable(plan: Plan, lost: Sequence[int]) -> bool:
    """Return whether every layer still has a holder without the lost workers."""
    return not plan.placement.without(lost).unheld_layers
