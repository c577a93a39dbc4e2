"""Activations that a worker saves from the forward of a hop to its backward, and the backward, whole or in halves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from chameleon_ft.plan import LayerRange
from chameleon_ft.runtime.execution.job_errors import naming_layer
from chameleon_ft.runtime.execution.layers import HeldLayers
from chameleon_ft.runtime.execution.split_backward import WeightHalf, input_gradient, whole_backward
from chameleon_ft.schedule import Operation
from chameleon_ft.workload import is_recomputed


@dataclass(slots=True)
class _Part:
    """Some layers of a hop: their input, detached from the layers before, and their output with its graph.

    The output is None if the backward runs the layers again. `ends` are the last nodes of the layers in that graph.
    """

    layers: LayerRange
    boundary: Tensor
    output: Tensor | None
    ends: list[Any]


class SavedActivations:
    """The saved state of one hop, whose backward runs once, whole or in halves.

    Each layer recomputed in full is a part of its own, of which only the input is saved. Each stretch of layers between
    those is a part too, and autograd keeps its graph. The first run of a layer recomputed in full also builds a graph,
    which is freed at once: without a graph torch may choose other kernels, and the loss would differ in its last bits.
    A layer recomputed selectively keeps its graph, which recomputes some of its tensors: see
    `chameleon_ft.models.recomputation`.

    Args:
        operation: the hop's F.
        num_layers: layers of the model.
    """

    def __init__(self, held: HeldLayers, operation: Operation, *, step: int, num_layers: int) -> None:
        again = operation.recompute
        selective = frozenset(layer for layer in (again.selective if again else ()) if is_recomputed(layer, num_layers))
        self._held = held
        self._operation = operation
        self._num_layers = num_layers
        self._run = partial(held.forward, step=step, micro_batch=operation.micro_batch, selective=selective)
        self._parts: list[_Part] = []

    def forward(self, boundary: Tensor) -> Tensor:
        """Run the hop's F on its input; return the output, with its graph if the model's last layer made it."""
        for layers, again in _parts_of(self._operation, self._num_layers):
            boundary = self._part_forward(layers, boundary, again=again)
        return boundary

    def end_in(self, loss: Tensor) -> None:
        """Replace the output of the route's last hop by the loss computed from it."""
        self._parts[-1].output = loss

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Add to the gradients of the parameters; return the gradient of the hop's input, None if it has none.

        `gradient` is that of the hop's output; None for the loss.
        """
        while self._parts:
            part = self._parts.pop()
            with naming_layer(part.layers, part.ends):
                whole_backward(self._output(part), gradient)
            gradient = part.boundary.grad
            if gradient is None:  # the layers below do not contribute to the loss
                self._parts.clear()
        return gradient

    def input_gradient(self, gradient: Tensor | None) -> tuple[Tensor | None, WeightHalf]:
        """Run I: return the gradient of the hop's input, None if it has none, and the remaining W."""
        if not self._parts[0].boundary.requires_grad:
            return None, partial(self.backward, gradient)
        halves: list[WeightHalf] = []
        while self._parts:
            part = self._parts.pop()
            parameters = self._held.parameters(part.layers)
            with naming_layer(part.layers, part.ends):
                gradient, half = input_gradient(self._output(part), gradient, part.boundary, parameters)
            halves.append(half)
            if gradient is None:
                self._parts.clear()
        return gradient, partial(_run_all, halves)

    def _part_forward(self, layers: LayerRange, boundary: Tensor, *, again: bool) -> Tensor:
        output, ends = boundary, []
        for layer in layers:
            output = self._run(LayerRange(layer, layer + 1), output)
            ends.append(output.grad_fn)
        self._parts.append(_Part(layers, boundary, None, []) if again else _Part(layers, boundary, output, ends))
        if layers.stop == self._num_layers:
            return output
        return output.detach().requires_grad_(output.requires_grad)

    def _output(self, part: _Part) -> Tensor:
        return self._run(part.layers, part.boundary) if part.output is None else part.output


def _run_all(halves: list[WeightHalf]) -> None:
    while halves:
        halves.pop()()


def _parts_of(operation: Operation, num_layers: int) -> Iterator[tuple[LayerRange, bool]]:
    """Yield the parts of a hop from below, and whether the backward recomputes each."""
    layers, recomputed = operation.layers, operation.recompute
    again = [layer for layer in (recomputed.full if recomputed else ()) if is_recomputed(layer, num_layers)]
    edges = {layers.start, layers.stop, *again, *(layer + 1 for layer in again)}
    for start, stop in pairwise(sorted(edges)):
        yield LayerRange(start, stop), start in again
