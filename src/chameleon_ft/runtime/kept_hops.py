"""State that a worker keeps of a hop from its forward to its backward: graphs, or only the inputs of some layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from chameleon_ft.plan import LayerRange
from chameleon_ft.runtime.layers import HeldLayers
from chameleon_ft.runtime.split_backward import input_gradient
from chameleon_ft.schedule import Operation
from chameleon_ft.workload import is_recomputed

__all__ = ["KeptHop", "WeightHalf"]


class WeightHalf(Protocol):
    """The part of a backward that is left to W."""

    def run(self) -> None:
        """Add to the parameters' gradients; may be called once."""


@dataclass(slots=True)
class _Part:
    """Some layers of a hop: their input, cut off from the layers before, and their output with its graph.

    The output is None if the layers are run again in the backward.
    """

    layers: LayerRange
    boundary: Tensor
    output: Tensor | None


class KeptHop:
    """A hop whose forward has been run. Its backward is run once, in one go or in halves.

    The hop is kept in parts: each layer that is recomputed in full is one, of which the input is kept, and so is each
    stretch of layers between those, of which autograd keeps the graph. A layer that is recomputed in full is run with a
    graph the first time too, which is freed at once. Without a graph torch may choose other kernels, and the loss would
    not be bit for bit that of a hop that keeps everything. Of a layer that is recomputed selectively the graph is kept,
    and makes some of its tensors again: see `chameleon_ft.models.recomputation`.

    Args:
        held: the worker's layers.
        operation: the hop's F.
        step: number of the step.
        num_layers: layers of the model.
    """

    def __init__(self, held: HeldLayers, operation: Operation, *, step: int, num_layers: int) -> None:
        self._held = held
        self._operation = operation
        self._step = step
        self._num_layers = num_layers
        again = operation.recompute
        self._selective = frozenset(
            layer for layer in (again.selective if again else ()) if is_recomputed(layer, num_layers)
        )
        self._parts: list[_Part] = []

    def forward(self, boundary: Tensor) -> Tensor:
        """Run the hop's F on `boundary`, its input; return the output, of the model's last layer with its graph."""
        for layers, again in _parts_of(self._operation, self._num_layers):
            boundary = self._part_forward(layers, boundary, again=again)
        return boundary

    def end_in(self, loss: Tensor) -> None:
        """Let the hop, the last of its route, end in the loss that was made of its output."""
        self._parts[-1].output = loss

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Add to the parameters' gradients; return the gradient of the hop's input, None where it has none.

        `gradient` is that of the hop's output; None for the loss.
        """
        while self._parts:
            gradient = self._part_backward(self._parts.pop(), gradient)
            if gradient is None:  # the layers below have no part in the loss
                self._parts.clear()
        return gradient

    def input_gradient(self, gradient: Tensor | None) -> tuple[Tensor | None, WeightHalf]:
        """Return the gradient of the hop's input, None where it has none, and what is left to do."""
        if not self._parts[0].boundary.requires_grad:
            return None, _WholeBackward(self, gradient)
        weights = _WeightHalves([])
        while self._parts:
            part = self._parts.pop()
            parameters = self._held.parameters(part.layers)
            gradient, weight_half = input_gradient(self._output(part), gradient, part.boundary, parameters)
            weights.halves.append(weight_half)
            if gradient is None:
                self._parts.clear()
        return gradient, weights

    def _part_forward(self, layers: LayerRange, boundary: Tensor, *, again: bool) -> Tensor:
        output = self._run(layers, boundary)
        self._parts.append(_Part(layers, boundary, None if again else output))
        if layers.stop == self._num_layers:
            return output
        return output.detach().requires_grad_(output.requires_grad)

    def _part_backward(self, part: _Part, gradient: Tensor | None) -> Tensor | None:
        output = self._output(part)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        return part.boundary.grad

    def _output(self, part: _Part) -> Tensor:
        return self._run(part.layers, part.boundary) if part.output is None else part.output

    def _run(self, layers: LayerRange, boundary: Tensor) -> Tensor:
        return self._held.forward(
            layers,
            boundary,
            step=self._step,
            micro_batch=self._operation.micro_batch,
            selective=self._selective,
        )


@dataclass(frozen=True, slots=True)
class _WholeBackward:
    """The backward of a hop whose input needs no gradient: all of it is weight gradient."""

    hop: KeptHop
    gradient: Tensor | None

    def run(self) -> None:
        self.hop.backward(self.gradient)


@dataclass(frozen=True, slots=True)
class _WeightHalves:
    """The weight halves of the parts of a hop."""

    halves: list[WeightHalf]

    def run(self) -> None:
        while self.halves:
            self.halves.pop().run()


def _parts_of(operation: Operation, num_layers: int) -> Iterator[tuple[LayerRange, bool]]:
    """The parts of a hop from below, and whether each is run again."""
    layers = operation.layers
    recomputed = operation.recompute
    again = [layer for layer in (recomputed.full if recomputed else ()) if is_recomputed(layer, num_layers)]
    edges = {layers.start, layers.stop, *again, *(layer + 1 for layer in again)}
    for start, stop in pairwise(sorted(edges)):
        yield LayerRange(start, stop), start in again
