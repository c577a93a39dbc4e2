"""The search against trying everything, and what it says about its plans."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route, data_pipeline_plan
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search import InfeasibleError, find_plan, recut_plan
from chameleon_ft.workload import LayerCost, Workload
from tests.examples import examples
from tests.golden import refused
from tests.search.instances import instance, with_gradients
from tests.search.oracle import Exhaustive, cuts

PRESET = derive_workload(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1, micro_batches=64)
seeds = st.integers(0, 2**32 - 1)


def small(seed: int) -> CostModel:
    rng = random.Random(seed)
    kinds = rng.choice([1, 1, 2, 2, 3])
    return instance(
        rng,
        workers=rng.randint(1, 6),
        layers=rng.randint(1, 4),
        micro_batches=rng.randint(1, 5),
        kinds=kinds,
        memory=rng.random() < 0.6,
    )


def without_gradients(workload: Workload) -> Workload:
    return dataclasses.replace(
        workload, layers=tuple(dataclasses.replace(layer, gradient_bytes=0) for layer in workload.layers)
    )


@settings(max_examples=examples(60), deadline=None)
@given(seed=seeds)
def test_a_complete_search_equals_trying_everything(seed: int) -> None:
    costs = small(seed)
    min_s = Exhaustive(costs).min_s()
    if min_s == math.inf:
        with pytest.raises(InfeasibleError):
            find_plan(costs, effort=None)
        return
    found = find_plan(costs, effort=None)
    # Programs may fit the memory under larger limits than those that hold for any order of operations.
    assert found.bound_s <= found.best.step_s <= min_s * (1 + 1e-9)
    assert found.exhaustive
    assert found.complete == (found.best.step_s <= found.bound_s * (1 + 1e-8))


def lists(workers: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All sets of pipelines of some of the workers."""
    if not workers:
        yield []
        return
    first, *rest = workers
    yield from lists(tuple(rest))
    for count in range(len(rest) + 1):
        for others in combinations(rest, count):
            left = tuple(worker for worker in rest if worker not in others)
            for order in permutations((first, *others)):
                for more in lists(left):
                    yield [order, *more]


def shares(micro_batches: int, pipelines: int) -> Iterator[tuple[int, ...]]:
    if pipelines == 1:
        yield (micro_batches,)
        return
    for own in range(1, micro_batches - pipelines + 2):
        for rest in shares(micro_batches - own, pipelines - 1):
            yield (own, *rest)


@settings(max_examples=examples(25), deadline=None)
@given(seed=seeds)
def test_no_pipelines_that_reduce_gradients_beat_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    costs = with_gradients(
        instance(
            rng,
            workers=rng.randint(2, 4),
            layers=rng.randint(1, 3),
            micro_batches=rng.randint(2, 4),
            kinds=rng.choice([1, 1, 2]),
            memory=False,
        ),
        rng,
    )
    own = tuple(dataclasses.replace(worker, host=f"host {worker.id % 3 % 2}") for worker in costs.cluster.workers)
    near, far = Link(rng.choice([0.0, 0.2]), 50.0), Link(rng.choice([0.0, 0.5]), rng.choice([5.0, 20.0]))
    costs = CostModel(costs.workload, Cluster(own, near, far))
    layers = len(costs.workload.layers)
    min_s = math.inf
    for split in (False, True):
        for pipelines in lists(tuple(worker.id for worker in own)):
            if not pipelines or max(map(len, pipelines)) > layers or len(pipelines) > costs.workload.micro_batches:
                continue
            cut_points = [rng.choice(list(cuts(layers, len(workers)))) for workers in pipelines]
            share = rng.choice(list(shares(costs.workload.micro_batches, len(pipelines))))
            hops = [
                tuple(Hop(w, LayerRange(*cut)) for w, cut in zip(workers, pairwise((0, *ends_at)), strict=True))
                for workers, ends_at in zip(pipelines, cut_points, strict=True)
            ]
            routes = [way for way, count in zip(hops, share, strict=True) for _ in range(count)]
            plan = Plan(
                Placement(layers, {hop.worker: (hop.layers,) for way in hops for hop in way}),
                tuple(Route(number, way) for number, way in enumerate(routes)),
                split,
            )
            program = best_program(plan, costs, effort=500).program
            min_s = min(min_s, estimate_step(plan, program, costs).step_s)
    assert find_plan(costs).bound_s <= min_s * (1 + 1e-9)
    assert find_plan(costs, effort=None).bound_s <= min_s * (1 + 1e-9)


