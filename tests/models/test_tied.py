"""Parameters that layers share: what is built, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import build_layer, tied_bytes
from chameleon_ft.worker import inspection
from tests.golden import refused
from tests.models.jobs import LLAMA, Zeros, make_job


def tied_job(*names: str) -> Job:
    layers: list[Callable[[], nn.Module]] = [
        lambda: nn.Embedding(6, 4),
        lambda: nn.Linear(4, 4),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6)),
    ]
    return make_job(layers, Zeros(3, dtype=torch.int64), tied=[((0, names[0]), (2, names[1]))])


def test_copies_of_a_parameter_begin_alike_and_all_the_rest_as_ever() -> None:
    job = tied_job("weight", "1.weight")
    plain = make_job(job.layers, Zeros(3, dtype=torch.int64))

    built = [build_layer(job, layer, 7) for layer in range(3)]

    assert torch.equal(built[2].get_parameter("1.weight"), built[0].get_parameter("weight"))
    for layer, module in enumerate(built):
        for name, parameter in build_layer(plain, layer, 7).named_parameters():
            if (layer, name) != (2, "1.weight"):
                assert torch.equal(module.get_parameter(name), parameter)


def test_gradients_of_a_tied_parameter_are_counted_once() -> None:
    assert tied_bytes(tied_job("weight", "1.weight")) == {(0, 2): 6 * 4 * 4}
    assert tied_bytes(LLAMA) == {}


@pytest.mark.parametrize("names", [("weight", "2.weight"), ("weight", "1.bias"), ("tokens.weight", "1.weight")])
def test_parameters_that_cannot_be_tied_are_refused_before_a_run(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "load_job", lambda *_: tied_job(*names))
    with refused(ConfigError):
        inspection.inspect_job(RunConfig(job="mine.py"))
