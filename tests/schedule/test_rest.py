"""Programs of the rest of an interrupted step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.rest import RestOfStep, StepProgress
from chameleon_ft.schedule import (
    CostModel,
    InFlightLimit,
    OperationKind,
    Program,
    ScheduledRest,
    check_rest,
    list_schedule,
    replay,
)
from tests.schedule.interruptions import Executor, Interruption, sound_rest
from tests.strategies import mixed, pipelined, planned, survivable

F, _, _, W = OperationKind


@dataclass(frozen=True)
class Interrupted:
    """A step that lost a worker: what the survivors hold, and what remains."""

    plan: Plan
    costs: CostModel
    progress: Mapping[int, StepProgress]
    rest: RestOfStep


def without(costs: CostModel, lost: int) -> CostModel:
    cluster = costs.cluster
    return replace(costs, cluster=replace(cluster, workers=tuple(w for w in cluster.workers if w.id != lost)))


@st.composite
def interrupted(draw: st.DrawFn) -> Interrupted:
    """Draw plans with a worker that is lost at any moment of a step, and which gradients can be sent again."""
    case = draw(st.one_of(mixed(planned(several_ranges=False)), pipelined(), mixed(planned())))
    lost = draw(st.sampled_from(case.plan.workers))
    assume(survivable(case.plan, [lost]))
    timeline = replay(list_schedule(case.plan, case.costs), case.costs)
    at_s = draw(st.floats(0, timeline.step_s))
    interruption = Interruption(case.plan, timeline, lost, at_s)
    forgotten = draw(st.sets(st.tuples(st.integers(0, 10), st.integers(0, 7))))
    progress = interruption.progress(lambda micro_batch, layer: (micro_batch, layer) not in forgotten)
    return Interrupted(case.plan, without(case.costs, lost), progress, interruption.rest(progress))


def limits() -> st.SearchStrategy[Mapping[int, InFlightLimit]]:
    return st.sampled_from([{}, dict.fromkeys(range(40), InFlightLimit(2, 3))])


def scheduled(case: Interrupted, limits: Mapping[int, InFlightLimit] | None = None) -> ScheduledRest:
    return sound_rest(case.rest, case.costs, in_flight_limits=limits)


@given(interrupted(), limits())
def test_with_what_survivors_hold_each_contribution_and_loss_is_there_once(
    case: Interrupted, limits: Mapping[int, InFlightLimit]
) -> None:
    found = scheduled(case, limits)

    check_rest(found.program, found.resends, case.rest)
    executor = Executor(found.program, found.resends, case.progress)
    executor.run()
    plan = case.plan
    layers = range(plan.placement.num_layers)
    assert set(executor.contributed) == {(m, layer) for m in range(plan.micro_batches) for layer in layers}
    assert set(executor.contributed.values()) == {1}
    assert executor.counted == set(range(plan.micro_batches))


@given(interrupted())
def test_operations_start_when_their_worker_is_free_and_their_input_is_there(case: Interrupted) -> None:
    found = scheduled(case)

    # Ends of what makes outputs and gradients, by (micro-batch, layer after the output, whether it is an output).
    ends_s: dict[tuple[int, int, bool], tuple[float, int]] = {}
    for sender, resends in found.resends.items():
        for micro_batch, layer, forward, _ in resends:
            ends_s[micro_batch, layer + 1 if forward else layer, forward] = 0.0, sender
    for worker, operation, _, end_s in found.timeline.operations:
        if operation.kind is not W:
            border = operation.layers.stop if operation.kind is F else operation.layers.start
            ends_s[operation.micro_batch, border, operation.kind is F] = end_s, worker
    free_s: dict[int, float] = defaultdict(float)
    for worker, operation, start_s, end_s in found.timeline.operations:
        layers, forward = operation.layers, operation.kind is F
        expected = free_s[worker]
        if operation.kind is not W and not (operation.first if forward else operation.last):
            border = layers.start if forward else layers.stop
            made_s, maker = ends_s[operation.micro_batch, border, forward]
            message_s = case.costs.message_s(maker, worker, case.costs.message_bytes(border - 1))
            expected = max(expected, made_s + message_s)
        assert start_s == pytest.approx(expected)
        free_s[worker] = end_s
        assert end_s == pytest.approx(start_s + case.costs.operation_s(worker, operation))
    assert found.program_s == max(free_s.values(), default=0.0)


@given(interrupted(), st.data())
def test_a_dropped_operation_is_missed(case: Interrupted, data: st.DataObject) -> None:
    found = scheduled(case)
    operations = {worker: list(own) for worker, own in found.program.operations.items() if own}
    assume(operations)
    worker = data.draw(st.sampled_from(sorted(operations)))
    del operations[worker][data.draw(st.integers(0, len(operations[worker]) - 1))]

    with pytest.raises(ProgramError):
        check_rest(Program(operations), found.resends, case.rest)


@given(interrupted(), st.data())
def test_exactly_the_messages_that_are_needed_are_sent_again(case: Interrupted, data: st.DataObject) -> None:
    found = scheduled(case)
    assume(found.resends)
    sender = data.draw(st.sampled_from(sorted(found.resends)))
    own = found.resends[sender]
    index = data.draw(st.integers(0, len(own) - 1))

    for wrong in (own[:index] + own[index + 1 :], (*own, own[index]), (*own, own[index]._replace(layer=99))):
        with pytest.raises(ProgramError, match="again"):
            check_rest(found.program, {**found.resends, sender: wrong}, case.rest)


@given(interrupted())
def test_messages_may_be_sent_again_in_any_order(case: Interrupted) -> None:
    found = scheduled(case)
    reordered = {sender: own[::-1] for sender, own in found.resends.items()}
    check_rest(found.program, reordered, case.rest)
    Executor(found.program, reordered, case.progress).run()


@given(interrupted())
def test_after_the_rest_nothing_remains(case: Interrupted) -> None:
    rest = replace(case.rest, routes=())
    found = sound_rest(rest, case.costs)

    check_rest(found.program, found.resends, rest)
    assert found.program_s == found.busy_s == 0
    assert set(found.program.workers) == set(case.progress)
