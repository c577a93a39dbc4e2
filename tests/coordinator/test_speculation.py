"""Decisions in place that are made while the survivors stop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from chameleon_ft import recovery
from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.coordinator.commands import Send, Task
from chameleon_ft.coordinator.decisions import cluster_state as speculation
from chameleon_ft.coordinator.decisions import recovery_plan
from chameleon_ft.coordinator.decisions.cluster_state import IN_PLACE, SpeculativeDecision, without_search
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.errors import ProgramError
from chameleon_ft.plan import Placement, data_pipeline_plan
from chameleon_ft.protocol.messages import Stop
from chameleon_ft.recovery import DecisionContext, FailureModel, uniform_limits
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, Workload
from tests.coordinator.histories import History
from tests.coordinator.stage import THREE_PIPELINES, Stage, scene
from tests.coordinator.test_salvage import HELD, report

RATE = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0)
LAYER = LayerCost("layer", 1.0, 1.0, 1.0, 1, 1, 1, 1, gradient_bytes=1, optimizer_bytes=2)


def context(*, lost: frozenset[int] = frozenset(), dp: int = 3, slow: float = 1.0) -> DecisionContext:
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=dp, pp=2, micro_batches=12, split_backward=True)
    link = Link(0.01, 1e3)
    live = tuple(Worker(worker, "host", slow if worker == 2 else 1.0) for worker in plan.workers if worker not in lost)
    return DecisionContext(
        plan=plan,
        in_flight_limits=uniform_limits(plan.workers, 3),
        costs=CostModel(Workload((LAYER,) * 4, 12, 1), Cluster(live, link, link)),
        phases=StallModel(detect_s=0.1, stop_s=0.2, decide_s=0.3, regroup_s=0.4),
        repeat_s=0.0,
        restart_cost_s=100.0,
    )


@given(
    lost=st.frozensets(st.integers(0, 5), min_size=1, max_size=3),
    is_reviewed=st.booleans(),
    repeat_s=st.sampled_from([0.0, 2.5]),
    slow=st.sampled_from([1.0, 0.5]),
)
def test_it_is_the_decision_that_would_be_made_later(
    lost: frozenset[int], is_reviewed: bool, repeat_s: float, slow: float
) -> None:
    before = context(lost=lost, slow=slow)
    found = SpeculativeDecision.of(before, RATE, is_reviewed=is_reviewed)
    if before.placement.unheld_layers:
        assert found is None
        return
    assert found is not None
    later = StallModel(detect_s=0.1, stop_s=0.5, decide_s=0.0, regroup_s=0.7)
    now = replace(before, phases=later, repeat_s=repeat_s, holdings=before.placement)
    decision = found.rescored(now, RATE, is_reviewed=is_reviewed, decide_s=lambda: 0.25)
    asked = without_search(now) if is_reviewed else now
    expected = recovery.decide(asked, IN_PLACE, RATE, decide_s=lambda: 0.25)
    assert decision is not None
    assert decision.course == expected.course
    assert decision.phases == expected.phases
    assert decision.chosen is not None
    assert expected.chosen is not None
    assert decision.chosen.stall_s == pytest.approx(expected.chosen.stall_s)
    assert decision.chosen.samples == pytest.approx(expected.chosen.samples)


@pytest.mark.parametrize(
    "changes",
    [
        {"costs": context(lost=frozenset({1, 4})).costs},
        {"costs": context(lost=frozenset({1}), slow=0.5).costs},
        {"in_flight_limits": {}},
        {"plan": context(dp=2).plan},
        {"holdings": Placement(4, {0: context().plan.placement.ranges_of(0)})},
    ],
    ids=["another is lost", "one is slow", "limits", "plan", "layers are missing"],
)
def test_it_is_not_used_if_something_has_changed(changes: dict[str, Any]) -> None:
    before = context(lost=frozenset({1}))
    found = SpeculativeDecision.of(before, RATE, is_reviewed=True)
    assert found is not None
    assert found.rescored(before, RATE, is_reviewed=True, decide_s=None) is not None
    assert found.rescored(replace(before, **changes), RATE, is_reviewed=True, decide_s=None) is None
    assert found.rescored(before, RATE, is_reviewed=False, decide_s=None) is None


def test_there_is_no_speculation_without_a_loss() -> None:
    assert SpeculativeDecision.of(context(), RATE, is_reviewed=True) is None


def test_it_is_asked_for_after_the_order_to_stop_and_again_after_another_loss() -> None:
    history = History()
    history.train()
    commands = history.reap(1)
    last_stop = max(i for i, each in enumerate(commands) if isinstance(each, Send) and isinstance(each.message, Stop))
    assert commands.index(Task.SPECULATE) > last_stop
    history.quiesce(0)
    assert Task.SPECULATE in history.reap(2)
    history.quiesce(3)
    assert len(history.launches) == 2
    history.start()
    history.reap(3)
    history.quiesce(0)
    assert len(history.launches) == 3


def test_it_is_not_asked_for_if_the_last_missing_report_is_that_of_a_lost_worker() -> None:
    history = History()
    history.train()
    history.reap(1)
    history.quiesce(0, 3)
    assert Task.SPECULATE not in history.reap(2)
    assert len(history.launches) == 2


def no_decision(*_: Any, **__: Any) -> None:
    raise AssertionError("a decision after the reports")


@scene()
async def test_after_the_reports_no_plan_is_looked_for_nor_checked(stage: Stage) -> None:
    stage.train(steps=3)
    stage.depart(stage.ranks[1])
    await asyncio.sleep(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "decide", no_decision)
        patch.setattr(speculation, "decide", no_decision)
        patch.setattr(recovery_plan, "check_program", no_decision)
        patch.setattr(recovery_plan, "checked_program", no_decision)
        report(stage, 2, 3, HELD)
    assert stage.order().members == (0, 2, 3)
    (decision,) = stage.events("decision")
    assert not decision["prepared"], "before the loss, nothing was"


@scene(**THREE_PIPELINES)
async def test_there_is_no_speculation_between_simultaneous_losses_nor_after_the_reports(stage: Stage) -> None:
    asked: list[tuple[int, ...]] = []
    choose = SpeculativeDecision.of

    def noting(context: DecisionContext, rate: FailureModel, *, is_reviewed: bool) -> SpeculativeDecision | None:
        asked.append(tuple(context.lost))
        return choose(context, rate, is_reviewed=is_reviewed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeDecision, "of", noting)
        stage.train(workers=6, steps=3)
        for worker in (1, 2):
            stage.depart(stage.ranks[worker])
        await asyncio.sleep(0)
        assert asked == [(1, 2)]
        stage.quiesce(2, 3)
        stage.start()
        stage.depart(stage.ranks[3])
        stage.quiesce(stage.coordinator.state.generation, 3)
        await asyncio.sleep(0)
        assert asked == [(1, 2)], "the decision is made"


@scene()
async def test_an_error_of_the_speculation_itself_ends_the_run(stage: Stage) -> None:
    def mistaken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a mistake")

    stage.train(steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeDecision, "of", mistaken)
        stage.depart(stage.ranks[1])
        for _ in range(3):
            await asyncio.sleep(0)
    assert stage.ended is not None
    assert stage.ended[1].startswith("the coordinator failed: ZeroDivisionError: a mistake; see ")


@scene()
async def test_an_error_while_the_survivors_stop_is_that_of_the_decision(stage: Stage) -> None:
    stage.train(steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "check_program", refused)
        stage.depart(stage.ranks[1])
        await asyncio.sleep(0)
    report(stage, 2, 3, HELD)
    assert stage.order().members == (0, 2, 3)


def refused(*_: Any) -> None:
    raise ProgramError("refused")
