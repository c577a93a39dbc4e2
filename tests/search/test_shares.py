"""Search where holders share the optimizer's state: the more pipelines, the less memory a worker needs."""

from __future__ import annotations

import random
from dataclasses import replace

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.workload import LayerCost, Workload
from tests.golden import refused
from tests.strategies import equal_costs


def a_model(workers: int, layers: int, *, memory_bytes: int, owners: int | None, state: int = 80) -> CostModel:
    costs = equal_costs(layers=layers, micro_batches=2 * workers, workers=workers)
    cost = LayerCost("layer", 1.0, 1.0, 1.0, 10, 1, 1, 1, gradient_bytes=10, optimizer_bytes=state)
    sized = (replace(worker, memory_bytes=memory_bytes) for worker in costs.cluster.workers)
    cluster = Cluster(tuple(sized), costs.cluster.intra_host, costs.cluster.inter_host)
    return CostModel(Workload((cost,) * layers, 2 * workers, 1, owners=owners), cluster)


def test_pipelines_that_fit_only_because_they_share_are_found() -> None:
    # Of 20 + 80 bytes of a layer, one of eight holders keeps 20 + 20.
    costs = a_model(8, 4, memory_bytes=200, owners=2)
    found = find_plan(costs)
    assert found.best.plan.placement.fewest_holders == 8
    assert 160 < found.best.peak_bytes <= 200
    alone = find_plan(replace(costs, workload=replace(costs.workload, owners=None)))
    assert alone.best.plan.placement.fewest_holders < 8
    assert found.best.step_s < alone.best.step_s


def test_fewer_pipelines_are_found_if_the_most_do_not_fit() -> None:
    # One of eight holders would keep 20 + 20 bytes of each layer, one of four on half of the layers 2 * (20 + 40).
    costs = a_model(8, 4, memory_bytes=150, owners=2)
    found = find_plan(costs)
    assert found.best.plan.placement.fewest_holders == 4
    assert not estimate_step(
        found.best.plan,
        best_program(found.best.plan, costs, in_flight_limits=found.best.in_flight_limits).program,
        costs,
    ).over_capacity(costs)
    assert not found.exhaustive


def test_no_plan_that_fits_is_faster_than_the_bound() -> None:
    rng = random.Random(3)
    compared = 0
    for _ in range(40):
        workers, layers, owners = rng.randint(2, 6), rng.randint(2, 6), rng.randint(1, 3)
        costs = a_model(workers, layers, memory_bytes=rng.randint(60, 700), owners=owners, state=rng.randint(0, 160))
        known = []
        for dp in (each for each in range(1, workers + 1) if 2 * workers % each == 0):
            pp = min(layers, workers // dp)
            plan = data_pipeline_plan(
                layer_costs=[1.0] * layers, dp=dp, pp=pp, micro_batches=2 * workers, workers=tuple(range(dp * pp))
            )
            estimate = estimate_step(plan, best_program(plan, costs).program, costs)
            if not estimate.over_capacity(costs):
                known.append(estimate.step_s)
        try:
            found = find_plan(costs)
        except InfeasibleError:
            assert not known
            continue
        assert found.bound_s <= min([found.best.step_s, *known]) * (1 + 1e-9)
        assert found.best.step_s <= min(known, default=found.best.step_s) * 1.05
        compared += bool(known)
    assert compared > 10


def test_what_no_number_of_pipelines_makes_fit_is_refused() -> None:
    with refused(InfeasibleError):
        find_plan(a_model(4, 8, memory_bytes=25, owners=1))
