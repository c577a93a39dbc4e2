"""Oobleck's templates and combinations against a plain enumeration, and its plans against ours."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError
from chameleon_ft.lab.oobleck import PipelineTemplate, oobleck_plan, pipeline_templates, reconfigured_pipelines
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, Workload
from tests.examples import examples
from tests.golden import refused
from tests.lab.one_f_one_b import fits
from tests.lab.test_paper import partitions, pipelines_of, placements, small
from tests.search.instances import with_gradients

FREE = Link(0.0, math.inf)
seeds = st.integers(0, 2**32 - 1)


def iteration_s(costs: CostModel, cut_points: tuple[int, ...], micro_batches: int, *, recompute: bool = False) -> float:
    """T1 + T2 + T3 as they are printed, stages numbered from 0."""
    workload = costs.workload
    stages = list(pairwise((0, *cut_points)))
    times_s = [
        2 * workload.operation_overhead_s + sum(map(partial(layer_s, workload, recompute=recompute), range(*stage)))
        for stage in stages
    ]
    slowest = next(index for index, own_s in enumerate(times_s) if own_s == pytest.approx(max(times_s), rel=1e-9))
    return sum(times_s) + (micro_batches - len(stages) + slowest - 1) * max(times_s) + sum(times_s[slowest:])


def layer_s(workload: Workload, number: int, *, recompute: bool) -> float:
    """Forward and backward, and the forward once more in layers that recompute: not the first and the last."""
    layer = workload.layers[number]
    recompute_s = layer.forward_s if recompute and 0 < number < len(workload.layers) - 1 else 0.0
    return layer.forward_s + layer.backward_s + recompute_s


def sync_s(costs: CostModel, pipelines: int) -> float:
    """A ring of all pipelines, on the link between hosts if there are several."""
    link = costs.cluster.inter_host if len(set(costs.cluster.hosts.values())) > 1 else costs.cluster.intra_host
    num_bytes = costs.workload.layers[0].gradient_bytes
    return 2 * (pipelines - 1) * (link.latency_s + num_bytes / pipelines / link.bytes_per_s) if num_bytes else 0.0


def template_least_s(costs: CostModel, nodes: int, *, recompute: bool) -> float:
    """Over all cuts that fit, for four micro-batches to a stage."""
    layers = len(costs.workload.layers)
    cuts = ((*inner, layers) for inner in combinations(range(1, layers), nodes - 1))
    share = min(4 * nodes, costs.workload.micro_batches)
    fitting = (cut for cut in cuts if fits(costs, cut, share, recompute=recompute))
    return min((iteration_s(costs, cut, 4 * nodes, recompute=recompute) for cut in fitting), default=math.inf)


def mixes(costs: CostModel, nodes: list[int], pipelines: int) -> Iterator[list[tuple[int, int]]]:
    """All combinations of templates for so many nodes that use up the workers, with all shares."""
    workers, micro_batches = len(costs.cluster.workers), costs.workload.micro_batches
    for chosen in partitions(workers, workers):
        if pipelines <= len(chosen) <= micro_batches and set(chosen) <= set(nodes):
            for extra in placements(micro_batches - len(chosen), len(chosen)):
                yield [(depth, 1 + more) for depth, more in zip(chosen, extra, strict=True)]


@settings(max_examples=examples(100), deadline=None)
@given(seed=seeds, fault_tolerance=st.integers(0, 1), recompute=st.booleans())
def test_templates_are_the_best_of_all_cuts(seed: int, fault_tolerance: int, recompute: bool) -> None:
    costs = small(seed, workers=8, layers=7, micro_batches=20)
    templates = pipeline_templates(costs, fault_tolerance=fault_tolerance, recompute=recompute)
    workers, layers = len(costs.cluster.workers), len(costs.workload.layers)
    least = {nodes: template_least_s(costs, nodes, recompute=recompute) for nodes in range(1, min(workers, layers) + 1)}
    possible = [nodes for nodes, min_s in least.items() if min_s < math.inf]
    fewest = min(possible, default=0)
    assert list(templates) == [
        nodes for nodes in possible if nodes == fewest or nodes <= workers - fault_tolerance * fewest
    ]
    for nodes, template in templates.items():
        assert len(template.cut_points) == nodes
        assert template.cut_points[-1] == layers
        assert all(start < stop for start, stop in pairwise((0, *template.cut_points)))
        assert template.iteration_s(4 * nodes) == pytest.approx(least[nodes], rel=1e-9)
        assert iteration_s(costs, template.cut_points, 7, recompute=recompute) == pytest.approx(
            template.iteration_s(7), rel=1e-9
        )


@settings(max_examples=examples(100), deadline=None)
@given(seed=seeds, fault_tolerance=st.integers(0, 1), hosts=st.integers(1, 3), slow=st.booleans())
def test_the_combination_is_the_best_of_all(seed: int, fault_tolerance: int, hosts: int, slow: bool) -> None:
    """With gradients to reduce and, on slow links, so many of them that fewer pipelines are better."""
    costs = with_gradients(small(seed, workers=8, layers=5, micro_batches=9), random.Random(seed))
    workers = tuple(replace(worker, host=f"host {worker.id % hosts}") for worker in costs.cluster.workers)
    costs = CostModel(costs.workload, Cluster(workers, Link(0.01, 40.0), Link(0.5, 20.0) if slow else FREE))
    chosen = oobleck_plan(costs, fault_tolerance=fault_tolerance)

    min_s = {
        recompute: min(
            (
                max(template_s(costs, template, share, recompute=recompute) for template, share in mix)
                + sync_s(costs, len(mix))
                for mix in all_mixes(costs, fault_tolerance, recompute=recompute)
            ),
            default=math.inf,
        )
        for recompute in (False, True)
    }
    if chosen is None:
        assert min(min_s.values()) == math.inf
        return
    plan = chosen.found.plan
    recompute = bool(plan.recompute)
    assert chosen.estimate_s == pytest.approx(min_s[recompute], rel=1e-9)
    templates = pipeline_templates(costs, fault_tolerance=fault_tolerance, recompute=recompute)
    pipelines = pipelines_of(chosen)
    assert len(pipelines) > fault_tolerance
    slowest_s = max(
        template_s(costs, templates[len(own)], share, recompute=recompute) for own, share in pipelines.items()
    )
    assert slowest_s + sync_s(costs, len(pipelines)) == pytest.approx(min_s[recompute], rel=1e-9)
    for own in pipelines:
        ranges = [plan.placement.ranges_of(worker)[0] for worker in own]
        assert tuple(each.stop for each in ranges) == templates[len(own)].cut_points


def template_s(costs: CostModel, template: PipelineTemplate, share: int, *, recompute: bool) -> float:
    own_fits = fits(costs, template.cut_points, share, recompute=recompute)
    return template.iteration_s(share) if own_fits else math.inf


def all_mixes(
    costs: CostModel, fault_tolerance: int, *, recompute: bool
) -> Iterator[list[tuple[PipelineTemplate, int]]]:
    templates = pipeline_templates(costs, fault_tolerance=fault_tolerance, recompute=recompute)
    for mix in mixes(costs, list(templates), fault_tolerance + 1):
        yield [(templates[nodes], share) for nodes, share in mix]


@pytest.mark.parametrize(
    ("live", "fewest", "expected"),
    [
        ([4, 4, 3], 2, [3, 4, 4]),  # takes the template of its new size
        ([4, 4, 0], 2, [4, 4]),
        ([4, 4, 1], 2, [2, 3, 4]),  # borrows from the largest
        ([2, 2, 1], 2, [2, 3]),  # no other has a node to spare: merged
        ([1, 1, 1], 2, [3]),
        ([1], 2, []),
        ([], 2, []),
    ],
)
def test_pipelines_are_reconfigured_as_by_the_released_code(live: list[int], fewest: int, expected: list[int]) -> None:
    numbers = iter(range(sum(live)))
    pipelines = [[next(numbers) for _ in range(count)] for count in live]
    found = reconfigured_pipelines(pipelines, fewest)
    assert [len(own) for own in found] == expected
    assert sorted(worker for own in found for worker in own) == (list(range(sum(live))) if expected else [])


@settings(max_examples=examples(60), deadline=None)
@given(seed=seeds, data=st.data())
def test_reconfigured_pipelines_are_templates_of_their_new_sizes(seed: int, data: st.DataObject) -> None:
    costs = small(seed, workers=9, layers=6, micro_batches=20)
    workers = len(costs.cluster.workers)
    live = data.draw(st.sampled_from(list(partitions(workers, workers))))
    chosen = oobleck_plan(costs, live_nodes=live)
    if chosen is None:
        return
    templates = pipeline_templates(costs, recompute=bool(chosen.found.plan.recompute))
    pipelines = pipelines_of(chosen)
    assert sorted(map(len, pipelines)) == sorted(map(len, reconfigured_pipelines(map(range, live), min(templates))))
    for own in pipelines:
        ranges = [chosen.found.plan.placement.ranges_of(worker)[0] for worker in own]
        assert tuple(each.stop for each in ranges) == templates[len(own)].cut_points


def test_bad_input() -> None:
    workload = Workload((LayerCost("layer", 1.0, 1.0, 1.0),), 2, 1)
    costs = CostModel(workload, Cluster((Worker(0, "host"),), FREE, FREE))
    with refused(ConfigError):
        oobleck_plan(costs, fault_tolerance=-1)
    with refused(ConfigError):
        oobleck_plan(costs, live_nodes=[1, 2])
