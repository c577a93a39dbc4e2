"""Oobleck's templates and combinations against a plain enumeration, and its plans against ours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.estimate import estimate_step
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.search._memory import StageMemory
from chameleon_ft.search.oobleck import PipelineTemplate, oobleck_plan, pipeline_templates
from chameleon_ft.workload import LayerCost, Workload
from tests.search.oracle import Exhaustive
from tests.search.test_paper import partitions, pipelines_of, placements, small

FREE = Link(0.0, math.inf)
seeds = st.integers(0, 2**32 - 1)


def iteration_s(costs: CostModel, stops: tuple[int, ...], micro_batches: int) -> float:
    """T1 + T2 + T3 as they are printed, stages numbered from 0."""
    stages = [costs.workload.layers[start:stop] for start, stop in pairwise((0, *stops))]
    overhead_s = 2 * costs.workload.operation_overhead_s
    times_s = [overhead_s + sum(layer.forward_s + layer.backward_s for layer in own) for own in stages]
    slowest = next(index for index, own_s in enumerate(times_s) if own_s == pytest.approx(max(times_s), rel=1e-9))
    return sum(times_s) + (micro_batches - len(stops) + slowest - 1) * max(times_s) + sum(times_s[slowest:])


def fits(costs: CostModel, stops: tuple[int, ...], micro_batches: int) -> bool:
    capacity = costs.cluster.workers[0].memory_bytes
    memory = StageMemory(costs.workload, split_backward=False)
    depth = len(stops)
    return capacity is None or all(
        memory.stage_bytes(*stage, InFlightLimit(depth - index, depth - index), micro_batches) <= capacity
        for index, stage in enumerate(pairwise((0, *stops)))
    )


def template_least_s(costs: CostModel, nodes: int) -> float:
    """Over all cuts that fit, for four micro-batches to a stage."""
    layers = len(costs.workload.layers)
    cuts = ((*inner, layers) for inner in combinations(range(1, layers), nodes - 1))
    share = min(4 * nodes, costs.workload.micro_batches)
    return min((iteration_s(costs, cut, 4 * nodes) for cut in cuts if fits(costs, cut, share)), default=math.inf)


def mixes(costs: CostModel, nodes: list[int], pipelines: int) -> Iterator[list[tuple[int, int]]]:
    """All combinations of templates for so many nodes that use up the workers, with all shares."""
    workers, micro_batches = len(costs.cluster.workers), costs.workload.micro_batches
    for chosen in partitions(workers, workers):
        if pipelines <= len(chosen) <= micro_batches and set(chosen) <= set(nodes):
            for extra in placements(micro_batches - len(chosen), len(chosen)):
                yield [(depth, 1 + more) for depth, more in zip(chosen, extra, strict=True)]


@settings(max_examples=100, deadline=None)
@given(seed=seeds, fault_tolerance=st.integers(0, 1))
def test_templates_are_the_best_of_all_cuts(seed: int, fault_tolerance: int) -> None:
    costs = small(seed, workers=8, layers=7, micro_batches=20)
    templates = pipeline_templates(costs, fault_tolerance=fault_tolerance)
    workers, layers = len(costs.cluster.workers), len(costs.workload.layers)
    least = {nodes: template_least_s(costs, nodes) for nodes in range(1, min(workers, layers) + 1)}
    possible = [nodes for nodes, least_s in least.items() if least_s < math.inf]
    fewest = min(possible, default=0)
    assert list(templates) == [
        nodes for nodes in possible if nodes == fewest or nodes <= workers - fault_tolerance * fewest
    ]
    for nodes, template in templates.items():
        assert template.nodes == nodes
        assert template.stops[-1] == layers
        assert all(start < stop for start, stop in pairwise((0, *template.stops)))
        assert template.iteration_s(4 * nodes) == pytest.approx(least[nodes], rel=1e-9)
        assert iteration_s(costs, template.stops, 7) == pytest.approx(template.iteration_s(7), rel=1e-9)


def test_the_estimate_of_equal_stages_is_that_of_equal_pipelines() -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0)
    cluster = Cluster(tuple(Worker(number, "host") for number in range(4)), FREE, FREE)
    template = pipeline_templates(CostModel(Workload((layer,) * 4, 16, 1), cluster))[4]
    assert template == PipelineTemplate(stops=(1, 2, 3, 4), slowest=0, slowest_s=3.0, pass_s=12.0, tail_s=12.0)
    assert template.iteration_s(16) == (16 + 4 - 1) * 3


@settings(max_examples=100, deadline=None)
@given(seed=seeds, fault_tolerance=st.integers(0, 1))
def test_the_combination_is_the_best_of_all(seed: int, fault_tolerance: int) -> None:
    costs = small(seed, workers=8, layers=5, micro_batches=9)
    templates = pipeline_templates(costs, fault_tolerance=fault_tolerance)

    def time_s(nodes: int, share: int) -> float:
        template = templates[nodes]
        return template.iteration_s(share) if fits(costs, template.stops, share) else math.inf

    all_mixes = mixes(costs, list(templates), fault_tolerance + 1)
    least_s = min((max(time_s(*each) for each in mix) for mix in all_mixes), default=math.inf)
    chosen = oobleck_plan(costs, fault_tolerance=fault_tolerance)
    if least_s == math.inf:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.estimate_s == pytest.approx(least_s, rel=1e-9)
    pipelines = pipelines_of(chosen)
    assert len(pipelines) > fault_tolerance
    assert max(time_s(len(own), share) for own, share in pipelines.items()) == pytest.approx(least_s, rel=1e-9)
    for own in pipelines:
        ranges = [chosen.found.plan.placement.ranges_of(worker)[0] for worker in own]
        assert tuple(each.stop for each in ranges) == templates[len(own)].stops


@settings(max_examples=60, deadline=None)
@given(seed=seeds, split=st.booleans())
def test_its_plan_is_whole_and_fits(seed: int, split: bool) -> None:
    costs = small(seed, workers=9, layers=6, micro_batches=20)
    chosen = oobleck_plan(costs, split_backward=split)
    if chosen is None:
        return
    plan = chosen.found.plan
    assert chosen.found.name == "oobleck"
    assert plan.split_backward is split
    assert plan.workers == tuple(worker.id for worker in costs.cluster.workers)
    assert plan.micro_batches == costs.workload.micro_batches
    estimate = estimate_step(plan, best_program(plan, costs, ceiling=chosen.found.ceiling).program, costs)
    assert not estimate.over_capacity(costs)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, split=st.booleans(), kinds=st.integers(1, 2))
def test_it_is_never_faster_than_the_fastest_pipelines(seed: int, split: bool, kinds: int) -> None:
    costs = small(seed, workers=5, layers=4, micro_batches=5, kinds=kinds)
    chosen = oobleck_plan(costs, split_backward=split)
    if chosen is not None:
        assert chosen.found.step_s >= Exhaustive(costs).least_of_kind_s(split) * (1 - 1e-9)


def test_find_plan_is_never_slower() -> None:
    compared = 0
    for seed in range(40):
        costs = small(seed, workers=8, layers=5, micro_batches=12)
        chosen = [
            oobleck_plan(costs, fault_tolerance=losses, split_backward=split)
            for losses in (0, 1)
            for split in (False, True)
        ]
        try:
            found = find_plan(costs, effort=None)
        except InfeasibleError:
            assert chosen == [None] * 4
            continue
        assert found.complete
        for each in chosen:
            if each is not None:
                compared += 1
                assert found.best.step_s <= each.found.step_s * (1 + 1e-9)
    assert compared > 60


def test_bad_input() -> None:
    workload = Workload((LayerCost("layer", 1.0, 1.0, 1.0),), 2, 1)
    with pytest.raises(PlanError, match="no worker is left"):
        oobleck_plan(CostModel(workload, Cluster((), FREE, FREE)))
    with pytest.raises(ConfigError, match="fault_tolerance must be zero or more"):
        oobleck_plan(CostModel(workload, Cluster((Worker(0, "host"),), FREE, FREE)), fault_tolerance=-1)
