"""Workers that have come while the run goes on, until a decision has reckoned with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from chameleon_ft.control.decisions.recovery_plan import Prepared
from chameleon_ft.control.wire.messages import Preallocate
from chameleon_ft.estimate import state_bytes

__all__ = ["Newcomers"]


@dataclass(slots=True)
class Newcomers:
    """Who has come, and whether everyone is to stop for them.

    Attributes:
        workers: live workers that no decision has reckoned with yet.
        is_pausing: whether everyone is to stop after the current step, for a place to be made for them.
        prepared: what was weighed then; None where nothing was, or where they do not change the plan.
        expecting: workers that were told which layers will come to them, and have no orders yet.
        making_room: those of them that have not made room yet, with what they were told.
    """

    workers: set[int] = field(default_factory=set)
    is_pausing: bool = False
    prepared: Prepared | None = None
    expecting: set[int] = field(default_factory=set)
    making_room: dict[int, Preallocate] = field(default_factory=dict)

    def expect(self, prepared: Prepared) -> dict[int, Preallocate]:
        """A change has been found; return what those newcomers are told that layers come to with it.

        Others are told nothing yet: who trains has memory for more layers only when it has given up its gradients.
        """
        told = {
            worker: Preallocate(layers=layers) for worker, layers in _coming(prepared).items() if worker in self.workers
        }
        self.expecting, self.making_room = set(told), dict(told)
        return told

    def made_room(self, worker: int, layers: tuple[tuple[int, int], ...]) -> None:
        """A worker has room for these, which may be others than it was told of last."""
        told = self.making_room.get(worker)
        if told is not None and told.layers == layers:
            del self.making_room[worker]

    def let_down(self, ordered: Collection[int] = ()) -> dict[int, Preallocate]:
        """What was found is not done, or it is and these get orders; return what all others that expect are told."""
        expecting, self.expecting, self.making_room = self.expecting, set(), {}
        return {worker: Preallocate(layers=()) for worker in sorted(expecting - set(ordered))}

    def pause(self, prepared: Prepared) -> None:
        """A change has been found for which everyone is to stop."""
        self.prepared, self.is_pausing = prepared, True

    def settle(self) -> None:
        """All of them have a place, or are spares."""
        self.workers.clear()
        self.is_pausing, self.prepared = False, None


def _coming(prepared: Prepared) -> dict[int, tuple[tuple[int, int], ...]]:
    """Worker -> (layer, bytes) of what it receives, in the order in which it does."""
    course = prepared.decision.course
    if course is None or course.transfer is None:
        return {}
    costs = prepared.outlook.costs.workload.layers
    coming: defaultdict[int, tuple[tuple[int, int], ...]] = defaultdict(tuple)
    for message in course.transfer.messages:
        coming[message.destination] += tuple((layer, state_bytes(costs[layer])) for layer in message.layers)
    return coming
