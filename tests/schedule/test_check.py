"""Programs that must not run are refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import Operation, OperationKind, Program, check_program, list_schedule, replay
from tests.golden import refused
from tests.strategies import Planned, Shape, equal_costs, mixed, pipelines, planned

F, B, I, W = OperationKind  # noqa: E741


def changed(program: Program, worker: int, operations: list[Operation]) -> Program:
    return Program({**program.operations, worker: tuple(operations)})


@st.composite
def spots(draw: st.DrawFn, program: Program) -> tuple[int, int]:
    """A worker that has something to do, and the index of one of its operations."""
    worker = draw(st.sampled_from([worker for worker in program.workers if program.of(worker)]))
    return worker, draw(st.integers(0, len(program.of(worker)) - 1))


@given(mixed(planned()), st.data())
def test_a_dropped_operation_is_missed(case: Planned, data: st.DataObject) -> None:
    program = list_schedule(case.plan, case.costs)
    worker, index = data.draw(spots(program))
    operations = list(program.of(worker))
    del operations[index]

    with pytest.raises(ProgramError):
        check_program(changed(program, worker, operations), case.plan)


@given(mixed(planned()), st.data())
def test_a_repeated_operation_is_refused(case: Planned, data: st.DataObject) -> None:
    program = list_schedule(case.plan, case.costs)
    worker, index = data.draw(spots(program))
    operations = [*program.of(worker), program.of(worker)[index]]

    with pytest.raises(ProgramError, match="twice"):
        check_program(changed(program, worker, operations), case.plan)


@given(mixed(planned()), st.data())
def test_an_operation_on_another_worker_is_refused(case: Planned, data: st.DataObject) -> None:
    assume(len(case.plan.workers) > 1)
    program = list_schedule(case.plan, case.costs)
    worker, index = data.draw(spots(program))
    operations = list(program.of(worker))
    moved = operations.pop(index)
    other = data.draw(st.sampled_from([w for w in program.workers if w != worker]))
    corrupt = changed(changed(program, worker, operations), other, [*program.of(other), moved])

    with pytest.raises(ProgramError):
        check_program(corrupt, case.plan)


@given(mixed(planned()), st.data())
def test_an_operation_in_another_form_is_refused(case: Planned, data: st.DataObject) -> None:
    program = list_schedule(case.plan, case.costs)
    worker, index = data.draw(spots(program))
    operations = list(program.of(worker))
    old = operations[index]
    stranger = max(program.workers) + 1
    operations[index] = data.draw(
        st.sampled_from(
            [
                replace(old, receive_from=stranger),
                replace(old, send_to=stranger),
                replace(old, micro_batch=case.plan.micro_batches),
                replace(old, hop=99),
                replace(old, layers=LayerRange(old.layers.start, old.layers.stop + 1)),
                replace(old, first=not old.first),
                replace(old, last=not old.last),
            ]
        )
    )

    with pytest.raises(ProgramError):
        check_program(changed(program, worker, operations), case.plan)


@given(mixed(planned()), st.data())
def test_messages_of_one_channel_may_not_be_swapped(case: Planned, data: st.DataObject) -> None:
    program = list_schedule(case.plan, case.costs)
    pairs = [
        (worker, i, j)
        for worker in program.workers
        for i, one in enumerate(program.of(worker))
        for j, two in enumerate(program.of(worker))
        if i < j and one.kind is two.kind and one.send_to is not None and one.send_to == two.send_to
    ]
    assume(pairs)
    worker, i, j = data.draw(st.sampled_from(pairs))
    operations = list(program.of(worker))
    operations[i], operations[j] = operations[j], operations[i]

    with pytest.raises(ProgramError):
        check_program(changed(program, worker, operations), case.plan)


def test_the_order_of_sends_must_be_the_order_of_receives() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=2))
    program = list_schedule(plan, equal_costs(layers=2, micro_batches=2, workers=2))
    by_name = {str(operation): operation for operation in program.of(1)}
    second_first = [by_name[name] for name in ("F1.1", "B1.1", "F0.1", "B0.1")]

    with refused(ProgramError):
        check_program(changed(program, 1, second_first), plan)


@pytest.mark.parametrize(
    "kinds",
    [
        (B, F),
        (F, W, I),
        (I, F, W),
    ],
)
def test_a_worker_may_not_run_what_it_has_not_prepared(kinds: tuple[OperationKind, ...]) -> None:
    plan = pipelines(Shape(dp=1, pp=1, share=1), split_backward=W in kinds)
    program = Program({0: tuple(Operation.of(kind, plan.routes[0], 0) for kind in kinds)})

    with refused(ProgramError):
        check_program(program, plan)


def test_what_is_handed_over_on_a_worker_must_be_there() -> None:
    layers = LayerRange(0, 1), LayerRange(1, 2)
    route = Route(0, (Hop(0, layers[0]), Hop(0, layers[1])))
    plan = Plan(Placement(2, {0: layers}), (route,))

    def program(*order: tuple[OperationKind, int]) -> Program:
        return Program({0: tuple(Operation.of(kind, route, hop) for kind, hop in order)})

    check_program(program((F, 0), (F, 1), (B, 1), (B, 0)), plan)
    with refused(ProgramError):
        check_program(program((F, 1), (F, 0), (B, 1), (B, 0)), plan)
    with refused(ProgramError):
        check_program(program((F, 0), (F, 1), (B, 0), (B, 1)), plan)


def crossing_plan() -> Plan:
    """Two workers that hold everything; micro-batches go from one to the other, half of them each way."""
    whole = (LayerRange(0, 2),)
    first, second = LayerRange(0, 1), LayerRange(1, 2)
    return Plan(
        Placement(2, {0: whole, 1: whole}),
        tuple(Route(m, (Hop(m % 2, first), Hop(1 - m % 2, second))) for m in range(4)),
    )


def test_waiting_for_each_other_is_a_deadlock() -> None:
    plan = crossing_plan()
    program = Program(
        {
            worker: (
                *(Operation.of(F, plan.routes[m], 1) for m in (1 - worker, 3 - worker)),
                *(Operation.of(F, plan.routes[m], 0) for m in (worker, 2 + worker)),
                *(Operation.of(B, plan.routes[m], 1) for m in (1 - worker, 3 - worker)),
                *(Operation.of(B, plan.routes[m], 0) for m in (worker, 2 + worker)),
            )
            for worker in (0, 1)
        }
    )

    with refused(ProgramError):
        check_program(program, plan)
    with refused(ProgramError):
        replay(program, equal_costs(layers=2, micro_batches=4, workers=2))


def test_sends_that_cross_are_a_deadlock_though_a_replay_with_endless_buffers_ends() -> None:
    plan = crossing_plan()
    program = Program(
        {
            worker: (
                *(Operation.of(F, plan.routes[m], 0) for m in (worker, 2 + worker)),
                *(Operation.of(F, plan.routes[m], 1) for m in (1 - worker, 3 - worker)),
                *(Operation.of(B, plan.routes[m], 1) for m in (1 - worker, 3 - worker)),
                *(Operation.of(B, plan.routes[m], 0) for m in (worker, 2 + worker)),
            )
            for worker in (0, 1)
        }
    )

    assert replay(program, equal_costs(layers=2, micro_batches=4, workers=2)).step_s > 0
    with refused(ProgramError):
        check_program(program, plan)


def comes_to_its_end(program: Program) -> bool:
    """Whether it does with channels of one message, by giving each worker its turn again and again."""
    channels: dict[tuple[int, int, bool], list[None]] = defaultdict(list)
    todo = {worker: [(each, half) for each in program.of(worker) for half in (0, 1)] for worker in program.workers}
    moved = True
    while moved:
        moved = False
        for worker, own in todo.items():
            if not own:
                continue
            operation, is_done = own[0]
            gradient = operation.kind is not F
            if not is_done and operation.receive_from is not None:
                if not channels[operation.receive_from, worker, gradient]:
                    continue
                channels[operation.receive_from, worker, gradient].pop()
            if is_done and operation.send_to is not None:
                if channels[worker, operation.send_to, gradient]:
                    continue
                channels[worker, operation.send_to, gradient].append(None)
            own.pop(0)
            moved = True
    return not any(todo.values())


@given(mixed(planned()), st.randoms(use_true_random=False))
def test_what_comes_to_its_end_is_found_out(case: Planned, random: Random) -> None:
    program = list_schedule(case.plan, case.costs)
    for _ in range(random.randrange(4)):
        worker = random.choice(program.workers)
        operations = list(program.of(worker))
        if len(operations) > 1:
            place = random.randrange(len(operations) - 1)
            operations[place : place + 2] = reversed(operations[place : place + 2])
        program = changed(program, worker, operations)

    try:
        check_program(program, case.plan)
    except ProgramError as error:
        assert "deadlocks" not in str(error) or not comes_to_its_end(program)  # noqa: PT017
    else:
        assert comes_to_its_end(program)


def test_a_program_of_another_plan_is_refused() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=2))
    program = list_schedule(plan, equal_costs(layers=2, micro_batches=2, workers=2))

    with refused(ProgramError):
        check_program(program, pipelines(Shape(dp=1, pp=2, share=4)))
    with refused(ProgramError):
        check_program(program, pipelines(Shape(dp=1, pp=2, share=2), split_backward=True))
