"""Loss terms are numbers: weights, none in a micro-batch, none in a step; beside a plain loop and through failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.job.job import Job
from chameleon_ft.keys import init_key
from chameleon_ft.verify.verification import Verification, repeat_run
from tests.harness import PATIENT, TOLERANCE, fails, train_here

SAMPLES, STEPS, BATCH = 108, 9, Batch(micro_batches=6, micro_batch_size=2)
LAYERS: list[Callable[[], nn.Module]] = [
    partial(nn.Linear, 6, 6),
    nn.Tanh,
    partial(nn.Linear, 6, 6),
    nn.Tanh,
    partial(nn.Linear, 6, 4),
]
EMPTY_STEPS, EMPTY_MICRO_BATCH = (5, 6), (3, 1)


def ids_of(step: int, micro_batch: int) -> list[int]:
    """Return the samples of a micro-batch."""
    first = micro_batch * BATCH.micro_batch_size
    return list(map(int, SampleOrder(SAMPLES, 0).ids(step, BATCH.samples)[first : first + BATCH.micro_batch_size]))


class Weighted:
    """Samples with a weight beside the class; some weigh nothing."""

    def __init__(self) -> None:
        places = [EMPTY_MICRO_BATCH, *((step, each) for step in EMPTY_STEPS for each in range(BATCH.micro_batches))]
        self.empty = {index for place in places for index in ids_of(*place)}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        weight = 0.0 if index in self.empty else 0.25 + float(torch.rand((), generator=generator))
        return torch.randn(6, generator=generator), torch.tensor([float(index % 4), weight])


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the weighted sum by way of the weighted mean, which is not a number without weights."""
    each = functional.cross_entropy(output, targets[:, 0].long(), reduction="none")
    return (each * targets[:, 1]).sum() / targets[:, 1].sum() * targets[:, 1].sum()


def job() -> Job:
    """The job that the run of this file names."""
    return Job(
        layers=LAYERS,
        loss=loss,
        loss_terms=lambda targets: targets[:, 1].sum(),
        dataset=Weighted(),
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        clip_norm=1.0,
    )


def losses_of_a_plain_loop() -> list[float]:
    """Train on all samples of a step at once; not a number for a step without terms."""
    layers = []
    for number, factory in enumerate(LAYERS):
        torch.manual_seed(init_key(0, number))
        layers.append(factory())
    model, data = nn.Sequential(*layers), Weighted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        ids = [index for each in range(BATCH.micro_batches) for index in ids_of(step, each)]
        inputs, targets = (torch.stack(parts) for parts in zip(*(data[index] for index in ids), strict=True))
        if not targets[:, 1].any():
            losses.append(math.nan)
            continue
        each = functional.cross_entropy(model(inputs), targets[:, 0].long(), reduction="none")
        mean = (each * targets[:, 1]).sum() / targets[:, 1].sum()
        optimizer.zero_grad()
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean.item())
    return losses


@pytest.mark.multiprocess
def test_weights_and_missing_terms_are_those_of_a_plain_loop_through_failures(tmp_path: Path) -> None:
    """A failure in the step with a micro-batch without terms, and one in a step without any."""
    config = RunConfig(
        job=f"{__file__}:job",
        workers=6,
        parallel=Parallel(dp=3, pp=2, optimizer_redundancy="all"),
        batch=BATCH,
        steps=STEPS,
        timeouts=PATIENT,
        failures=(fails(3, step=EMPTY_MICRO_BATCH[0], phase="backward"), fails(1, step=6, phase="backward")),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    assert ended.lost == {1, 3}
    records = ended.run.steps()
    assert [record.loss for record in records] == pytest.approx(losses_of_a_plain_loop(), rel=1e-6, nan_ok=True)
    assert [record.step for record in records if record.is_skipped] == list(EMPTY_STEPS)
    assert [event["step"] for event in ended.events("empty_step")] == list(EMPTY_STEPS)
    assert not ended.events("bad_step")
    assert ended.summary["samples_skipped"] == 2 * BATCH.samples
    weights = sum(float(Weighted()[index][1][1]) for each in range(BATCH.micro_batches) for index in ids_of(0, each))
    assert records[0].tokens == pytest.approx(weights, rel=1e-6)
    verification = Verification.of(repeat_run(ended.run), tolerance=TOLERANCE)
    assert (verification.steps, verification.first_step_outside) == (STEPS - 2, None)
