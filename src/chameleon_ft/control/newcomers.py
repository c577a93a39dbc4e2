"""Workers that have come while the run goes on, until a decision has reckoned with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from chameleon_ft.control.decision import Prepared
from chameleon_ft.control.messages import Expect
from chameleon_ft.estimate import state_bytes

__all__ = ["Newcomers"]


@dataclass(slots=True)
class Newcomers:
    """Who has come, and whether everyone is to stop for them.

    Attributes:
        workers: live workers that no decision has reckoned with yet.
        is_pausing: whether everyone is to stop after the current step, for a place to be made for them.
        prepared: what was weighed then; None where nothing was, or where they do not change the plan.
        expecting: workers that were told which layers come to them, until the next orders are given out.
    """

    workers: set[int] = field(default_factory=set)
    is_pausing: bool = False
    prepared: Prepared | None = None
    expecting: set[int] = field(default_factory=set)

    def pause(self, prepared: Prepared) -> dict[int, Expect]:
        """A change has been found for which everyone is to stop; return what those who hold nothing yet are told."""
        self.prepared, self.is_pausing = prepared, True
        told = _expectations(prepared)
        self.expecting.update(told)
        return told

    def disappointed(self, ordered: Collection[int]) -> dict[int, Expect]:
        """Orders are given out to these; return what others are told that waited for layers."""
        expecting, self.expecting = self.expecting, set()
        return {worker: Expect(layers=()) for worker in sorted(expecting - set(ordered))}

    def settle(self) -> None:
        """All of them have a place, or are spares."""
        self.workers.clear()
        self.is_pausing, self.prepared = False, None


def _expectations(prepared: Prepared) -> dict[int, Expect]:
    """Who trains has the memory for more layers only when it has given up its gradients, and is told nothing yet."""
    course, outlook = prepared.decision.course, prepared.outlook
    if course is None or course.transfer is None:
        return {}
    costs = outlook.costs.workload.layers
    coming: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for message in course.transfer.messages:
        if message.destination not in outlook.plan.placement.ranges:
            coming[message.destination] += [(layer, state_bytes(costs[layer])) for layer in message.layers]
    return {worker: Expect(layers=tuple(layers)) for worker, layers in coming.items()}
