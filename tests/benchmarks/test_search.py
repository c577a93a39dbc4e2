"""The figures of the benchmark of the search."""

from __future__ import annotations

import dataclasses
import random

import pytest

from benchmarks._search_cases import spread_losses
from benchmarks._search_kept import kept_throughput
from benchmarks._search_planners import Rival, compare
from benchmarks.search import Question
from chameleon_ft.lab.planned_layouts import BaselinePlan
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import find_plan
from tests.search.instances import instance


def small(*, workers: int = 3) -> CostModel:
    return instance(random.Random(1), workers=workers, layers=3, micro_batches=4, kinds=1, memory=False)


def claiming(factor: float) -> Rival:
    """A planner whose step takes `factor` times as long as that of `find_plan`."""

    def plan(costs: CostModel) -> BaselinePlan:
        best = find_plan(costs).best
        return BaselinePlan(found=dataclasses.replace(best, step_s=factor * best.step_s), estimate_s=0.0)

    return Rival(f"x {factor}", plan)


@pytest.mark.parametrize(("factor", "worse"), [(0.9, True), (1.0, False), (1.0 - 1e-12, False), (1.5, False)])
def test_only_a_faster_rival_makes_a_plan_worse(factor: float, worse: bool) -> None:
    (versus,) = compare(small(), [claiming(factor)], group="generated", name="small")

    assert versus.ratio == pytest.approx(factor)
    assert versus.worse is worse


def test_finding_nothing_where_a_rival_does_is_worse() -> None:
    costs = instance(random.Random(1), workers=1, layers=3, micro_batches=4, kinds=1, memory=False)
    (worker,) = costs.cluster.workers
    tight = dataclasses.replace(costs.cluster, workers=(dataclasses.replace(worker, memory_bytes=1),))
    found = BaselinePlan(found=find_plan(costs).best, estimate_s=0.0)
    rival = Rival("over capacity", lambda _: found)

    (versus,) = compare(CostModel(costs.workload, tight), [rival], group="generated", name="tight")

    assert versus.ratio == 0.0
    assert versus.worse


def test_losses_are_as_many_as_asked_for_and_spread_over_hosts() -> None:
    for workers in (8, 32, 250, 1024):
        for count in range(1, 9):
            lost = spread_losses(workers, count)
            assert len(set(lost)) == count
            assert set(lost) <= set(range(workers))
    assert {worker // 8 for worker in spread_losses(32, 4)} == {0, 1, 2, 3}


def test_one_loss_of_the_layout_is_measured() -> None:
    report = kept_throughput(singles=1, multiples=0, seed=0)

    kept = report.results["kept"]
    (loss,) = kept["losses"]
    assert loss["lost"] == (0,)
    assert loss["kept"] == pytest.approx(kept["failure_free_s"] / loss["step_s"] * 32 / 31)
    assert kept["failure_free_s"] <= kept["one_f_one_b_s"]
    assert [bar.value for bar in report.bars] == pytest.approx([loss["kept"], kept["one_f_one_b_s"] / loss["step_s"]])


def test_a_question_with_a_plan_in_force_weighs_its_detours() -> None:
    whole = small(workers=6)
    before = find_plan(whole).best
    lost = before.plan.workers[0]
    left = CostModel(whole.workload, whole.cluster.without([lost]))

    result = Question(name="", limit_ms=1.0, costs=left, before=before).ask()

    # Rerouting moves no bytes, so that nothing faster takes it off the front unless that moves none either.
    assert "reroute" in {result.best.name, *(each.name for each in result.alternatives)}
