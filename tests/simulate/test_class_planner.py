"""Plans by class of pipelines: how many copies of each layer are kept, by how failures come."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from chameleon_ft.lab.planned_layouts import equal_layouts
from chameleon_ft.recovery import POLICIES, Checkpoints, FailureModel
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout
from chameleon_ft.simulate.by_class.world import World, world_of
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners.class_planner import ClassPlanner
from chameleon_ft.simulate.planners.planner import SimulatorState
from tests.simulate.clusters import costs

WORKERS = 12
SPEEDS = dict.fromkeys(range(WORKERS), 1.0)
RARE = FailureModel(worker_mtbf_s=1e9, prior_failures=1.0)
SINGLE = replace(RARE, failures=200, worker_s=WORKERS * 200 * 200.0)
TOGETHER = replace(SINGLE, failures=800, together={4: 200})


def state(rate: FailureModel) -> SimulatorState:
    return SimulatorState(
        speeds=SPEEDS,
        lost=frozenset(),
        repeat_s=0.0,
        running_s=1e6,
        interrupted=False,
        checkpoints=Checkpoints(longest_s=3_600.0),
        rate=rate,
    )


@pytest.fixture(scope="module")
def world() -> World:
    return world_of(costs(WORKERS, state_bytes=2 * 10**9), Parameters())


def pipelines_of(world: World, policy: str, rate: FailureModel) -> int:
    planner = ClassPlanner(POLICIES[policy], world)
    assert planner.start(state(world.parameters.rate)) is not None
    chosen = planner.decide(state(rate))
    assert chosen is not None
    return len(chosen.plan.pipelines)


@pytest.mark.parametrize("policy", ["chameleon", "repartition"])
def test_the_more_are_lost_together_the_more_copies_are_kept(world: World, policy: str) -> None:
    copies = [pipelines_of(world, policy, rate) for rate in (RARE, SINGLE, TOGETHER)]
    assert copies == sorted(copies)
    assert copies[0] < 4 < copies[-1]


def test_layouts_with_more_copies_are_candidates(world: World) -> None:
    layouts = world.replicated_layouts(ClusterLayout(()), SPEEDS)
    counts = [len(layout.pipelines) for layout in layouts]
    assert min(counts) < max(counts)
    assert len(set(layouts)) == len(layouts)


def test_policies_of_fixed_depth_begin_with_equal_pipelines_of_each_depth_too(world: World) -> None:
    starts = [Counter(pipeline.cut.depth for pipeline in layout.pipelines) for layout in world.several_starts(SPEEDS)]
    equal = equal_layouts(world.costs, split_backward=world.pipelines.split_backward)
    assert len(equal) > 2
    for each in equal:
        depths = Counter(len(hops) for hops in {route.hops for route in each.plan.routes})
        assert depths in starts
