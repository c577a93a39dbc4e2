"""Modules that stay in float32 where all others are in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.job import Precision
from chameleon_ft.models.precision import cast_layer


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
