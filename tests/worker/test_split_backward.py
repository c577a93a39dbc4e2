"""Both halves of a backward together are the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from chameleon_ft.worker.execution.backward import input_gradient


class Stage(nn.Module):
    """A linear map with a parameter beside it."""

    def __init__(self, run: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.value = nn.Parameter(torch.randn(4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.linear, self.value)


def _halved_by_a_hook(x: Tensor) -> Tensor:
    """Return a tensor whose gradient is halved by a hook, as some models do to the gradients of attention."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / 2)
    return x


_compiled_scale: Callable[[Tensor], Tensor] = torch.compile(lambda value: value.exp().sin(), backend="aot_eager")

STAGES: dict[str, Callable[[Tensor, nn.Linear, Tensor], Tensor]] = {
    "plain": lambda x, linear, value: torch.tanh(linear(x)) * value,
    "a weight used twice": lambda x, linear, value: linear(torch.tanh(linear(x))) + value,
    "a weight used below and above another one": lambda x, linear, value: (
        (y := x + torch.tanh(linear(torch.tanh(x * value)))) * value + y
    ),
    "a weight used by parts beside each other": lambda x, linear, value: linear(x) * value + linear(x.sin()),
    "a weight used three times": lambda x, linear, value: linear(torch.tanh(linear(torch.tanh(linear(x * value))))),
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
    "such a weight beside one used twice": lambda x, linear, value: (
        linear(torch.tanh(linear(x))) * _compiled_scale(value)
    ),
    "a weight that a compiled function computes, used twice": lambda x, linear, value: (
        (scale := _compiled_scale(value)) * linear(torch.tanh(x * scale))
    ),
    "a hook on the output of a matrix": lambda x, linear, value: torch.tanh(_halved_by_a_hook(linear(x))) * value,
    "a hook on a weight used twice": lambda x, linear, value: (
        torch.tanh(linear(x) * (scale := _halved_by_a_hook(value.exp()))) * scale
    ),
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

    (passed_back,), pending = input_gradient([(output, gradient)], [boundary], parameters)
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
        pending.append(input_gradient([(stage(boundary).sum(), None)], [boundary], list(stage.parameters()))[1])
    for half in reversed(pending):
        half()
    assert all(p.grad is b for p, b in zip(stage.parameters(), buffers, strict=True)), "accumulated in place"
    expected = torch.autograd.grad(
        torch.stack([stage(boundary.detach()).sum() for boundary in boundaries]).sum(), list(stage.parameters())
    )
    for buffer, wanted in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer, wanted)


class _CountedProduct(torch.autograd.Function):
    """x * weight. It counts its backwards, in the second of which its tensors are gone."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        _CountedProduct.backwards += 1
        x, weight = ctx.x, ctx.weight
        del ctx.x, ctx.weight
        return gradients[0] * weight, (gradients[0] * x).sum(0)


_product: Callable[[Tensor, Tensor], Tensor] = _CountedProduct.apply


@pytest.mark.parametrize(
    "run",
    [
        lambda x, linear, value: torch.tanh(linear(_product(torch.tanh(linear(x)), torch.ones(4)))),
        lambda x, linear, value: torch.tanh(linear(_product(torch.tanh(x), value))),
        lambda x, linear, value: linear(x) * _product(torch.ones(3, 4), value),
        lambda x, linear, value: _product(linear(_product(x, torch.ones(4))), torch.ones(4)),
        lambda x, linear, value: (
            (scale := value.exp()) * functional.linear(x, _product(linear.weight, scale)) + linear.bias
        ),
    ],
    ids=[
        "between two uses of a weight",
        "with a weight",
        "beside the way to the input",
        "above and below a weight",
        "with a weight, beside the way to the input, above one that is used twice",
    ],
)
def test_a_function_of_python_runs_once(run: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    _CountedProduct.backwards = 0
    stage, boundary = Stage(run), torch.randn(3, 4, requires_grad=True)
    parameters = list(stage.parameters())
    first = torch.autograd.grad(stage(boundary).sum(), [boundary, *parameters], allow_unused=True)
    number = _CountedProduct.backwards

    (passed_back,), weights = input_gradient([(stage(boundary).sum(), None)], [boundary], parameters)
    weights()

    assert _CountedProduct.backwards == 2 * number
    for found, wanted in zip([passed_back, *(each.grad for each in parameters)], first, strict=True):
        assert_equal(found, wanted)


class _Sum(torch.autograd.Function):
    """x + weight, whose gradients are one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]


_sum: Callable[[Tensor, Tensor], Tensor] = _Sum.apply


def test_a_sum_of_gradients_shares_no_memory_with_what_is_passed_back() -> None:
    torch.manual_seed(0)
    linear, value = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))
    passed_back, halves = [], []
    for _ in range(2):
        boundary = torch.randn(3, 4, requires_grad=True)
        output = linear(_sum(boundary, value))
        (gradient,), weights = input_gradient([(output, torch.randn(3, 4))], [boundary], [value, *linear.parameters()])
        assert gradient is not None
        passed_back.append(gradient)
        halves.append(weights)
    first, second = (gradient.clone() for gradient in passed_back)
    for weights in halves:
        weights()
    assert_equal(passed_back[0], first)
    assert_equal(value.grad, first + second)


def assert_equal(found: Tensor | None, wanted: Tensor | None) -> None:
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        torch.testing.assert_close(found, wanted)
