"""When a worker issues the all-reduce of a segment."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given

from chameleon_ft.plan import Hop, LayerRange, Route
from chameleon_ft.schedule import Operation, OperationKind, list_schedule
from chameleon_ft.sync import Segment, gradient_rounds, issue_points
from tests.strategies import Planned, planned

MAKES_GRADIENTS = (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)


@given(planned())
def test_nothing_is_issued_before_its_gradients_are_complete_nor_before_its_turn(case: Planned) -> None:
    program = list_schedule(case.plan, case.costs)
    order = gradient_rounds(case.plan.placement).order
    for worker in case.plan.workers:
        operations = program.of(worker)
        own = [segment for segment in order if worker in segment.holders]

        points = issue_points(operations, own)

        assert all(before <= after for before, after in pairwise(points))
        for number, (segment, point) in enumerate(zip(own, points, strict=True)):
            left = [o for o in operations[point:] if o.kind in MAKES_GRADIENTS]
            assert not any(layer in operation.layers for operation in left for layer in segment.layers)
            if point:  # and not a moment later
                last = operations[point - 1]
                assert last.kind in MAKES_GRADIENTS
                assert any(layer in last.layers for earlier in own[: number + 1] for layer in earlier.layers)


def test_a_segment_waits_for_the_one_before_it_in_the_order() -> None:
    low, high = LayerRange(0, 1), LayerRange(1, 2)
    route = Route(0, (Hop(0, low), Hop(0, high)))
    operations = [
        Operation.of(kind, route, hop)
        for kind, hop in (
            (OperationKind.FORWARD, 0),
            (OperationKind.FORWARD, 1),
            (OperationKind.BACKWARD, 1),
            (OperationKind.BACKWARD, 0),
        )
    ]

    assert issue_points(operations, [Segment(high, (0, 1)), Segment(low, (0, 2))]) == (3, 4)
    assert issue_points(operations, [Segment(low, (0, 2)), Segment(high, (0, 1))]) == (4, 4)
    assert issue_points(operations, [Segment(LayerRange(2, 3), (0, 1))]) == (0,)
