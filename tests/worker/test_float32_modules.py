"""Modules that stay in float32 where all others are in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.config import RunConfig
from chameleon_ft.job.computation import Precision
from chameleon_ft.models.checks import boundary_specs
from chameleon_ft.models.precision import cast_layer
from tests.golden import message
from tests.models.jobs import Zeros, make_job


class Recording(nn.Linear):
    """A linear layer that notes the types of what comes in and goes out of it."""

    types: list[torch.dtype]

    def forward(self, x: Tensor) -> Tensor:
        self.types = [x.dtype, self.weight.dtype]
        return super().forward(x)


class Router(Recording):
    pass


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.top, self.expert = Router(3, 3), Recording(3, 3), Recording(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.expert(self.top(self.gate(x)))
        return out


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("patterns", [("*Router", "top"), ("*Router", "t*p"), ("gate", "top")], ids=str)
def test_modules_are_left_in_float32_by_class_or_name(patterns: tuple[str, ...], is_first: bool) -> None:
    layer = Experts()
    masters = cast_layer(layer, Precision("bf16", patterns), is_first=is_first)
    output = layer(torch.ones(2, 3, dtype=torch.float32 if is_first else torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert layer.gate.types == layer.top.types == [torch.float32] * 2
    assert layer.expert.types == [torch.bfloat16] * 2
    assert set(masters) == {"expert.weight", "expert.bias"}


def test_fp32_changes_nothing() -> None:
    layer = Experts()
    assert cast_layer(layer, Precision("fp32", ("*",)), is_first=True) == {}
    layer(torch.ones(2, 3))
    assert layer.gate.types == layer.expert.types == [torch.float32] * 2


class Rotary(nn.Module):
    """Has a trained parameter and buffers of its own, which its output is computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.A_log = nn.Linear(4, 4), nn.Parameter(torch.linspace(0.1, 0.9, 4))
        self.register_buffer("inv_freq", 10000.0 ** -torch.linspace(0, 1, 4), persistent=False)
        self.register_buffer("table", torch.linspace(0.1, 0.9, 4), persistent=False)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, -torch.inf, 0.5]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = self.get_buffer("inv_freq") + self.get_buffer("table")
        out: Tensor = self.linear(x) * angles.cos() * self.A_log.exp()
        return out


def test_parameters_and_buffers_are_left_in_float32_by_name() -> None:
    layer, patterns = nn.Sequential(Rotary()), RunConfig().fp32_modules
    masters = cast_layer(layer, Precision("bf16", patterns), is_first=False)
    output = layer(torch.ones(2, 4, dtype=torch.bfloat16))
    output.sum().backward()

    assert set(masters) == {"0.linear.weight", "0.linear.bias"}
    types = {name: each.dtype for name, each in [*layer.named_parameters(), *layer.named_buffers()]}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == {"0.A_log", "0.inv_freq"}
    assert output.dtype == torch.bfloat16
    gradient = layer.get_parameter("0.A_log").grad
    assert gradient is not None
    assert torch.equal(gradient, gradient.to(torch.bfloat16).float())


@pytest.mark.parametrize("more", [(), ("*table",)])
def test_a_buffer_that_is_rounded_is_named_in_a_hint(more: tuple[str, ...]) -> None:
    precision = Precision("bf16", (*RunConfig().fp32_modules, *more))
    hints: list[str] = []
    boundary_specs(make_job([Rotary, Rotary], Zeros(4), precision=precision), 2, hints=hints)
    boundary_specs(make_job([Rotary], Zeros(4)), 2, hints=hints)  # in fp32, which rounds nothing
    assert len(hints) == (0 if more else 1)
    assert all("'table'" in hint for hint in hints)


class Declaring(Experts):
    _keep_in_fp32_modules = ["gate"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = {"scale"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.more = nn.ModuleDict({"scale": nn.Linear(3, 3), "gates": nn.Linear(3, 3)})


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_module_declares_as_transformers_do_is_left_in_float32(wrapped: bool) -> None:
    layer: nn.Module = Declaring()
    layer = nn.Sequential(layer) if wrapped else layer
    cast_layer(layer, Precision("bf16"), is_first=False)
    kept = {name.removeprefix("0.") for name, each in layer.named_parameters() if each.dtype == torch.float32}
    assert kept == {"gate.weight", "gate.bias", "scale", "more.scale.weight", "more.scale.bias"}


class Normed(nn.Module):
    """Has a norm and a router whose classes have names that are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.router(self.norm(x))
        return out


def test_parameters_that_look_sensitive_are_named_in_a_hint() -> None:
    hints: list[str] = []
    for patterns in (RunConfig().fp32_modules, ("norm", "router")):
        precision = Precision("bf16", patterns)
        boundary_specs(make_job([Normed, Normed], Zeros(4), precision=precision), 2, hints=hints)
    boundary_specs(make_job([Normed], Zeros(4)), 2, hints=hints)
    (hint,) = hints
    message(hint)
