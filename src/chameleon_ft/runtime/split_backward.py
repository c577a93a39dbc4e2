"""The two halves of a backward: the gradient of the input now, those of the weights later.

The cut through the autograd graph is torch's own, from its pipelining package; it is private there, and this is the one
place that uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

__all__ = ["PendingWeightGradient", "input_gradient"]


class PendingWeightGradient:
    """What is left to do after the input half: run it once, to add to the parameters' gradients."""

    def __init__(self, parameters: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
        self._parameters = parameters
        self._groups = groups

    def run(self) -> None:
        if self._parameters:
            stage_backward_weight(iter(self._parameters), self._groups)


class WholeBackward:
    """The backward of a route's first hop, whose input needs no gradient: all of it is weight gradient."""

    def __init__(self, output: Tensor, output_gradient: Tensor | None) -> None:
        self._output = output
        self._output_gradient = output_gradient

    def run(self) -> None:
        if self._output.requires_grad:
            torch.autograd.backward(self._output, self._output_gradient)


def input_gradient(
    output: Tensor, output_gradient: Tensor | None, boundary: Tensor, parameters: list[nn.Parameter]
) -> tuple[Tensor | None, PendingWeightGradient | WholeBackward]:
    """Compute the gradient of `boundary` and keep what the weight half needs.

    Args:
        output: the stage's output, or the scalar loss.
        output_gradient: gradient of `output`; None for the loss.
        boundary: the stage's input; it needs no gradient at a route's first hop.
        parameters: the stage's trained parameters.
    """
    if not boundary.requires_grad:
        return None, WholeBackward(output, output_gradient)
    if output._is_view():
        output = output.clone()  # torch detaches the output in place, which it does not allow of a view
    whole = WholeBackward(output.view_as(output), output_gradient)
    gradients = None if output_gradient is None else [output_gradient]
    (gradient,), groups = stage_backward_input([output], gradients, [boundary], iter(parameters))
    # Torch leaves the gradient there too, where it would stay for as long as the weight half keeps the input.
    boundary.grad = None
    # Torch looks for weights on the way from the output to the input; where there is no such way it finds none.
    return gradient, whole if gradient is None else PendingWeightGradient(parameters, groups)
