"""Operations that take their time."""

from __future__ import annotations

import time

from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import CostModel, Operation, OperationKind

__all__ = ["EmulatedPace"]


class EmulatedPace:
    """Sleeps until an operation would be over on the device of `worker`. Like a device, it cannot be interrupted."""

    def __init__(self, costs: CostModel, worker: int) -> None:
        self._costs = costs
        self._worker = worker
        self._seconds: dict[tuple[OperationKind, LayerRange, LayerRange | None], float] = {}

    def fill(self, operation: Operation, *, since: float) -> None:
        key = (operation.kind, operation.layers, operation.recompute)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._costs.operation_s(self._worker, operation)
        remaining = since + seconds - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
