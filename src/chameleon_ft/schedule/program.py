"""The operations of a step, and the order in which each worker runs its own."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.placement import LayerRange
from chameleon_ft.plan.plan import Route

__all__ = ["Operation", "OperationKind", "Program"]


class OperationKind(StrEnum):
    """What an operation computes; the values are the letters used in pictures and traces."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    # That of Enum is computed in Python on every call, and kinds are in the keys of all that looks at programs.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of computing on one worker, with the message it waits for and the message it makes.

    F receives the activation from the worker of the previous hop and sends one to the worker of the next. B and I
    receive the gradient from the worker of the next hop and send one to the worker of the previous. W has no messages.

    Attributes:
        kind: F, B, I or W.
        micro_batch: number of the micro-batch in the global batch.
        hop: index of the hop in the micro-batch's route.
        layers: the layers of that hop.
        receive_from: worker whose message is needed, or None: the route starts or turns here, or the tensor is handed
            over on the same worker.
        send_to: worker that the result goes to, or None likewise.
        first: whether the hop is the first of its route (F takes its input from the dataset).
        last: whether the hop is the last of its route (F ends in the loss; B and I start from it).
        recompute: whether the worker keeps only the layers' inputs from F on, and runs their forwards again.
    """

    kind: OperationKind
    micro_batch: int
    hop: int
    layers: LayerRange
    receive_from: int | None
    send_to: int | None
    first: bool
    last: bool
    recompute: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.hop}"

    @classmethod
    def of(cls, kind: OperationKind, route: Route, hop: int, recompute: Container[int] = ()) -> Operation:
        """The operation of this kind at the hop with index `hop` of `route`; the workers in `recompute` do so."""
        hops = route.hops
        worker = hops[hop].worker
        before = hops[hop - 1].worker if hop else worker
        after = hops[hop + 1].worker if hop + 1 < len(hops) else worker
        if kind is OperationKind.FORWARD:
            receive_from, send_to = before, after
        elif kind is OperationKind.WEIGHT_GRAD:
            receive_from = send_to = worker
        else:
            receive_from, send_to = after, before
        return cls(
            kind,
            route.micro_batch,
            hop,
            hops[hop].layers,
            None if receive_from == worker else receive_from,
            None if send_to == worker else send_to,
            hop == 0,
            hop + 1 == len(hops),
            worker in recompute,
        )


@dataclass(frozen=True, slots=True)
class Program:
    """For each worker, in ascending order, the operations it runs in a step, in their order."""

    operations: Mapping[int, tuple[Operation, ...]]

    def __post_init__(self) -> None:
        ordered = {worker: tuple(self.operations[worker]) for worker in sorted(self.operations)}
        object.__setattr__(self, "operations", FrozenMap(ordered))

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of the program, ascending; one may have nothing to do."""
        return tuple(self.operations)

    def of(self, worker: int) -> tuple[Operation, ...]:
        """The operations of `worker` in order; empty for a worker that is not in the program."""
        return self.operations.get(worker, ())
