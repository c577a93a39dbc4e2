"""Pipelines are scheduled as the engine for any routes does it, which knows nothing of counters."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.plan import Hop, LayerRange
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule._engine import replayed
from chameleon_ft.schedule._network import NetworkBuilder
from chameleon_ft.schedule._part import Part
from chameleon_ft.schedule._pipelines import PipelinePart, PipelineSchedule, pipeline_schedule, rough_schedule
from chameleon_ft.schedule._trials import Trials
from chameleon_ft.schedule.best import DEFAULT_EFFORT
from chameleon_ft.workload import LayerCost, Workload

_EFFORTS = (1, 3_000, 20_000, 100_000)


def some_costs(rng: random.Random, layers: int, workers: int) -> CostModel:
    """Workers and layers of few different times, so that much happens at once."""
    times = [rng.choice((0.5, 1.0, 1.5, rng.random())) for _ in range(3)]
    costs = tuple(
        LayerCost(
            f"layer {layer}",
            rng.choice(times),
            rng.choice(times),
            rng.choice((*times, 0.0)),
            param_bytes=1,
            gradient_bytes=1,
            optimizer_bytes=1,
            activation_bytes=1,
            weight_grad_bytes=1,
            output_bytes=rng.choice((0, 1, 8)),
        )
        for layer in range(layers)
    )
    cluster = Cluster(
        tuple(Worker(worker, f"host {worker // 3}", speed=rng.choice((1.0, 1.0, 0.7))) for worker in range(workers)),
        Link(rng.choice((0.0, 0.1)), 10.0),
        Link(rng.choice((0.0, 0.5, 3.0)), 2.0),
    )
    return CostModel(Workload(costs, 1, 1), cluster)


def _limit(rng: random.Random, depth: int) -> InFlightLimit:
    in_flight = rng.randint(1, 2 * depth)
    return InFlightLimit(in_flight, in_flight + rng.choice((0, 0, 1, depth)))


@pytest.mark.parametrize("seed", range(300))
def test_a_pipeline_alone_is_scheduled_as_any_other_routes(seed: int) -> None:
    rng = random.Random(seed)
    depth, split = rng.randint(1, 9), rng.random() < 0.7
    layers = depth + rng.randint(0, 4)
    costs = some_costs(rng, layers, depth)
    stops = [*sorted(rng.sample(range(1, layers), depth - 1)), layers]
    workers = rng.sample(range(depth), depth)
    hops = tuple(map(Hop, workers, map(LayerRange, [0, *stops[:-1]], stops)))
    micro_batches = rng.choice((1, 2, 3, 7, 20))
    # As few in flight as only one of them can do with, or more than there will be.
    ceiling = [rng.choice((_limit(rng, depth), InFlightLimit(2 * depth, 2 * depth))) for _ in workers]
    effort = rng.choice(_EFFORTS)
    builder = NetworkBuilder(costs, split_backward=split, recompute=rng.sample(workers, rng.randint(0, depth)))

    found = pipeline_schedule(
        hops, micro_batches, builder, ceiling=np.array([(own.in_flight, own.kept) for own in ceiling]).T, effort=effort
    )

    trials = Trials(builder, tuple(workers), dict(zip(workers, ceiling, strict=True)))
    part = Part(trials, [hops], [0] * micro_batches)
    part.finish(effort)
    wanted = part.best[1]
    assert found.step_s == wanted.step_s
    assert found.codes.tolist() == wanted.codes.tolist()
    assert found.ends_s.tolist() == wanted.ends_s.tolist()
    assert list(found.last_s) == wanted.last_s
    assert found.schedule().codes.tolist() == wanted.codes.tolist()

    alone = PipelinePart(Trials(builder, tuple(workers), dict(zip(workers, ceiling, strict=True))), hops, micro_batches)
    alone.finish(effort)
    rules, schedule = alone.best
    assert rules == part.best[0]
    assert schedule.codes.tolist() == wanted.codes.tolist()
    assert (schedule.step_s, schedule.beyond_limits) == (wanted.step_s, wanted.beyond_limits)


@pytest.mark.parametrize("seed", range(100))
def test_orders_are_replayed_on_other_workers_as_those_of_any_routes(seed: int) -> None:
    rng = random.Random(seed)
    depth, split = rng.randint(1, 9), rng.random() < 0.7
    layers = depth + rng.randint(0, 4)
    costs = some_costs(rng, layers, depth)
    stops = [*sorted(rng.sample(range(1, layers), depth - 1)), layers]
    ranges = list(map(LayerRange, [0, *stops[:-1]], stops))
    hops, others = (tuple(map(Hop, rng.sample(range(depth), depth), ranges)) for _ in range(2))
    micro_batches = rng.choice((1, 2, 3, 7, 20))
    builder = NetworkBuilder(costs, split_backward=split, recompute=rng.sample(range(depth), rng.randint(0, depth)))
    # Room for all that is tried.
    ceiling = np.full((2, depth), 2 * depth)

    found = rough_schedule(hops, micro_batches, builder, ceiling=ceiling)
    assert found is not None

    best = pipeline_schedule(hops, micro_batches, builder, ceiling=ceiling, effort=DEFAULT_EFFORT)
    assert best.step_s <= found.step_s * (1 + 1e-9)
    assert found.replayed(hops).ends_s.tolist() == found.ends_s.tolist()
    again = found.replayed(others)
    wanted = replayed(again.schedule().network, found.codes)
    assert again.codes.tolist() == found.codes.tolist()
    assert again.ends_s.tolist() == wanted.ends_s.tolist()
    assert again.step_s == wanted.step_s


@pytest.mark.parametrize("seed", range(50))
def test_with_slack_that_is_enough_which_is_near_to_the_lower_bound(seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.randint(2, 9)
    costs = some_costs(rng, depth, depth)
    hops = tuple(Hop(stage, LayerRange(stage, stage + 1)) for stage in range(depth))
    builder = NetworkBuilder(costs, split_backward=True)
    ceiling = np.full((2, depth), 2 * depth)
    exact, near, any_does = (
        pipeline_schedule(hops, 20, builder, ceiling=ceiling, effort=DEFAULT_EFFORT, slack=slack)
        for slack in (1e-9, 0.05, 100.0)
    )
    assert exact.step_s <= near.step_s <= any_does.step_s
    bound_s = exact.schedule().network.lower_bound_s()
    assert near.step_s <= max(exact.step_s, bound_s * 1.05)


@pytest.mark.parametrize("seed", range(200))
def test_runs_that_end_early_are_not_missed(seed: int) -> None:
    rng = random.Random(seed)
    depth, split = rng.randint(1, 9), rng.random() < 0.7
    layers = depth + rng.randint(0, 4)
    costs = some_costs(rng, layers, depth)
    stops = [*sorted(rng.sample(range(1, layers), depth - 1)), layers]
    hops = tuple(map(Hop, rng.sample(range(depth), depth), map(LayerRange, [0, *stops[:-1]], stops)))
    micro_batches = rng.choice((1, 2, 3, 7, 20))
    builder = NetworkBuilder(costs, split_backward=split)
    ceiling = np.array([(own.in_flight, own.kept) for own in (_limit(rng, depth) for _ in hops)]).T

    def found(latest_s: list[float] | None) -> PipelineSchedule | None:
        latest = None if latest_s is None else np.array(latest_s)
        return rough_schedule(hops, micro_batches, builder, ceiling=ceiling, latest_s=latest)

    in_full = found(None)
    assert in_full is not None
    in_time = found([end_s * (1 + 1e-6) for end_s in in_full.last_s])
    for early in (found([math.inf] * depth), in_time):
        assert early is not None
        assert early.step_s <= in_full.step_s
    late = found([end_s * rng.choice((0.5, 0.9, 0.99)) for end_s in in_full.last_s])
    assert late is None or late.step_s <= in_full.step_s * (1 + 1e-9)
    assert found([0.0] * depth) is None or micro_batches > 1
