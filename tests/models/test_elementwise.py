"""Which optimizers workers may divide between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chameleon_ft.config import Parallel, RunConfig
from chameleon_ft.job.job import Job, ModelParameters
from chameleon_ft.models.optimizer import state_bytes, undivided_optimizer
from chameleon_ft.optim import adamw, combined
from chameleon_ft.worker.inspection import inspect_job

OWN_JOB = """
from functools import partial
import torch
from torch import nn
from chameleon_ft import Job

class Mine(torch.optim.SGD):
    pass

def job():
    data = [(torch.zeros(4), torch.zeros(4))] * 8
    layers = [partial(nn.Linear, 4, 4)] * 2
    return Job(layers=layers, loss=nn.MSELoss(), dataset=data, optimizer=partial({optimizer}, lr=0.1){more})
"""


class Mine(torch.optim.AdamW):
    """It might do anything."""


def job(optimizer: Callable[[Any], torch.optim.Optimizer], elementwise: bool | None = None) -> Job:
    data = [(torch.zeros(4), torch.zeros(4))]
    return Job(
        layers=[partial(nn.Linear, 4, 4, bias=False)],
        loss=nn.MSELoss(),
        dataset=data,
        optimizer=optimizer,
        elementwise=elementwise,
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (partial(adamw, lr=0.1, weight_decay=0.1), ""),
        (torch.optim.Adam, ""),
        (partial(torch.optim.SGD, momentum=0.9), ""),
        (torch.optim.LBFGS, "LBFGS"),
        (torch.optim.Adafactor, "Adafactor"),
        (partial(torch.optim.Muon, lr=0.1), "Muon"),
        (Mine, "Mine"),
        (lambda own: combined(own, {"0.*": torch.optim.Muon}), "Muon"),
        (lambda own: combined(own, {"0.*": torch.optim.SGD}), ""),
    ],
)
def test_only_what_is_known_to_be_elementwise_is_divided(
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], expected: str
) -> None:
    assert undivided_optimizer(job(optimizer)) == expected


def test_the_state_of_several_optimizers_is_counted_if_one_cannot_make_an_update_without_values() -> None:
    def of_both(own: ModelParameters) -> torch.optim.Optimizer:
        return combined(own, {"0.*": torch.optim.Adafactor, "*": partial(torch.optim.SGD, lr=0.1, momentum=0.9)})

    # Layers of one factory are measured once, so the factories differ.
    both = replace(job(of_both), layers=[partial(nn.Linear, 4, 4, bias=False) for _ in range(2)])
    weight, vector, step = 4 * 4 * 4, 4 * 4, 4
    assert state_bytes(both) == (weight + 2 * vector + step, 2 * weight)


def test_the_job_knows_best() -> None:
    assert undivided_optimizer(job(Mine, elementwise=True)) == ""
    assert undivided_optimizer(job(torch.optim.SGD, elementwise=False)) == "SGD"


def config_of(directory: Path, parallel: Parallel, *, optimizer: str = "Mine", more: str = "") -> RunConfig:
    path = directory / "job.py"
    path.write_text(OWN_JOB.format(optimizer=optimizer, more=more))
    return RunConfig(job=str(path), parallel=parallel)


def test_a_run_that_may_choose_keeps_such_an_optimizer_whole(tmp_path: Path) -> None:
    config = config_of(tmp_path, Parallel(optimizer_redundancy="auto"))
    info = inspect_job(config)
    assert (config.parallel.owners, info.undivided, info.settled(config).parallel.owners) == (2, "Mine", None)


def test_a_run_that_is_told_to_divides_it_by_whole_parameters(tmp_path: Path) -> None:
    config = config_of(tmp_path, Parallel(optimizer_redundancy=2))
    assert inspect_job(config).settled(config).parallel.owners == 2


def test_what_the_job_declares_is_divided(tmp_path: Path) -> None:
    config = config_of(tmp_path, Parallel(optimizer_redundancy=3), more=", elementwise=True")
    assert inspect_job(config).settled(config).parallel.owners == 3


def test_all_is_all(tmp_path: Path) -> None:
    config = config_of(tmp_path, Parallel(optimizer_redundancy="all"), optimizer="torch.optim.SGD")
    assert inspect_job(config).settled(config).parallel.owners is None
