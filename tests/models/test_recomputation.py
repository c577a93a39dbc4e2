"""Recomputed parts of a layer: saved tensors, number of runs, and unchanged gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.models.recomputation import recomputable, selective_recomputation
from chameleon_ft.worker.execution.backward import input_gradient
from tests.golden import refused


class Counted:
    """A function that counts its calls and has weak references to its results."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self.made: list[weakref.ref[Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        output = self.function(x)
        self.made.append(weakref.ref(output))
        return output


class Layer(nn.Module):
    """(n, 4) -> (n, 4): a matrix, a recomputable part, another matrix."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.above(recomputable(self.function, self.below(x)))
        return made


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    # Tensors that only the collector frees would stay in memory until a later step.
    gc.disable()
    yield
    gc.enable()


def gradients(layer: nn.Module, *, selective: bool, split: bool = False) -> list[Tensor]:
    """Return the gradients of the input and of all parameters."""
    torch.manual_seed(3)
    x = torch.randn(6, 4, requires_grad=True)
    if selective:
        with selective_recomputation():
            output = layer(x)
    else:
        output = layer(x)
    parameters = list(layer.parameters())
    layer.zero_grad()
    incoming = torch.ones_like(output)
    if split:
        (found,), weight_half = input_gradient([(output, incoming)], [x], parameters)
        weight_half()
    else:
        output.backward(incoming)
        found = x.grad
    assert found is not None
    return [found, *(parameter.grad.clone() for parameter in parameters if parameter.grad is not None)]


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_a_part_is_run_again_once_and_then_freed(split: bool) -> None:
    function = Counted(torch.sigmoid)
    layer = Layer(function)
    kept = gradients(layer, selective=False)
    assert len(function.made) == 1

    found = gradients(layer, selective=True, split=split)

    assert all(map(torch.equal, kept, found))
    assert len(function.made) == 3
    assert [reference() for reference in function.made] == [None] * 3


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_random_numbers_are_the_same_again(split: bool) -> None:
    layer = Layer(lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x).square() * x)

    kept = gradients(layer, selective=False)
    found = gradients(layer, selective=True, split=split)
    after = torch.rand(2)

    assert all(map(torch.equal, kept, found))
    gradients(layer, selective=False)
    assert torch.equal(after, torch.rand(2)), "running a part again moved the generator"


def test_an_output_that_is_changed_in_place_is_kept_as_it_was_when_it_was_saved() -> None:
    class InPlace(Layer):
        def forward(self, x: Tensor) -> Tensor:
            made = recomputable(self.function, self.below(x))
            made.add_(1.0)
            output: Tensor = self.above(made)
            return output

    layer = InPlace(torch.sin)
    assert all(map(torch.equal, gradients(layer, selective=False), gradients(layer, selective=True)))


def test_types_of_autocast_are_the_same_again() -> None:
    class Lower(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    layer = Lower(nn.Linear(4, 4))
    assert all(map(torch.equal, gradients(layer, selective=False), gradients(layer, selective=True)))


def test_a_part_that_does_something_else_the_second_time_is_found_out() -> None:
    calls: list[int] = []

    def changing(x: Tensor) -> Tensor:
        calls.append(0)
        return x.sin() if len(calls) == 1 else x.sin().exp()

    with refused(RuntimeError):
        gradients(Layer(changing), selective=True)
