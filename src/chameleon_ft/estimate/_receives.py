"""The messages that a worker has asked for and not yet used."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from chameleon_ft.schedule import Operation, OperationKind


class Receives:
    """Those of a worker with these operations; `output` are the bytes that leave a layer."""

    def __init__(self, operations: tuple[Operation, ...], output: Callable[[int], int], ahead: int) -> None:
        sizes = [
            output((o.layers.start if o.kind is OperationKind.FORWARD else o.layers.stop) - 1)
            for o in operations
            if o.receive_from is not None
        ]
        self._until = list(accumulate(sizes, initial=0))
        self._ahead = ahead
        self._used = 0

    def posted(self) -> int:
        """Bytes of those that are asked for when an operation begins to wait."""
        return self._until[self._posted] - self._until[self._used]

    def left(self, operation: Operation) -> int:
        """Bytes of those that are asked for while `operation` runs, the next one, which has what it waited for."""
        posted = self._posted
        if operation.receive_from is not None:
            self._used += 1
        return self._until[posted] - self._until[self._used]

    @property
    def _posted(self) -> int:
        return min(self._used + self._ahead, len(self._until) - 1)
