"""The state of a step: what a worker holds of it between its first operation and its vote."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from chameleon_ft.plan.rest import GradientKey, HopKey, StepProgress
from chameleon_ft.runtime.communicators import InFlight
from chameleon_ft.runtime.execution.saved_activations import SavedActivations
from chameleon_ft.runtime.execution.split_backward import WeightHalf
from chameleon_ft.schedule import Operation, OperationKind

Result: TypeAlias = tuple[bool, int, int]
"""(whether it is an activation, micro-batch, layer): the output of the layer, or the gradient of its input."""

Span: TypeAlias = tuple[OperationKind, float, float]
"""(kind, start, end) of the computation of an operation, by `time.perf_counter`."""


def hop_of(operation: Operation) -> HopKey:
    """Return the key of the hop that an operation belongs to."""
    return operation.micro_batch, operation.layers


@dataclass(frozen=True, slots=True)
class CountedLoss:
    """The loss of one micro-batch: its sum, of shape [], its terms and the number of its samples."""

    value: Tensor
    terms: float
    samples: int


@dataclass(slots=True)
class StepState:
    """The state of one step, which outlives a generation that ends in the middle of it.

    Attributes:
        contributed: hops whose weight gradients have been added to the gradient buffers.
        saved: hops whose F has run, and whose backward has not begun.
        deferred: hops whose I has run, and whose W has not.
        losses: those that this worker has counted, by micro-batch.
        results: results of operations that are still held: for this worker's own next hop, or because the worker that
            they were sent to may not have used them.
        spans: of the operations that the program in execution has run, in order.
        in_flight: messages to be held until they have arrived, at the latest until the step's vote is complete.
    """

    step: int
    contributed: set[HopKey] = field(default_factory=set)
    saved: dict[HopKey, SavedActivations] = field(default_factory=dict)
    deferred: dict[HopKey, WeightHalf] = field(default_factory=dict)
    losses: dict[int, CountedLoss] = field(default_factory=dict)
    results: dict[Result, Tensor] = field(default_factory=dict)
    in_flight: dict[Result, InFlight] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The sum of the losses counted so far."""
        values = [loss.value for loss in self.losses.values()]
        return float(torch.stack(values).sum(dtype=torch.float64)) if values else 0.0

    def contributions(self, known: Collection[int] = ()) -> int:
        """Return how many pairs of micro-batch and layer are in the gradients; those of `known` layers do not count."""
        return sum(1 for _, layers in self.contributed for layer in layers if layer not in known)

    def progress(self, totals: Collection[GradientKey]) -> StepProgress:
        """Return what the worker holds of the step; `totals` are the keys of the gradients whose sum it holds."""
        return StepProgress(
            contributed=frozenset(self.contributed),
            saved=frozenset(self.saved),
            deferred=frozenset(self.deferred),
            counted=frozenset(self.losses),
            totals=frozenset(totals),
            activations=frozenset((micro_batch, layer) for forward, micro_batch, layer in self.results if forward),
            gradients=frozenset((micro_batch, layer) for forward, micro_batch, layer in self.results if not forward),
        )

    def keep_for(self, operations: Collection[Operation], results: Collection[Result]) -> None:
        """Release what the program of the step's rest does not use; of the results keep only these."""
        forwards, backwards, weights = (
            {hop_of(operation) for operation in operations if operation.kind in kinds}
            for kinds in (
                (OperationKind.FORWARD,),
                (OperationKind.BACKWARD, OperationKind.INPUT_GRAD),
                (OperationKind.WEIGHT_GRAD,),
            )
        )
        self.saved = {hop: saved for hop, saved in self.saved.items() if hop in backwards - forwards}
        self.deferred = {hop: half for hop, half in self.deferred.items() if hop in weights - backwards}
        self.results = {result: tensor for result, tensor in self.results.items() if result in results}
