"""A real run whose samples are drawn at random, and of which one takes long to read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from chameleon_ft.config import RunConfig, Timeouts
from chameleon_ft.data import SampleOrder, read_sample
from chameleon_ft.events.kinds import Waiting
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.job.reference import load_job
from chameleon_ft.storage.recorder import View
from tests.harness import assert_trained_as_if_nothing_failed, fails, resume_here, train_job
from tests.worker.plainly import losses_of_next_tokens

pytestmark = pytest.mark.multiprocess

SLOW_STEP, STEPS, SAMPLES = 2, 10, 8

JOB = """
import random
import time
from pathlib import Path
import numpy as np
import torch
from chameleon_ft.data import SampleOrder
from tests.worker.plainly import next_tokens

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

def job():
    return next_tokens(Crops())
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
    dataset, order = load_job(config.job, config).dataset, SampleOrder(48, 0)
    return losses_of_next_tokens(
        [
            read_sample(dataset, index, seed=0, epoch=(step * SAMPLES + row) // 48)
            for row, index in enumerate(order.ids(step, SAMPLES))
        ]
        for step in range(steps)
    )


def test_a_slow_read_loses_no_worker_and_a_sample_is_one_draw(tmp_path: Path) -> None:
    started, told, file = tmp_path / "started", tmp_path / "told", tmp_path / "crops.py"
    file.write_text(JOB.format(started=str(started), told=str(told), slow_step=SLOW_STEP, samples=SAMPLES))
    ended = train_job(
        file,
        tmp_path / "run",
        view=Telling(begun=started, told=told),
        steps=STEPS - 2,
        # A read is told after ten seconds, which would be a hang of an operation, and of messages.
        timeouts=Timeouts(heartbeat_timeout_s=5.0, watchdog_min_s=6.0, watchdog_factor=500.0, collective_timeout_s=9.0),
        failures=(fails(3, step=5, phase="backward"),),
    )
    assert ended.lost == {3}, "by its own failure"
    assert {event["since_s"] for event in ended.events("waiting")} == {10.0}
    records = {record.step: record for record in ended.run.steps()}
    assert 10.0 < records[SLOW_STEP].data_wait_s <= records[SLOW_STEP].step_s
    assert all(record.data_wait_s > 0 for record in records.values())
    ended = resume_here(ended, steps=STEPS)
    assert_trained_as_if_nothing_failed(ended)
    losses = [json.loads(line)["loss"] for line in ended.run.metrics_file.read_text().splitlines()]
    assert losses == pytest.approx(plain_losses(ended.run.config(), steps=STEPS), rel=1e-5)
