"""In-flight limits, checked apart from the schedulers that keep to them."""

from __future__ import annotations

from collections.abc import Mapping

from chameleon_ft.schedule import InFlightLimit, OperationKind, Program


def exceeds(program: Program, limits: Mapping[int, InFlightLimit]) -> bool:
    """Return whether a worker exceeds its limit, counted in the order of its operations."""
    for worker, limit in limits.items():
        in_flight = kept = 0
        for operation in program.of(worker):
            in_flight += operation.kind is OperationKind.FORWARD
            kept += operation.kind is OperationKind.FORWARD
            if in_flight > limit.in_flight or kept > limit.kept:
                return True
            in_flight -= operation.kind in (OperationKind.BACKWARD, OperationKind.INPUT_GRAD)
            kept -= operation.kind in (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)
    return False
