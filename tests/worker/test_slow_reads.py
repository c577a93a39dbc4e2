"""A real run whose samples are drawn at random, and of which one takes long to read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from chameleon_ft.config import Batch, Parallel, RunConfig, Timeouts
from chameleon_ft.data import SampleOrder, read_sample
from chameleon_ft.events.kinds import Waiting
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.job import load_job
from chameleon_ft.models.build import build_layer
from chameleon_ft.storage.recorder import View
from tests.harness import assert_trained_as_if_nothing_failed, fails, resume_here, train_here

pytestmark = pytest.mark.multiprocess

SLOW_STEP, STEPS, SAMPLES = 2, 10, 8

JOB = """
import random
import time
from functools import partial
from pathlib import Path
import numpy as np
import torch
from torch import nn
from chameleon_ft import Job
from chameleon_ft.data import SampleOrder

SLOW = SampleOrder(48, 0).ids({slow_step}, {samples})[5]

class Crops:
    def __len__(self):
        return 48

    def __getitem__(self, index):
        while index == SLOW and Path({started!r}).exists() and not Path({told!r}).exists():
            time.sleep(0.02)
        start = random.randrange(100) + int(np.random.randint(100)) + int(torch.randint(100, ()))
        tokens = (start + torch.arange(9)) % 16
        return tokens[:-1], tokens[1:]

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

def job():
    layers = [partial(nn.Embedding, 16, 8), partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 16)]
    sgd = partial(torch.optim.SGD, lr=0.5)
    return Job(layers=layers, loss=loss, loss_terms=lambda targets: targets.numel(), dataset=Crops(), optimizer=sgd)
"""


@dataclass(kw_only=True)
class Telling(View):
    """Lets the read end once it has been told."""

    begun: Path
    told: Path

    def show(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.begun.touch()
        elif isinstance(record, Waiting):
            self.told.touch()


def plain_losses(config: RunConfig, *, steps: int) -> list[float]:
    """Return the losses of torch's own loop over the same samples."""
    job = load_job(config.job, config)
    model = torch.nn.Sequential(*(build_layer(job, layer, 0) for layer in range(job.num_layers)))
    optimizer, order, losses = job.optimizer(list(model.parameters())), SampleOrder(48, 0), []
    for step in range(steps):
        positions = range(step * SAMPLES, (step + 1) * SAMPLES)
        read = [
            read_sample(job.dataset, index, seed=0, epoch=position // 48)
            for position, index in zip(positions, order.ids(step, SAMPLES), strict=True)
        ]
        inputs, targets = (torch.stack(each) for each in zip(*read, strict=True))
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_slow_read_loses_no_worker_and_a_sample_is_one_draw(tmp_path: Path) -> None:
    started, told, file = tmp_path / "started", tmp_path / "told", tmp_path / "crops.py"
    file.write_text(JOB.format(started=str(started), told=str(told), slow_step=SLOW_STEP, samples=SAMPLES))
    config = RunConfig(
        job=str(file),
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        steps=STEPS - 2,
        batch=Batch(micro_batches=4, micro_batch_size=2),
        # A read is told after ten seconds, which would be a hang of an operation, and of messages.
        timeouts=Timeouts(heartbeat_timeout_s=5.0, watchdog_min_s=6.0, watchdog_factor=500.0, collective_timeout_s=9.0),
        failures=(fails(3, step=5, phase="backward"),),
    )
    ended = train_here(config, tmp_path / "run", view=Telling(begun=started, told=told))
    assert ended.lost == {3}, "by its own failure"
    assert {event["since_s"] for event in ended.events("waiting")} == {10.0}
    records = {record.step: record for record in ended.run.steps()}
    assert 10.0 < records[SLOW_STEP].data_wait_s <= records[SLOW_STEP].step_s
    assert all(record.data_wait_s > 0 for record in records.values())
    ended = resume_here(ended, steps=STEPS)
    assert_trained_as_if_nothing_failed(ended)
    losses = [json.loads(line)["loss"] for line in ended.run.metrics_file.read_text().splitlines()]
    assert losses == pytest.approx(plain_losses(config, steps=STEPS), rel=1e-5)