def test_a_share_is_ruled_out_where_a_smaller_one_took_too_long() -> None:
    rng = random.Random(1144)
    costs = instance(
        rng,
        workers=rng.randint(1, 12),
        layers=rng.randint(1, 4),
        micro_batches=rng.randint(1, 5),
        kinds=rng.randint(2, 3),
        memory=rng.random() < 0.6,
    )
    assert find_plan(costs, effort=None).best.step_s == pytest.approx(Exhaustive(costs).min_s(), rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(seed=seeds)
def test_a_plan_found_with_little_effort_keeps_its_predictions(seed: int) -> None:
    costs = small(seed)
    try:
        found = find_plan(costs)
    except InfeasibleError:
        assert Exhaustive(costs).min_s() == math.inf
        return
    plan = found.best.plan
    assert plan.micro_batches == costs.workload.micro_batches
    assert found.bound_s <= found.best.step_s
    estimate = estimate_step(
        plan, best_program(plan, costs, in_flight_limits=found.best.in_flight_limits).program, costs
    )
    assert not estimate.over_capacity(costs)
    assert found.bound_s <= estimate.step_s


@pytest.mark.parametrize("lost", [(), (7,), (0, 9, 15)])
def test_no_plan_for_a_preset_moves_less_and_is_faster(lost: tuple[int, ...]) -> None:
    cluster = device("h100-80g").cluster(16).without(lost)
    costs = CostModel(PRESET, cluster)
    before = data_pipeline_plan(
        layer_costs=PRESET.layer_times_s,
        dp=4,
        pp=4,
        micro_batches=64,
        split_backward=True,
    )
    others = {"reroute": reroute(before, lost, costs)} if lost else {"before": before}
    found = find_plan(costs, current=before.placement, others=others)
    front = [found.best, *found.alternatives]
    assert [each.step_s for each in front] == sorted(each.step_s for each in front)
    figures = [(each.step_s, each.moved_bytes, each.host_single_points_of_failure) for each in front]
    for one in figures:
        assert not any(other != one and all(map(float.__le__, map(float, other), map(float, one))) for other in figures)
    assert min(moved for _, moved, _ in figures) == 0, "the plan that was passed moves nothing"
    assert found.bound_s < found.best.step_s
    assert all(each.peak_bytes <= 80 * 10**9 for each in front)


def test_one_pipeline_takes_what_its_plan_takes() -> None:
    costs = CostModel(dataclasses.replace(PRESET, micro_batches=8), device("h100-80g").cluster(2))
    found = find_plan(costs)
    assert len({route.hops for route in found.best.plan.routes}) == 1
    program = best_program(found.best.plan, costs, in_flight_limits=found.best.in_flight_limits).program
    assert estimate_step(found.best.plan, program, costs).step_s == pytest.approx(found.best.step_s)


@pytest.mark.parametrize("layer_s", [0.0, 1e-9])
def test_layers_that_take_hardly_any_time(layer_s: float) -> None:
    layer = LayerCost("layer", layer_s, layer_s, layer_s, param_bytes=6)
    link = Link(0.01, math.inf)
    workers = tuple(Worker(number, "host", memory_bytes=10) for number in range(2))
    found = find_plan(CostModel(Workload((layer,) * 2, 2, 1), Cluster(workers, link, link)))
    assert found.bound_s <= found.best.step_s
    assert found.best.step_s == pytest.approx(0.02, rel=1e-3)


def test_a_slow_worker_gets_fewer_micro_batches() -> None:
    link = Link(10.0, math.inf)
    workers = (Worker(0, "host"), Worker(1, "host", speed=0.5))
    costs = CostModel(Workload((LayerCost("layer", 1.0, 1.0, 1.0),), 6, 1), Cluster(workers, link, link))
    found = find_plan(costs, effort=None)
    assert Counter(route.hops[0].worker for route in found.best.plan.routes) == {0: 4, 1: 2}


def test_layers_without_a_holder_have_to_move() -> None:
    workload = without_gradients(PRESET)
    costs = CostModel(workload, device("h100-80g").cluster(8))
    found = find_plan(costs)
    copies = len({route.hops for route in found.best.plan.routes})
    assert found.best.moved_bytes == copies * sum(map(state_bytes, workload.layers))
    again = find_plan(costs, current=found.best.plan.placement)
    assert again.best.moved_bytes == 0


def test_the_bound_of_many_classes_is_that_of_equal_workers() -> None:
    link = Link(0.0, math.inf)
    workers = tuple(Worker(number, "host", speed=1 - number / 100) for number in range(12))
    costs = CostModel(Workload((LayerCost("layer", 1.0, 1.0, 1.0),) * 12, 24, 1), Cluster(workers, link, link))
    found = find_plan(costs)
    assert not found.exhaustive
    assert 0 <= found.gap < 0.5
    program = best_program(found.best.plan, costs, in_flight_limits=found.best.in_flight_limits).program
    assert found.bound_s <= estimate_step(found.best.plan, program, costs).step_s


def test_another_plan_that_does_not_fit_is_named() -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=10)
    link = Link(0.0, math.inf)
    workers = tuple(Worker(number, "host", memory_bytes=15) for number in range(2))
    costs = CostModel(Workload((layer,) * 2, 2, 1), Cluster(workers, link, link))
    whole = data_pipeline_plan(layer_costs=[1.0, 1.0], dp=2, pp=1, micro_batches=2)
    found = find_plan(costs, others={"whole": whole})
    assert dict(found.too_large) == {"whole": 5}
    assert found.best.name == "pipelines"


