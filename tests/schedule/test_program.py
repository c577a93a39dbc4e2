"""Operations, programs and their costs."""

from __future__ import annotations

import math
import pickle
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Hop, LayerRange, RecomputedLayers, Route
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program, Timeline, check_program, list_schedule
from chameleon_ft.schedule.program import operations_from, records_from
from chameleon_ft.transfer import remap_plan
from chameleon_ft.workload import LayerCost, Workload
from tests.golden import refused
from tests.strategies import Planned, planned

ROUTE = Route(3, (Hop(5, LayerRange(0, 1)), Hop(5, LayerRange(1, 2)), Hop(7, LayerRange(2, 4))))


def test_messages_follow_the_route_and_stay_on_a_worker() -> None:
    peers = {
        (kind.value, hop): (operation.receive_from, operation.send_to)
        for kind in OperationKind
        for hop in range(3)
        for operation in [Operation.of(kind, ROUTE, hop)]
    }

    expected: dict[str, list[tuple[int | None, int | None]]] = {
        "F": [(None, None), (None, 7), (5, None)],
        "B": [(None, None), (7, None), (None, 5)],
        "I": [(None, None), (7, None), (None, 5)],
        "W": [(None, None), (None, None), (None, None)],
    }
    assert peers == {(kind, hop): peer for kind, hops in expected.items() for hop, peer in enumerate(hops)}


def test_an_operation_knows_where_its_route_starts_and_ends() -> None:
    ends = [(o.first, o.last) for o in (Operation.of(OperationKind.FORWARD, ROUTE, hop) for hop in range(3))]

    assert ends == [(True, False), (False, False), (False, True)]
    assert str(Operation.of(OperationKind.WEIGHT_GRAD, ROUTE, 2)) == "W3.2"


def test_a_program_is_a_value() -> None:
    operation = Operation.of(OperationKind.FORWARD, ROUTE, 0)
    program = Program({7: (), 5: (operation,)})

    assert program.workers == (5, 7)
    assert program.of(9) == ()
    assert program == Program({5: (operation,), 7: ()})
    assert hash(program) == hash(Program({5: (operation,), 7: ()}))
    assert pickle.loads(pickle.dumps(program)) == program


@given(planned())
def test_records_say_all_that_operations_do(case: Planned) -> None:
    program = list_schedule(case.plan, case.costs)
    for worker in program.workers:
        own = program.of(worker)
        assert operations_from(records_from(own)) == own
        assert np.array_equal(program.records_of(worker), records_from(own))
    again = Program(program.operations)
    assert again == program
    assert again.starts == program.starts


@given(planned(), st.randoms(use_true_random=False))
def test_with_workers_exchanged_it_is_the_program_of_the_plan_with_workers_exchanged(
    case: Planned, random: Random
) -> None:
    program, plan = list_schedule(case.plan, case.costs), case.plan
    others = list(plan.workers)
    random.shuffle(others)
    exchange = dict(zip(plan.workers, others, strict=True)) | {1000: 1001}

    found = program.remap_workers(exchange)

    check_program(found, remap_plan(plan, exchange))
    for worker in plan.workers:
        assert [str(each) for each in found.of(exchange[worker])] == [str(each) for each in program.of(worker)]
    assert found.remap_workers({other: worker for worker, other in exchange.items()}) == program
    assert program == list_schedule(case.plan, case.costs), "the program itself stays as it was"


def test_a_program_cannot_be_changed() -> None:
    program = Program({5: (Operation.of(OperationKind.FORWARD, ROUTE, 0),)})
    with refused(ValueError):
        program.records_of(5)["hop"] = 1


@pytest.mark.parametrize(
    ("again", "parts"),
    [
        (RecomputedLayers(0, 1), [RecomputedLayers(0, 1), None]),
        (RecomputedLayers(1, 3), [RecomputedLayers(1, 2), RecomputedLayers(2, 3)]),
        (RecomputedLayers(1, 4, 2), [RecomputedLayers(1, 2), RecomputedLayers(2, 4, 2)]),
        (RecomputedLayers(0, 9), [RecomputedLayers(0, 2), RecomputedLayers(2, 5)]),
        (RecomputedLayers(0, 9, 8), [RecomputedLayers(0, 2, 1), RecomputedLayers(2, 5, 3)]),
    ],
)
def test_an_operation_knows_the_layers_that_are_recomputed(
    again: RecomputedLayers, parts: list[RecomputedLayers | None]
) -> None:
    route = Route(0, (Hop(7, LayerRange(0, 2)), Hop(7, LayerRange(2, 5)), Hop(5, LayerRange(5, 9))))
    operations = [Operation.of(OperationKind.BACKWARD, route, hop, {7: again}) for hop in range(3)]

    assert [operation.recompute for operation in operations] == [*parts, None]
    assert operations_from(records_from(operations)) == tuple(operations)


def test_an_empty_timeline_takes_no_time() -> None:
    assert Timeline(()).step_s == 0


