"""Jobs whose layers return something else than their neighbours expect: trained rightly or refused, never wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chameleon_ft.config import Parallel, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.sync import gradient_segments
from chameleon_ft.trees import BoundarySpec
from chameleon_ft.worker.inspection import inspect_job
from tests.golden import refused
from tests.harness import PATIENT, assert_trained_as_if_nothing_failed, train_here
from tests.worker.interrupted import LAYERS, Worker
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import toy_job

JOB = """
from functools import partial
import torch
from torch import nn
from chameleon_ft import Job
from chameleon_ft.trees import BoundarySpec

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        {forward}

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full(({width},), index / 64 + 0.5), torch.zeros(4)

def loss(output, target):
    return nn.functional.mse_loss(output.float(), target, reduction="sum")

def job():
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    return Job(layers=[Layer, Layer, Layer], loss=loss, dataset=Data(), optimizer=optimizer, boundaries={stated})
"""
AUTOCAST = """
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)"""
FLOAT32 = "lambda size: [BoundarySpec((size, 4), torch.float32)] * 3"


def config_of(directory: Path, *, forward: str, stated: str = "None", width: str = "4", pp: int = 3) -> RunConfig:
    path = directory / "boundaries.py"
    path.write_text(JOB.format(forward=forward, stated=stated, width=width))
    # The job names the device, too.
    return RunConfig(job=str(path), device="cpu", workers=pp, parallel=Parallel(dp=1, pp=pp), steps=4, timeouts=PATIENT)


@pytest.mark.multiprocess
def test_an_autocast_region_trains_as_in_the_plain_loop(tmp_path: Path) -> None:
    assert_trained_as_if_nothing_failed(train_here(config_of(tmp_path, forward=AUTOCAST), tmp_path / "run"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("pp", [1, 3])
def test_another_type_than_stated_is_refused_before_a_step_is_committed(tmp_path: Path, pp: int) -> None:
    """With one stage nothing is sent, but after a loss it might be."""
    ended = train_here(config_of(tmp_path, forward=AUTOCAST, stated=FLOAT32, pp=pp), tmp_path / "run")

    assert (ended.code, ended.steps) == (1, [])
    reason = ended.summary["reason"]
    assert "worker 0 failed in step 0: ConfigError: the output of layer 0 is bfloat16 of shape (2, 4)" in reason
    assert "float32 of shape (2, 4) is expected" in reason
    assert ".to(torch.float32)" in reason


def test_what_the_meta_device_shows_does_not_count(tmp_path: Path) -> None:
    forward = "return self.inner(x.float()).to(torch.float32 if x.is_meta else torch.float16)"
    job = inspect_job(config_of(tmp_path, forward=forward))

    assert {leaf.dtype for boundary in job.layers.boundaries for leaf in boundary.leaves} == {"float16"}
    assert job.boundary_bytes == (2 * 4 * 2,) * 3


@pytest.mark.multiprocess
def test_a_type_that_differs_on_the_meta_device_is_trained(tmp_path: Path) -> None:
    forward = "return self.inner(x.float()).to(torch.float32 if x.is_meta else torch.bfloat16)"
    assert_trained_as_if_nothing_failed(train_here(config_of(tmp_path, forward=forward), tmp_path / "run"))


@pytest.mark.multiprocess
def test_a_shape_that_varies_between_micro_batches_is_refused(tmp_path: Path) -> None:
    """By every worker on which the micro-batch is run: no innocent one is lost for good."""
    forward = "return self.inner(x).repeat(1, 1 + int(bool((x > 1.45).any())))[:, :8]"
    ended = train_here(config_of(tmp_path, forward=forward), tmp_path / "run")

    assert ended.code == 1
    reason = ended.summary["reason"]
    assert "the output of layer 0 is float32 of shape (2, 8), but float32 of shape (2, 4) is expected" in reason
    assert "one shape and type for every micro-batch" in reason
    assert "pad" in reason


@pytest.mark.multiprocess
def test_samples_whose_shape_varies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of shape \(\d+,\) in sample \d+, .* padding"):
        train_here(config_of(tmp_path, forward="return self.inner(x)", width="4 + index"), tmp_path / "run")


@pytest.mark.parametrize(
    ("tensor", "gradient", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.float64), False, r"^the output of layer 3 is float64 of shape \(2, 4\)"),
        (torch.zeros(2, 5), True, r"^the gradient of the output of layer 3 is float32 of shape \(2, 5\)"),
    ],
)
def test_the_layer_and_both_kinds_are_named(tensor: torch.Tensor, gradient: bool, message: str) -> None:
    spec = BoundarySpec((2, 4), torch.float32)
    spec.require(torch.zeros(2, 4), layer=3)

    with refused(ConfigError):
        spec.require(tensor, layer=3, gradient=gradient)


def test_what_does_not_fit_the_buffer_of_its_receiver_is_not_sent() -> None:
    """Not even if the outputs of the layers themselves are not checked, as here."""
    low, high = LayerRange(0, 2), LayerRange(2, LAYERS)
    route = Route(0, (Hop(0, low), Hop(1, high)))
    plan = Plan(Placement(LAYERS, {0: (low,), 1: (high,)}), (route,))
    worker, board = Worker(0, toy_job(LAYERS), plan, gradient_segments(plan.placement)), Switchboard()
    executor = worker.executor(Line(0, board))
    doubles = [BoundarySpec(each.leaves[0].shape, torch.float64) for each in executor.rank.boundaries]
    with refused(ConfigError):
        replace(executor, rank=replace(executor.rank, boundaries=doubles)).run(
            worker.state, [Operation.of(OperationKind.FORWARD, route, 0)], after=lambda _: None
        )
    assert not board.messages
