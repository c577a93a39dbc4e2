"""The counts of the benchmark of slow workers: reports, spells, and steps until they are noticed."""

from __future__ import annotations

import random

from benchmarks._slow_cases import STEPS, Case, Spell, observe
from benchmarks._slow_plans import PlansOfSlowWorkers
from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.state.incidents import FailureHistory
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, Workload

QUIET = [[1.0]]


def test_spells_that_are_noticed_in_time_are_counted() -> None:
    case = Case((Spell(3, 0.5, 20, 50), Spell(5, 0.7, 30, STEPS)))
    found = observe(case, QUIET, random.Random(0), workers=8)
    assert (found.reports, found.right, found.spells, found.noticed) == (2, 2, 2, 2)
    assert set(found.delays) == {4}
    assert max(map(abs, found.errors)) < 0.02


def test_a_report_of_a_worker_that_is_not_slow_is_wrong() -> None:
    noise = [[1.0] * 50 + [2.0] * 50, *[[1.0]] * 30]
    found = observe(Case(()), noise, random.Random(3), workers=32)
    assert found.reports > found.right == 0


def test_the_plan_for_a_slow_worker_is_compared_with_the_best_by_the_true_speeds() -> None:
    layer = LayerCost(
        name="layer",
        forward_s=0.01,
        input_grad_s=0.01,
        weight_grad_s=0.01,
        param_bytes=100,
        gradient_bytes=100,
        optimizer_bytes=200,
        output_bytes=10,
    )
    link = Link(1e-6, 1e9)
    workers = tuple(Worker(worker, "a host") for worker in range(4))
    costs = CostModel(Workload((layer,) * 8, 16, 1), Cluster(workers, link, link))
    plan = data_pipeline_plan(layer_costs=[1.0] * 8, dp=2, pp=2, micro_batches=16, workers=range(4))
    failures = FailureHistory.before(Recovery(worker_mtbf_hours=1e6)).rate
    case = Case((Spell(1, 0.5, 20, 80),))
    found = PlansOfSlowWorkers(costs, plan, failures).run(case, QUIET, random.Random(0))
    assert found
    for each in found:
        assert each.speeds == {1: 0.5}
        assert 0.9 < each.throughput <= 1
        assert each.known[1] == 0.5
    assert sum(each.steps for each in found) >= 45
    # Without another plan, all would wait for the slow worker.
    assert max(each.step_s for each in found) < 0.8 * 2 * 8 * 4 * 0.03