def costs() -> CostModel:
    layers = tuple(LayerCost(f"layer {i}", 1.0 + i, 2.0, 0.5, output_bytes=100 * (i + 1)) for i in range(3))
    workers = (Worker(0, "a"), Worker(1, "a", speed=2.0), Worker(2, "b"))
    return CostModel(Workload(layers, 1, 1, 0.25), Cluster(workers, Link(0.0, math.inf), Link(1.0, 100.0)))


@pytest.mark.parametrize(
    ("worker", "kind", "expected_s"),
    [
        (0, OperationKind.FORWARD, 0.25 + 5.0),
        (1, OperationKind.FORWARD, 0.25 + 2.5),
        (0, OperationKind.BACKWARD, 0.25 + 5.0),
        (0, OperationKind.INPUT_GRAD, 0.25 + 4.0),
        (1, OperationKind.WEIGHT_GRAD, 0.25 + 0.5),
    ],
)
def test_work_goes_by_speed_and_overhead_does_not(worker: int, kind: OperationKind, expected_s: float) -> None:
    assert costs().compute_s(worker, kind, LayerRange(1, 3)) == expected_s


def test_messages_take_the_link_between_the_hosts() -> None:
    assert costs().message_s(0, 1, 1e9) == 0
    assert costs().message_s(0, 2, costs().message_bytes(1)) == 1.0 + 2.0
    assert costs().message_s(2, 2, 1e9) == 0


def test_layers_and_workers_must_exist() -> None:
    with refused(PlanError):
        costs().compute_s(0, OperationKind.FORWARD, LayerRange(2, 4))
    with refused(ConfigError):
        costs().compute_s(9, OperationKind.FORWARD, LayerRange(0, 1))


@pytest.mark.parametrize(
    ("kind", "first_s", "second_s"),
    [
        # Forwards of layers 0 to 3 take 1, 2, 3 and 4 s; those of layers 1 and 2 are run again.
        (OperationKind.FORWARD, 0.0, 0.0),
        (OperationKind.BACKWARD, 2.0, 3.0),
        (OperationKind.INPUT_GRAD, 0.0, 3.0),  # the I of a first hop does nothing
        (OperationKind.WEIGHT_GRAD, 2.0, 0.0),
    ],
)
def test_a_backward_begins_with_the_forwards_that_are_run_again(
    kind: OperationKind, first_s: float, second_s: float
) -> None:
    layers = tuple(LayerCost(f"layer {i}", 1.0 + i, 2.0, 0.5, fused_backward_s=2.25) for i in range(4))
    cluster = Cluster((Worker(0, "a", speed=0.5),), Link(0.0, math.inf), Link(0.0, math.inf))
    costs = CostModel(Workload(layers, 1, 1, 0.25), cluster)

    for part, again_s in ((LayerRange(0, 2), first_s), (LayerRange(2, 4), second_s)):
        kept_s, found_s = (costs.compute_s(0, kind, part, recompute=again) for again in (None, RecomputedLayers(0, 4)))
        assert found_s == kept_s + again_s / 0.5
        route = Route(0, (Hop(0, LayerRange(0, 2)), Hop(0, LayerRange(2, 4))))
        assert costs.operation_s(0, Operation.of(kind, route, part.start // 2, {0: RecomputedLayers(0, 4)})) == found_s


@pytest.mark.parametrize(
    ("again", "again_s"),
    [
        ((0, 1), 0.0),
        ((0, 2), 2.0),
        ((1, 3), 5.0),
        ((2, 3), 3.0),
        ((2, 5), 7.0),
        ((3, 5), 4.0),
        ((4, 5), 0.0),
        ((0, 4, 2), 2.0 + 0.5),
        ((0, 5, 5), 3 * 0.25),
    ],
)
def test_a_backward_takes_longer_by_the_layers_that_are_recomputed(again: tuple[int, ...], again_s: float) -> None:
    layers = tuple(LayerCost(f"layer {i}", 1.0 + i, 2.0, 0.5, selective_bytes=0, selective_s=0.25) for i in range(5))
    costs = CostModel(Workload(layers, 1, 1), Cluster((Worker(0, "a"),), Link(0.0, math.inf), Link(0.0, math.inf)))

    assert (
        costs.compute_s(0, OperationKind.BACKWARD, LayerRange(0, 5), recompute=RecomputedLayers(*again))
        == 12.5 + again_s
    )


def test_a_layer_that_is_recomputed_keeps_its_input_and_works_with_the_rest() -> None:
    sizes = {"activation_bytes": 50, "working_bytes": 3, "weight_grad_bytes": 20}
    layers = tuple(LayerCost(f"layer {i}", 1.0, 2.0, 0.5, output_bytes=5 + i, **sizes) for i in range(3))

    first, inner, last = Workload(layers, 1, 1).recomputed().layers

    assert (first, last) == (layers[0], layers[2])
    assert (inner.activation_bytes, inner.working_bytes, inner.weight_grad_bytes) == (5, 3 + 45 + 6, 20)
    assert (inner.forward_s, inner.input_grad_s, inner.weight_grad_s, inner.backward_s) == (1.0, 3.0, 0.5, 3.5)