def test_other_plans_keep_to_the_given_limits() -> None:
    cluster = device("h100-80g").cluster(8)
    costs = CostModel(dataclasses.replace(PRESET, micro_batches=32), cluster)
    before = data_pipeline_plan(layer_costs=[1.0] * len(PRESET.layers), dp=2, pp=4, micro_batches=32)
    rerouted, left = reroute(before, [3], costs), CostModel(costs.workload, cluster.without([3]))
    limits = {worker: InFlightLimit(4, 4) for worker in range(8)}
    kept = {}
    for in_flight_limits in (None, limits):
        found = find_plan(
            left,
            current=before.placement.without([3]),
            others={"r": rerouted},
            others_in_flight_limits=in_flight_limits,
        )
        (kept[in_flight_limits is limits],) = [each for each in (found.best, *found.alternatives) if each.name == "r"]
    assert dict(kept[True].in_flight_limits) == {worker: limits[worker] for worker in rerouted.workers}
    assert not kept[False].in_flight_limits, "there is memory for as many as one likes"
    assert kept[True].program_s == pytest.approx(best_program(rerouted, left, in_flight_limits=limits).step_s)
    assert kept[True].peak_bytes < kept[False].peak_bytes


@pytest.mark.parametrize(
    ("seed", "memory_bytes", "max_s"), [(1, 33, 29.751), (6, 26, 29.11), (32, 28, 25.19), (42, 19, 12.81)]
)
def test_programs_use_memory_that_other_orders_would_not_leave(seed: int, memory_bytes: int, max_s: float) -> None:
    """Limits that hold for any order of operations would have them take 1.2 to 1.7 times as long."""
    rng = random.Random(seed)
    workers, layers, micro_batches = rng.randint(4, 9), rng.randint(3, 7), rng.randint(2, 12)
    costs = instance(
        rng,
        workers=workers,
        layers=layers,
        micro_batches=micro_batches,
        kinds=rng.choice([1, 1, 2]),
        memory=False,
    )
    limited = tuple(dataclasses.replace(worker, memory_bytes=memory_bytes) for worker in costs.cluster.workers)
    costs = CostModel(costs.workload, Cluster(limited, costs.cluster.intra_host, costs.cluster.inter_host))
    found = find_plan(costs)
    program = best_program(found.best.plan, costs, in_flight_limits=found.best.in_flight_limits).program
    estimate = estimate_step(found.best.plan, program, costs)
    assert estimate.step_s == pytest.approx(found.best.step_s, rel=1e-9)
    assert not estimate.over_capacity(costs)
    assert found.bound_s <= found.best.step_s < max_s
    assert not found.complete or found.gap < 1e-8


def test_no_search_is_exhaustive_where_links_differ() -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0)
    workload = Workload((layer,) * 2, 2, 1)
    near, far = Link(0.0, math.inf), Link(0.1, math.inf)
    workers = tuple(Worker(number, f"host {number // 2}") for number in range(4))
    assert find_plan(CostModel(workload, Cluster(workers, near, near)), effort=None).exhaustive
    assert not find_plan(CostModel(workload, Cluster(workers, near, far)), effort=None).exhaustive


@pytest.mark.parametrize("effort", [2_000, None])
def test_state_may_take_all_the_memory(effort: int | None) -> None:
    link = Link(0.0, math.inf)
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=10)
    workers = tuple(Worker(number, "host", memory_bytes=10) for number in range(2))
    found = find_plan(CostModel(Workload((layer,) * 2, 3, 1), Cluster(workers, link, link)), effort=effort)
    assert found.best.peak_bytes == 10
    assert found.bound_s <= found.best.step_s


