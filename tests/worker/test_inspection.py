"""Errors of a job's code that its inspection meets, before any worker is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.host.fork_server import Terminated
from chameleon_ft.worker.inspection import inspect_job, users_errors

JOB = """
import sys
from functools import partial

import torch
from torch import nn

from chameleon_ft import Job


class Data:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        PLACE_data
        return torch.zeros(4), torch.zeros(4)


class Layer(nn.Linear):
    def __init__(self):
        PLACE_factory
        super().__init__(4, 4)

    def forward(self, inputs):
        PLACE_forward
        return super().forward(inputs)


def job():
    PLACE_job
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Job(layers=[Layer] * 2, loss=nn.MSELoss(reduction="sum"), dataset=Data(), optimizer=sgd)
"""


@pytest.mark.parametrize(
    ("place", "function"),
    [("data", "__getitem__"), ("factory", "__init__"), ("forward", "forward"), ("job", "job")],
)
@pytest.mark.parametrize("statement", ['raise ValueError("it is broken")', 'sys.exit("it is broken")'])
def test_an_error_is_told_with_its_line(place: str, function: str, statement: str, tmp_path: Path) -> None:
    source = JOB.replace(f"PLACE_{place}", statement)
    for other in ("data", "factory", "forward", "job"):
        source = source.replace(f"PLACE_{other}", "pass")
    file = tmp_path / f"{place}.py"
    file.write_text(source)
    line = 1 + source.splitlines().index(f"{' ' * (4 if place == 'job' else 8)}{statement}")
    config = RunConfig(job=str(file), workers=2, parallel=Parallel(dp=2, pp=1), batch=Batch(micro_batches=2))
    with pytest.raises(ConfigError) as raised:
        inspect_job(config)
    which = ", reading sample " if place == "data" and "sys" not in statement else ""
    assert f"{file}:{line} in {function}{which}" in str(raised.value)
    assert "it is broken" in str(raised.value)


def test_the_termination_of_the_process_is_no_error_of_the_job() -> None:
    with pytest.raises(Terminated), users_errors(RunConfig(workers=4, parallel=Parallel(dp=2, pp=2))):
        raise Terminated
