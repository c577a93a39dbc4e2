"""A pipeline has one schedule, whether it is looked at by its times alone, or in a plan, alone or beside others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.schedule import (
    CostModel,
    InFlightLimit,
    PipelineSchedule,
    PipelineTimes,
    best_program,
    check_program,
    pipeline_schedule,
    replay,
)
from chameleon_ft.schedule.best import DEFAULT_EFFORT, Problem, best_parts, best_schedule, program_of
from chameleon_ft.schedule.list_scheduler import limits_array, limits_of_array
from chameleon_ft.schedule.network import NetworkBuilder, pipeline_network, pipeline_times
from chameleon_ft.schedule.records import Integers
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


@dataclass(frozen=True)
class Pipelines:
    """Pipelines side by side, some of them alike, on workers of few speeds and with few or many in flight."""

    plan: Plan
    costs: CostModel
    in_flight_limits: dict[int, InFlightLimit]

    @classmethod
    def drawn(cls, rng: random.Random, count: int) -> Pipelines:
        layers = rng.randint(2, 9)
        costs = some_costs(rng, layers, count * layers)
        ids = iter(rng.sample(range(count * layers), count * layers))
        held: dict[int, tuple[LayerRange, ...]] = {}
        routes: list[Route] = []
        in_flight_limits: dict[int, InFlightLimit] = {}
        for _ in range(count):
            depth = rng.randint(1, layers)
            stops = [*sorted(rng.sample(range(1, layers), depth - 1)), layers]
            hops = tuple(Hop(next(ids), LayerRange(*own)) for own in zip([0, *stops[:-1]], stops, strict=True))
            held.update((hop.worker, (hop.layers,)) for hop in hops)
            routes += [Route(len(routes) + number, hops) for number in range(rng.choice((1, 2, 3, 7, 20)))]
            for hop in hops:
                # Down to one in flight, or more than there will be.
                in_flight_limits[hop.worker] = rng.choice((_limit(rng, depth), InFlightLimit(2 * depth, 2 * depth)))
        recompute = {
            worker: RecomputedLayers.in_full(held[worker][0])
            for worker in rng.sample(sorted(held), rng.randint(0, len(held)))
        }
        return cls(Plan(Placement(layers, held), tuple(routes), rng.random() < 0.7, recompute), costs, in_flight_limits)

    def ways(self) -> list[tuple[Hop, ...]]:
        """The hops of each pipeline."""
        return list(dict.fromkeys(route.hops for route in self.plan.routes))

    def times(self, hops: Sequence[Hop]) -> PipelineTimes:
        plan = self.plan
        return pipeline_times(hops, self.costs, split_backward=plan.split_backward, recompute=plan.recompute)

    def scheduled(self, hops: Sequence[Hop], effort: float) -> PipelineSchedule:
        """The schedule of one of them alone."""
        return pipeline_schedule(
            self.times(hops),
            sum(route.hops == hops for route in self.plan.routes),
            split_backward=self.plan.split_backward,
            in_flight_limits=limits_array([hop.worker for hop in hops], self.in_flight_limits),
            effort=effort,
        )


@pytest.mark.parametrize("seed", range(200))
def test_the_network_made_of_times_is_scheduled_like_the_one_made_of_routes(seed: int) -> None:
    rng = random.Random(seed)
    case, effort = Pipelines.drawn(rng, 1), rng.choice(_EFFORTS)
    (hops,), plan = case.ways(), case.plan
    workers = tuple(hop.worker for hop in hops)
    builder = NetworkBuilder(case.costs, split_backward=plan.split_backward, recompute=plan.recompute, workers=workers)

    found = case.scheduled(hops, effort)

    wanted = best_schedule(Problem.of(builder, [hops], [0] * plan.micro_batches, case.in_flight_limits), effort=effort)
    assert builder.times(hops) == found.times
    assert found.step_s == wanted.step_s
    assert found.codes.tolist() == wanted.codes.tolist()
    assert found.ends_s.tolist() == wanted.ends_s.tolist()
    assert found.limits.tolist() == wanted.limits.tolist()
    assert found.last_s == wanted.last_s
    assert [order.tolist() for order in found.orders] == [order.tolist() for order in wanted.orders]


@pytest.mark.parametrize("seed", range(100))
def test_the_program_of_a_plan_has_the_schedule_that_each_of_its_pipelines_has_alone(seed: int) -> None:
    rng = random.Random(seed)
    case, effort = Pipelines.drawn(rng, rng.randint(1, 5)), rng.choice((0, *_EFFORTS))
    alone = {hops: case.scheduled(hops, effort) for hops in case.ways()}

    best = best_program(case.plan, case.costs, in_flight_limits=case.in_flight_limits, effort=effort)

    check_program(best.program, case.plan)
    timeline = replay(best.program, case.costs)
    for hops, schedule in alone.items():
        ends_s = tuple(max(timed.end_s for timed in timeline.of(hop.worker)) for hop in hops)
        assert ends_s == schedule.last_s
        for hop, limit in zip(hops, limits_of_array(schedule.limits), strict=True):
            assert best.limits[hop.worker] == limit
    assert best.step_s == timeline.step_s == max(schedule.step_s for schedule in alone.values())


@pytest.mark.parametrize("seed", range(50))
def test_orders_are_replayed_under_other_times(seed: int) -> None:
    rng = random.Random(seed)
    case = Pipelines.drawn(rng, 1)
    (hops,) = case.ways()
    found = case.scheduled(hops, 3_000)
    link = Link(rng.choice((0.0, 0.7)), 1.0)
    others = replace(case, costs=replace(case.costs, cluster=replace(case.costs.cluster, intra_host=link)))

    again = found.replayed(others.times(hops))

    assert found.replayed(found.times).ends_s.tolist() == found.ends_s.tolist()
    assert again.codes.tolist() == found.codes.tolist()
    # As long as a program of these orders is predicted to take.
    (part,) = best_parts(
        case.plan,
        others.costs,
        in_flight_limits=case.in_flight_limits,
        reuse=[replace(again, in_flight_limits=found.in_flight_limits)],
    )
    assert part.schedule.step_s == again.step_s
    timeline = replay(program_of(case.plan, [part]), others.costs)
    assert timeline.step_s == again.step_s
    assert again.last_s == tuple(max(timed.end_s for timed in timeline.of(hop.worker)) for hop in hops)


def _roomy(depth: int) -> Integers:
    return np.full((3, depth), 2 * depth)


@pytest.mark.parametrize("seed", range(50))
def test_with_slack_that_is_enough_which_is_near_to_the_lower_bound(seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.randint(2, 9)
    hops = tuple(Hop(stage, LayerRange(stage, stage + 1)) for stage in range(depth))
    times = pipeline_times(hops, some_costs(rng, depth, depth), split_backward=True)
    exact, near, any_does = (
        pipeline_schedule(
            times, 20, split_backward=True, in_flight_limits=_roomy(depth), effort=DEFAULT_EFFORT, slack=slack
        )
        for slack in (1e-9, 0.05, 100.0)
    )
    assert exact.step_s <= near.step_s <= any_does.step_s
    bound_s = pipeline_network(times, 20, split_backward=True).lower_bound_s()
    assert near.step_s <= max(exact.step_s, bound_s * 1.05)


@pytest.mark.parametrize("split", [False, True])
def test_without_effort_half_of_the_hardest_pipelines_are_hardly_longer(split: bool) -> None:
    longer = []
    for seed in range(60):
        rng = random.Random(seed)
        depth = rng.randint(2, 12)
        hops = tuple(Hop(stage, LayerRange(stage, stage + 1)) for stage in range(depth))
        times = pipeline_times(hops, some_costs(rng, depth, depth), split_backward=split)
        quick, best = (
            pipeline_schedule(
                times, 3 * depth, split_backward=split, in_flight_limits=_roomy(depth), effort=effort
            ).step_s
            for effort in (0, DEFAULT_EFFORT)
        )
        longer.append(quick / best - 1)
    assert min(longer) >= 0
    assert sorted(longer)[len(longer) // 2] < 0.02


@pytest.mark.parametrize("micro_batches", [2, 5])
def test_a_limit_holds_beside_stages_that_take_no_time(micro_batches: int) -> None:
    # The gradient of the last stage arrives just when the stage before it becomes free.
    times = PipelineTimes(
        forward_s=(1.0, 1.0, 0.0), backward_s=(0.0, 1.0, 0.0), weight_grad_s=(2.0, 1.0, 0.0), message_s=(0.1, 0.0)
    )
    in_flight_limits = np.array([[1, 2, 1], [1, 3, 3], [1, 3, 3]])
    found = pipeline_schedule(
        times, micro_batches, split_backward=True, in_flight_limits=in_flight_limits, effort=1_000
    )
    kept = most = 0
    for code in found.orders[0].tolist():
        kept += {0: 1, 1: 0, 2: -1}[code // (3 * micro_batches)]
        most = max(most, kept)
    assert most == 1