@pytest.mark.parametrize("effort", [2_000, None])
def test_a_step_may_take_no_time(effort: int | None) -> None:
    link = Link(0.0, math.inf)
    layer = LayerCost("layer", 0.0, 0.0, 0.0, param_bytes=10)
    costs = CostModel(
        Workload((layer,) * 2, 3, 1), Cluster(tuple(Worker(number, "host") for number in range(5)), link, link)
    )
    # Two pipelines that are whole, and a broken one, share the micro-batches.
    held = {number: (LayerRange(number % 2, number % 2 + 1),) for number in range(5)}
    found = find_plan(costs, current=Placement(2, held), effort=effort)
    assert (found.best.step_s, found.bound_s, found.gap) == (0.0, 0.0, 0.0)


def test_times_are_those_of_the_real_workers_where_speeds_are_many() -> None:
    link = Link(0.0, math.inf)
    layer = LayerCost("layer", 1.0, 1.0, 1.0)
    workers = tuple(Worker(number, "host", speed=1.0 + 0.01 * number) for number in range(10))
    costs = CostModel(Workload((layer,) * 4, 12, 1), Cluster(workers, link, link))
    held = {number: (LayerRange(2 * (number % 2), 2 * (number % 2) + 2),) for number in range(9)}
    found = find_plan(costs, current=Placement(4, held))
    for each in (found.best, *found.alternatives, *found.recuts):
        program = best_program(each.plan, costs, in_flight_limits=each.in_flight_limits)
        assert each.program_s == pytest.approx(program.step_s, rel=1e-9)
        assert each.step_s == pytest.approx(estimate_step(each.plan, program.program, costs).step_s, rel=1e-9)
    for split in (False, True):
        recut = recut_plan(costs, Placement(4, held), split_backward=split)
        assert recut is not None
        program = best_program(recut.plan, costs, in_flight_limits=recut.in_flight_limits)
        assert recut.program_s == pytest.approx(program.step_s, rel=1e-9)


def test_the_best_program_is_not_given_up_near_its_bound() -> None:
    rng = random.Random(1274)
    costs = instance(
        rng,
        workers=rng.choice([2, 3, 4]),
        layers=rng.randint(2, 5),
        micro_batches=rng.randint(2, 8),
        kinds=1,
        memory=False,
    )
    best = find_plan(costs, effort=2_000).best
    program = best_program(best.plan, costs, in_flight_limits=best.in_flight_limits)
    assert best.program_s == pytest.approx(program.step_s, rel=1e-9)


def test_no_worker_is_left_to_plan_for() -> None:
    link = Link(0.0, math.inf)
    with refused(PlanError):
        find_plan(CostModel(PRESET, Cluster((), link, link)))


def test_the_search_is_deterministic() -> None:
    costs = CostModel(PRESET, device("h100-80g").cluster(16).without((3,)))
    placement = Placement(len(PRESET.layers), {})
    assert find_plan(costs, current=placement) == find_plan(costs, current=placement)


def test_a_plan_near_the_bound_is_found_where_memory_is_short_and_few_micro_batches_are_shared() -> None:
    # Forward and the halves of the backward; bytes of parameters, activations, what waits for W, output, gradients and
    # optimizer.
    layers = tuple(
        LayerCost("layer", *figures)
        for figures in (
            (1.9, 0.9, 0.5, 8, 2, 0, 2, 10, 8),
            (1.7, 1.6, 1.8, 8, 2, 0, 1, 1, 0),
            (1.9, 0.5, 0.7, 8, 6, 3, 2, 10, 0),
            (2.0, 1.5, 0.9, 8, 6, 1, 2, 0, 8),
            (1.8, 1.5, 0.6, 8, 2, 0, 0, 90, 0),
            (1.0, 0.3, 1.6, 4, 2, 3, 0, 90, 8),
            (0.9, 0.4, 1.9, 8, 6, 1, 0, 10, 8),
        )
    )
    workers = tuple(Worker(number, f"host {number % 3}", memory_bytes=105) for number in range(14))
    cluster = Cluster(workers, Link(0.01, 50.0), Link(0.3, 2.0))
    result = find_plan(CostModel(Workload(layers, 3, 1), cluster), effort=3000)
    assert result.best.step_s < 2 * result.bound_s
