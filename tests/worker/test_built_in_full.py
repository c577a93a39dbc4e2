"""Layers that keep what their factory computes from initial weights, restored from a checkpoint and on a newcomer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.config import Batch, Checkpoint, Parallel, Recovery, RunConfig
from chameleon_ft.job.job import Job
from tests.harness import PATIENT, assert_as_the_plain_loop, fails, resume_here, train_here


class Masked(nn.Module):
    """Has a mask and a list that are no part of its state, though its initial weights give them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", self.linear.weight.detach().abs() > 0.1, persistent=False)
        self.scales = [self.linear.weight.detach().abs().mean()]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight * self.get_buffer("mask") / self.scales[0]
        return x + functional.linear(x, weight, self.linear.bias).tanh()


def job() -> Job:
    """The job that the run of this file names."""
    data = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 4)) for i in range(64)]
    return Job(
        layers=[Masked, Masked, Masked, partial(nn.Linear, 8, 4)],
        loss=nn.CrossEntropyLoss(reduction="sum"),
        dataset=data,
        optimizer=partial(torch.optim.AdamW, lr=0.02),
    )


@pytest.mark.multiprocess
def test_they_train_on_as_if_they_had_not_moved(tmp_path: Path) -> None:
    """A resume restores all layers; after the loss, layers move to a worker that has not had them."""
    config = RunConfig(
        job=f"{__file__}:job",
        workers=3,
        parallel=Parallel(dp=1, pp=3),
        batch=Batch(micro_batches=3, micro_batch_size=2),
        steps=4,
        checkpoint=Checkpoint(every=2),
        recovery=Recovery(policy="repartition"),
        timeouts=PATIENT,
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    ended = resume_here(ended, steps=12, failures=(fails(2, step=9),))
    assert ended.code == 0, ended.summary["reason"]
    assert ended.lost == {2}
    assert_as_the_plain_loop(ended)
