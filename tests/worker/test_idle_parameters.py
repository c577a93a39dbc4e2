"""Parameters without a gradient in a step, such as those of an expert without tokens: the update leaves them alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.config import Batch, Parallel, Recovery, RunConfig, Snapshots
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.plan import LayerRange
from chameleon_ft.sync import Segment
from chameleon_ft.worker.execution.backward import input_gradient
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.inspection import inspect_job
from tests.golden import refused
from tests.harness import PATIENT, assert_trained_as_if_nothing_failed, fails, train_here

WIDTH = 4
JOB = """
from functools import partial
import torch
from torch import nn
from chameleon_ft import Job

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.never = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rarely = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.always(x)
        for number, rare in enumerate(self.rarely):
            if float(x.detach().abs().sum()) > 11 + number:
                y = y + rare(x)
        return y + x

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 4)

def job():
    return Job(
        layers=[Layer] * 4,
        loss=nn.CrossEntropyLoss(reduction="sum"),
        dataset=Data(),
        optimizer=partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5),
    )
"""


class Gated(nn.Module):
    """Runs one of its two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.takes_other = False

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = (self.other if self.takes_other else self.one)(x)
        return torch.tanh(chosen)


def held_with_buffers() -> tuple[HeldLayers, GradientBuffers]:
    job = Job(
        layers=[Gated, Gated],
        loss=nn.MSELoss(reduction="sum"),
        dataset=[(torch.zeros(WIDTH), torch.zeros(WIDTH))],
        optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    )
    held = HeldLayers(job, [0, 1], seed=0, device=torch.device("cpu"))
    buffers = GradientBuffers(held, (Segment(LayerRange(0, 2), (0,)),))
    buffers.zero()
    return held, buffers


def _whole(held: HeldLayers) -> None:
    output = held.forward(LayerRange(0, 2), torch.ones(1, WIDTH, requires_grad=True), step=0, micro_batch=0)
    output.sum().backward()


def _in_halves(held: HeldLayers) -> None:
    boundary = torch.ones(1, WIDTH, requires_grad=True)
    output = held.forward(LayerRange(0, 2), boundary, step=0, micro_batch=0)
    _, weights = input_gradient([(output.sum(), None)], [boundary], held.parameters(LayerRange(0, 2)))
    weights()


@pytest.mark.parametrize("backward", [_whole, _in_halves])
def test_an_update_leaves_parameters_without_a_gradient_alone(backward: Callable[[HeldLayers], None]) -> None:
    held, buffers = held_with_buffers()
    before = [parameter.detach().clone() for parameter in held.parameters([0])]

    backward(held)
    with buffers.without_idle():
        held.update(0)

    changed = [not torch.equal(*pair) for pair in zip(held.parameters([0]), before, strict=True)]
    assert changed == [True, True, False, False]
    assert all(parameter.grad is not None for parameter in held.parameters([0, 1]))


def test_also_where_a_backward_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a part of the graph runs as a whole only")

    monkeypatch.setattr(torch.autograd, "grad", fail)
    test_an_update_leaves_parameters_without_a_gradient_alone(_in_halves)


def test_the_flags_are_of_the_gradients_that_are_not_protected() -> None:
    held, buffers = held_with_buffers()
    (first,), (second,) = buffers.of_key((0,)), buffers.of_key((1,))
    _whole(held)
    buffers.zero()  # and with it what the backward has told
    with buffers.protecting([(1,)]):
        _whole(held)
    buffers.set_flags()

    assert first[-4:].tolist() == [1, 1, 0, 0]
    assert not second.any()
    _whole(held)
    buffers.set_flags()
    assert first[-4:].tolist() == second[-4:].tolist() == [1, 1, 0, 0]


def test_flags_take_no_call_of_python_in_a_backward() -> None:
    held, _ = held_with_buffers()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in held.parameters([0, 1]))


def test_a_gradient_of_zeros_is_one() -> None:
    held, buffers = held_with_buffers()
    before = [parameter.detach().clone() for parameter in held.parameters([0])]

    output = held.forward(LayerRange(0, 2), torch.ones(1, WIDTH, requires_grad=True), step=0, micro_batch=0)
    (0 * output.sum()).backward()
    with buffers.without_idle():
        held.update(0)

    changed = [not torch.equal(*pair) for pair in zip(held.parameters([0]), before, strict=True)]
    assert changed[0], "its weight decays"
    assert not changed[2]


def test_a_step_begins_without_gradients() -> None:
    held, buffers = held_with_buffers()
    _whole(held)
    buffers.zero()

    with buffers.without_idle():
        assert all(parameter.grad is None for parameter in held.parameters([0, 1]))


def test_the_norm_is_that_of_the_gradients_alone() -> None:
    held, buffers = held_with_buffers()
    _whole(held)

    gradients = [parameter.grad for parameter in held.parameters([0, 1]) if parameter.grad is not None]
    assert buffers.square_sum(0) == pytest.approx(sum(float(gradient.square().sum()) for gradient in gradients))


def test_a_job_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "frozen.py"
    path.write_text(JOB.replace("[Layer] * 4", "[lambda: Layer().requires_grad_(False)] * 4"))

    with refused(ConfigError):
        inspect_job(RunConfig(job=str(path), timeouts=PATIENT))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("split_backward", "precision"), [(False, "fp32"), (True, "fp32"), (False, "bf16")])
def test_a_run_trains_such_parameters_as_the_plain_loop(
    tmp_path: Path, split_backward: bool, precision: Literal["fp32", "bf16"]
) -> None:
    """Also if owners share the optimizer's state, and state moves that some parameters do not have yet."""
    path = tmp_path / "idle.py"
    path.write_text(JOB)
    config = RunConfig(
        job=str(path),
        workers=6,
        parallel=Parallel(dp=3, pp=2, split_backward=split_backward, optimizer_redundancy=2),
        batch=Batch(micro_batches=3, micro_batch_size=2),
        snapshots=Snapshots(every=1),
        recovery=Recovery(policy="repartition"),
        precision=precision,
        steps=12,
        timeouts=PATIENT,
        failures=(fails(2, step=3, phase="backward"), fails(5, step=7, phase="sync")),
    )
    assert_trained_as_if_nothing_failed(train_here(config, tmp_path / "run"))
