"""Memory of ranges of layers: the bytes a worker holds all the time, and the peak of an operation.

`chameleon_ft.estimate.memory` defines what counts as what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import NamedTuple

from chameleon_ft.plan import LayerRange, Placement, RecomputedLayers
from chameleon_ft.schedule import OperationKind
from chameleon_ft.workload import LayerCost, Workload, is_recomputed

__all__ = ["LayerMemory", "MemoryUse", "Moment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a worker holds at one moment, by what they are for; `estimate.memory` defines what counts as what."""

    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    sample_bytes: int = 0
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(astuple(self))


class Moment(NamedTuple):
    """Bytes that an operation needs while one of its layers runs, the activations of its hop included."""

    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0


class LayerMemory:
    """Bytes that ranges of layers need, of which a worker may recompute some (`again`)."""

    def __init__(self, workload: Workload) -> None:
        self._costs = workload.layers
        self._whole = _Kept(self._costs, [layer.activation_bytes for layer in self._costs])
        self._full = _Kept(self._costs, [layer.activation_bytes for layer in workload.recomputed().layers])
        self._selective = _Kept(self._costs, workload.selective_bytes)
        self.weight_grads = _summed(layer.weight_grad_bytes for layer in self._costs)
        self._params = _summed(layer.param_bytes for layer in self._costs)
        self._gradients = _summed(layer.gradient_bytes for layer in self._costs)
        self._optimizer = _summed(layer.optimizer_bytes for layer in self._costs)

    def activations(self, layers: LayerRange, again: RecomputedLayers | None) -> int:
        """Bytes of activations that are kept of these layers."""
        return self._kept(layers, again)[0]

    def kept_output(self, layers: LayerRange, again: RecomputedLayers | None) -> int:
        """Bytes of the output of these layers, if they keep it: the graph of the last layer does, if there is one."""
        last = layers.stop - 1
        return 0 if self._runs_again(last, again) else self.output(last)

    def _runs_again(self, layer: int, again: RecomputedLayers | None) -> bool:
        return again is not None and layer in again.full and is_recomputed(layer, len(self._costs))

    def _kept(self, layers: LayerRange, again: RecomputedLayers | None) -> tuple[int, int]:
        """Bytes of activations that are kept of these layers, and those of them that are in what I leaves for W."""
        part = None if again is None else again.intersection(layers)
        kept, left = self._whole.activations(layers), self._whole.left(layers)
        for own, recomputed in () if part is None else ((self._full, part.full), (self._selective, part.selective)):
            kept += own.activations(recomputed) - self._whole.activations(recomputed)
            left += own.left(recomputed) - self._whole.left(recomputed)
        return kept, left

    def output(self, layer: int) -> int:
        """Bytes of a layer's output and of its gradient; none before the first, and the last one's is a loss."""
        return self._costs[layer].output_bytes if 0 <= layer < len(self._costs) - 1 else 0

    def worst(self, kind: OperationKind, layers: LayerRange, again: RecomputedLayers | None) -> Moment:
        """The worst moment of an operation, without messages that come in or wait."""
        return max((self._moment(kind, layers, again, running) for running in layers), key=sum)

    def state_of(self, placement: Placement, worker: int) -> MemoryUse:
        """Bytes that a worker holds throughout a step."""
        held = placement.ranges_of(worker)
        return MemoryUse(
            param_bytes=sum(map(self._params, held)),
            gradient_bytes=sum(map(self._gradients, held)),
            optimizer_bytes=sum(map(self._optimizer, held)),
            # Inputs and targets are kept together by each worker that needs one of them.
            sample_bytes=max((self._costs[layer].sample_bytes for layers in held for layer in layers), default=0),
        )

    def _moment(self, kind: OperationKind, layers: LayerRange, again: RecomputedLayers | None, running: int) -> Moment:
        cost = self._costs[running]
        below, through = LayerRange(layers.start, running + 1), LayerRange(running, layers.stop)
        made = self.output(running - 1)  # the gradient of its input
        outgoing = made if running == layers.start else 0
        # Of the layer that runs, what is made once more: its output if it is recomputed in full, and activations.
        output_again = cost.output_bytes if self._runs_again(running, again) else 0
        own = LayerRange(running, running + 1)
        rest = max(0, cost.activation_bytes - self.activations(own, again))
        kept_output = self.kept_output(layers, again)
        match kind:
            case OperationKind.FORWARD:
                activations = self.activations(below, again) + self.output(running)
                return Moment(activation_bytes=activations, working_bytes=cost.working_bytes + rest)
            case OperationKind.BACKWARD:
                from_above = 0 if running + 1 == layers.stop else self.output(running)
                return Moment(
                    activation_bytes=self.activations(below, again) + kept_output,
                    message_bytes=outgoing,
                    working_bytes=cost.working_bytes + output_again + rest + from_above + made - outgoing,
                )
            case OperationKind.INPUT_GRAD:
                apart = self.activations(layers, again) - self._kept(through, again)[1]
                if cost.weight_grad_bytes >= cost.activation_bytes:
                    rest = 0
                return Moment(
                    activation_bytes=apart + kept_output,
                    weight_grad_bytes=self.weight_grads(through),
                    message_bytes=outgoing,
                    working_bytes=cost.working_bytes + output_again + rest + made - outgoing,
                )
            case OperationKind.WEIGHT_GRAD:
                return Moment(weight_grad_bytes=self.weight_grads(layers), working_bytes=cost.working_bytes)


class _Kept:
    """Sums over ranges of layers that keep so much: of activations, and of those among them that I leaves for W."""

    def __init__(self, costs: Sequence[LayerCost], kept: Sequence[int]) -> None:
        self.activations = _summed(kept)
        self.left = _summed(
            own if layer.weight_grad_bytes >= own else 0 for layer, own in zip(costs, kept, strict=True)
        )


def _summed(amounts: Iterable[int]) -> Callable[[LayerRange | range], int]:
    """Sums over ranges of layers, of the amounts of each."""
    until = list(accumulate(amounts, initial=0))
    return lambda layers: until[layers.stop] - until[layers.start]
