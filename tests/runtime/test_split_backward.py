"""Both halves of a backward together are the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from chameleon_ft.runtime.execution.saved_activations import input_gradient


class Stage(nn.Module):
    """A linear map with a parameter beside it."""

    def __init__(self, run: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.value = nn.Parameter(torch.randn(4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.linear, self.value)


_compiled_scale: Callable[[Tensor], Tensor] = torch.compile(lambda value: value.exp().sin(), backend="aot_eager")

STAGES: dict[str, Callable[[Tensor, nn.Linear, Tensor], Tensor]] = {
    "plain": lambda x, linear, value: torch.tanh(linear(x)) * value,
    "a weight used twice": lambda x, linear, value: linear(torch.tanh(linear(x))) + value,
    "a weight used below and above another one": lambda x, linear, value: (
        (y := x + torch.tanh(linear(torch.tanh(x * value)))) * value + y
    ),
    "a weight on a way of its own": lambda x, linear, value: linear(x) * value.exp() + value,
    "weights that are not used": lambda x, linear, value: x.sin(),
    "the input handed through": lambda x, linear, value: x + 0,
    "a view at the end": lambda x, linear, value: linear(x * value).view(-1),
    "a transposed end": lambda x, linear, value: linear(x * value).t(),
    "no way to the input": lambda x, linear, value: (value * 2).expand_as(x) + linear.bias,
    "no way to the input, and a view": lambda x, linear, value: value.expand_as(x),
    "a reentrant checkpoint": lambda x, linear, value: (
        checkpoint(lambda y: torch.tanh(linear(y)), x, use_reentrant=True) * value
    ),
    "a compiled function": torch.compile(
        lambda x, linear, value: functional.gelu(linear(x).exp()) * value, backend="aot_eager"
    ),
    "a weight that a compiled function computes": lambda x, linear, value: linear(x * _compiled_scale(value)),
    "a scalar": lambda x, linear, value: (linear(x) * value).sum(),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", [False, True], ids=["inner", "first"])
@pytest.mark.parametrize("name", STAGES)
def test_both_halves_are_the_backward(name: str, first: bool) -> None:
    torch.manual_seed(0)
    stage = Stage(STAGES[name])
    boundary = torch.randn(3, 4, requires_grad=not first)
    output = stage(boundary)
    gradient = None if output.ndim == 0 else torch.randn_like(output)
    again = boundary.detach().clone().requires_grad_(not first)
    result = stage(again)
    parameters = list(stage.parameters())
    if result.requires_grad:
        torch.autograd.backward(result, gradient)
    expected = [None if p.grad is None else p.grad.clone() for p in parameters]
    stage.zero_grad()

    passed_back, pending = input_gradient(output, gradient, boundary, parameters)
    assert all(p.grad is None for p in parameters), "the weights come later"
    pending()

    assert_equal(passed_back, again.grad)
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert_equal(parameter.grad, wanted)


@pytest.mark.parametrize("name", ["plain", "a compiled function"])
def test_the_weight_half_accumulates_gradients(name: str) -> None:
    torch.manual_seed(0)
    stage = Stage(STAGES[name])
    buffers = [torch.zeros_like(p) for p in stage.parameters()]
    for parameter, buffer in zip(stage.parameters(), buffers, strict=True):
        parameter.grad = buffer
    boundaries = [torch.randn(3, 4) for _ in range(3)]
    pending = []
    for boundary in boundaries:
        boundary.requires_grad_()
        pending.append(input_gradient(stage(boundary).sum(), None, boundary, list(stage.parameters()))[1])
    for half in reversed(pending):
        half()
    assert all(p.grad is b for p, b in zip(stage.parameters(), buffers, strict=True)), "accumulated in place"
    expected = torch.autograd.grad(
        torch.stack([stage(boundary.detach()).sum() for boundary in boundaries]).sum(), list(stage.parameters())
    )
    for buffer, wanted in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer, wanted)


def assert_equal(found: Tensor | None, wanted: Tensor | None) -> None:
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        torch.testing.assert_close(found, wanted)
