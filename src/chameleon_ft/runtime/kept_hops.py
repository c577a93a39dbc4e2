"""What a worker keeps of a hop from its forward to its backward: the whole graph, or the inputs of its layers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from chameleon_ft.plan import LayerRange
from chameleon_ft.runtime.layers import HeldLayers
from chameleon_ft.runtime.split_backward import input_gradient
from chameleon_ft.schedule import Operation
from chameleon_ft.workload import is_recomputed

__all__ = ["KeptHop", "WeightHalf", "run_forward"]


class WeightHalf(Protocol):
    """What a backward leaves to be done by W."""

    def run(self) -> None:
        """Do it, once: add to the parameters' gradients."""


class KeptHop(Protocol):
    """A hop whose forward has been run. Its backward is run once, in one go or in halves."""

    def end_in(self, loss: Tensor) -> None:
        """Let the hop, the last of its route, end in the loss that was made of its output."""

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Add to the parameters' gradients; return the gradient of the hop's input, None where it has none.

        `gradient` is that of the hop's output; None for the loss.
        """

    def input_gradient(self, gradient: Tensor | None) -> tuple[Tensor | None, WeightHalf]:
        """Return the gradient of the hop's input, None where it has none, and what is left to do."""


def run_forward(
    held: HeldLayers, operation: Operation, boundary: Tensor, *, step: int, num_layers: int
) -> tuple[Tensor, KeptHop]:
    """Run the F of a hop on `boundary`, its input; return the output, and what its backward needs.

    `num_layers` are those of the model.
    """
    if not operation.recompute:
        output = held.forward(operation.layers, boundary, step=step, micro_batch=operation.micro_batch)
        return output, _WholeGraph(held, operation.layers, boundary, output)
    inputs = _LayerInputs(held, step=step, micro_batch=operation.micro_batch, num_layers=num_layers)
    for layer in operation.layers:
        boundary = inputs.forward(layer, boundary)
    return boundary, inputs


@dataclass(slots=True)
class _WholeGraph:
    """A hop of which autograd keeps all that it needs."""

    held: HeldLayers
    layers: LayerRange
    boundary: Tensor
    output: Tensor

    def end_in(self, loss: Tensor) -> None:
        self.output = loss

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        if self.output.requires_grad:
            torch.autograd.backward(self.output, gradient)
        return self.boundary.grad

    def input_gradient(self, gradient: Tensor | None) -> tuple[Tensor | None, WeightHalf]:
        return input_gradient(self.output, gradient, self.boundary, self.held.parameters(self.layers))


@dataclass(slots=True)
class _Part:
    """One layer of a hop: its input, cut off from the layers before, and its output if that is kept with its graph."""

    layer: int
    boundary: Tensor
    output: Tensor | None


class _LayerInputs:
    """A hop of which the layers' inputs are kept, and the graphs of those layers that are not run again.

    Every layer is run with a graph the first time too, which is let go of at once. Without one torch may choose other
    kernels, and the loss would not be bit for bit what it is if everything is kept.
    """

    def __init__(self, held: HeldLayers, *, step: int, micro_batch: int, num_layers: int) -> None:
        self._held = held
        self._step = step
        self._micro_batch = micro_batch
        self._num_layers = num_layers
        self._parts: list[_Part] = []

    def forward(self, layer: int, boundary: Tensor) -> Tensor:
        """Run the next layer; return its output for the layer after it, cut off from this one unless it is the last."""
        output = self._run(layer, boundary)
        again = is_recomputed(layer, self._num_layers)
        self._parts.append(_Part(layer, boundary, None if again else output))
        if layer == self._num_layers - 1:
            return output
        return output.detach().requires_grad_(output.requires_grad)

    def end_in(self, loss: Tensor) -> None:
        self._parts[-1].output = loss

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        while self._parts:
            gradient = self._part_backward(self._parts.pop(), gradient)
            if gradient is None:  # the layers below have no part in the loss
                self._parts.clear()
        return gradient

    def input_gradient(self, gradient: Tensor | None) -> tuple[Tensor | None, WeightHalf]:
        if not self._parts[0].boundary.requires_grad:
            return None, _AllOfIt(self, gradient)
        weights = _OfLayers([])
        while self._parts:
            part = self._parts.pop()
            parameters = self._held.parameters(_only(part.layer))
            gradient, weight_half = input_gradient(self._output(part), gradient, part.boundary, parameters)
            weights.halves.append(weight_half)
            if gradient is None:
                self._parts.clear()
        return gradient, weights

    def _part_backward(self, part: _Part, gradient: Tensor | None) -> Tensor | None:
        output = self._output(part)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        return part.boundary.grad

    def _output(self, part: _Part) -> Tensor:
        return self._run(part.layer, part.boundary) if part.output is None else part.output

    def _run(self, layer: int, boundary: Tensor) -> Tensor:
        return self._held.forward(_only(layer), boundary, step=self._step, micro_batch=self._micro_batch)


@dataclass(frozen=True, slots=True)
class _AllOfIt:
    """The backward of a hop whose input needs no gradient: all of it is weight gradient."""

    hop: _LayerInputs
    gradient: Tensor | None

    def run(self) -> None:
        self.hop.backward(self.gradient)


@dataclass(frozen=True, slots=True)
class _OfLayers:
    """The weight halves of several layers."""

    halves: list[WeightHalf]

    def run(self) -> None:
        while self.halves:
            self.halves.pop().run()


def _only(layer: int) -> LayerRange:
    return LayerRange(layer, layer + 1)
