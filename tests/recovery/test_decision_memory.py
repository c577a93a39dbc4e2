"""Decisions where memory is short: fewer micro-batches in flight, recomputation, and returns to a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.cost.memory import program_memory
from chameleon_ft.plan import Plan, RecomputedLayers, data_pipeline_plan
from chameleon_ft.recovery import Checkpoints, DecisionContext, Proposal, decide
from chameleon_ft.recovery.context import Course
from chameleon_ft.recovery.scoring import measure
from chameleon_ft.schedule import InFlightLimit, Program
from chameleon_ft.search import find_plan
from tests.recovery.contexts import after, context, layer, rate_of
from tests.recovery.courses import check_course


def test_where_memory_forbids_to_re_partition_it_reroutes_or_begins_anew() -> None:
    layers = (layer(100),) * 6
    # A stage of three layers needs 1,200 bytes of state and some for activations. Six layers do not fit, and of the two
    # that each of three workers would hold, there is no room to receive one.
    now = after(context(dp=2, pp=2, share=6, layers=layers, memory_bytes=1_217), 3)
    with_checkpoint, now = now, replace(now, has_checkpoints=False)
    decision = decide(now, "chameleon", rate_of(1e6, now))
    assert decision.chosen is not None
    assert decision.chosen.policy == "reroute"
    reasons = {each.policy: each.reason for each in decision.candidates}
    assert reasons["reroute"] is None
    assert "more while layers move" in str(reasons["repartition"])
    # Detours do not fit any more, but the whole pipeline alone does if it keeps less.
    tighter = decide(with_memory(now, 1_216), "chameleon", rate_of(1e6, now))
    reasons = {each.policy: each.reason for each in tighter.candidates}
    assert "more in a step" in str(reasons["reroute"])
    assert tighter.chosen is not None
    assert tighter.course is not None
    assert tighter.course.plan.workers == (0, 1)
    assert tighter.chosen.moved_bytes == 0
    tightest = decide(with_memory(now, 1_214), "chameleon", rate_of(1e6, now))
    assert tightest.chosen is None
    reasons = {each.policy: each.reason for each in tightest.candidates}
    assert "more in a step" in str(reasons["reroute"])
    assert "memory" in str(reasons["repair"])
    # What is read from a checkpoint needs no room.
    anew = decide(with_checkpoint, "chameleon", rate_of(1e6, now)).chosen
    assert anew is not None
    assert anew.policy == "anew"


def test_if_no_worker_is_lost_a_checkpoint_is_written_before_all_begin_anew() -> None:
    joined = context(dp=1, pp=2, spares=2)
    for write_s, stalls_s in ((None, []), (5.0, [joined.restart_cost_s + 5.0])):
        now = replace(joined, checkpoints=Checkpoints(unsaved_s=900.0, longest_s=3_600.0, write_s=write_s))
        decision = decide(now, "chameleon", rate_of(1e6, now))
        assert [each.stall_s for each in decision.candidates if each.from_checkpoint] == stalls_s
        lost = after(now, 1)
        assert lost.return_s == lost.restart_cost_s + 900.0


@pytest.mark.parametrize(
    ("memory_bytes", "reason"),
    [
        (700, None),
        # What it holds (400 bytes with gradients) and what it receives (300) do not fit together.
        (699, "memory: worker 0 needs 1 B more while layers move, and 1 others need more too"),
    ],
)
def test_memory_counts_while_layers_move_too(memory_bytes: int, reason: str | None) -> None:
    now = context(dp=2, pp=2, layers=(layer(100), layer(100)), memory_bytes=memory_bytes)
    exchanged = data_pipeline_plan(layer_costs=[1.0, 1.0], dp=2, pp=2, micro_batches=8, workers=(1, 0, 2, 3))
    candidate, draft = measure(Proposal(name="exchange", plan=exchanged), now)
    assert candidate.peak_bytes is not None
    assert candidate.peak_bytes < 600
    assert candidate.moved_bytes == 600
    assert candidate.reason == reason
    assert draft is not None, "layers may move in waves"


def with_memory(now: DecisionContext, memory_bytes: int) -> DecisionContext:
    cluster = now.costs.cluster
    workers = tuple(replace(worker, memory_bytes=memory_bytes) for worker in cluster.workers)
    return replace(now, costs=replace(now.costs, cluster=replace(cluster, workers=workers)))


def assert_fewest_recomputed(course: Course, now: DecisionContext) -> None:
    """Check that no worker has room with a layer less, and that each recomputes from its lowest layer on."""
    for worker, layers in course.plan.recompute.items():
        assert layers.start == course.plan.placement.span(worker).start
        fewer = RecomputedLayers(layers.start, layers.stop - 1) if len(layers) > 1 else None
        operations = [
            replace(operation, recompute=fewer and fewer.intersection(operation.layers))
            for operation in course.program.of(worker)
        ]
        memory = program_memory(Program({worker: operations}), course.plan.placement, now.costs.workload)
        assert now.costs.cluster.worker(worker).memory_bytes is not None
        assert memory[worker].peak_bytes > (now.costs.cluster.worker(worker).memory_bytes or 0)


@pytest.mark.parametrize("split_backward", [False, True])
def test_a_plan_that_needs_too_much_keeps_less_and_then_recomputes(split_backward: bool) -> None:
    layers = (replace(layer(10), activation_bytes=40, weight_grad_bytes=40 if split_backward else 0),) * 8
    now = after(context(dp=3, pp=2, share=6, layers=layers, split_backward=split_backward), 0)
    now = replace(now, in_flight_limits={worker: InFlightLimit(9, 9) for worker in range(6)})
    needed: list[int] = []
    plans: list[Plan] = []
    memory_bytes = 1_000_000
    while True:
        tight = with_memory(now, memory_bytes)
        decision = decide(tight, "reroute", rate_of(1e6, tight))
        if decision.course is None:
            break
        check_course(decision, tight)
        assert decision.chosen is not None
        assert decision.chosen.peak_bytes is not None
        needed.append(decision.chosen.peak_bytes)
        plans.append(decision.course.plan)
        assert_fewest_recomputed(decision.course, tight)
        memory_bytes = decision.chosen.peak_bytes - 1
    assert needed == sorted(needed, reverse=True)
    assert [bool(plan.recompute) for plan in plans[:2]] == [False, False], "at first, less is kept"
    if not split_backward:
        # The less memory there is, the more layers are recomputed.
        counts = [len(layers) for plan in plans for worker, layers in plan.recompute.items() if worker == 2]
        assert counts == sorted(counts)
        assert len(set(counts)) > 1
    assert "more in a step" in str(decision.candidates[0].reason)


def test_from_a_checkpoint_all_go_on_with_the_fastest_plan_that_fits() -> None:
    # Of five equal workers the largest equal layout is a single pipeline; two of different depth are faster.
    layers = (layer(100),) * 6
    now = after(context(dp=4, pp=2, share=8, layers=layers, memory_bytes=2_000), 0, 2, 4)
    now = after(now, *(worker for worker in now.live if worker == 6))
    assert now.placement.unheld_layers
    decision = decide(now, "chameleon", rate_of(1e6, now))
    assert decision.chosen is not None
    assert decision.course is not None
    assert (decision.chosen.policy, decision.chosen.stall_s) == ("checkpoint", now.restart_cost_s)
    assert decision.course.transfer is None
    check_course(decision, now)
    fastest = find_plan(now.costs, effort=now.effort).best
    assert decision.chosen.step_s == pytest.approx(fastest.step_s)
    assert decide(now, "reroute", rate_of(1e6, now)).chosen is None, "it never leaves its layout"
