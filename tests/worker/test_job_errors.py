"""Real runs of jobs whose own code fails, on one worker or on all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.storage.checkpoints import complete_checkpoints
from tests.harness import PATIENT, Ended, assert_trained_as_if_nothing_failed, resume_here, train_here
from tests.worker.failures import the_failure

pytestmark = pytest.mark.multiprocess


BROKEN_JOB = """
import os
from functools import partial
import torch
from torch import nn
from chameleon_ft import Job

class Calls:
    made = 0

    @classmethod
    def count(cls, x):
        cls.made += not x.is_meta
        return cls.made

def count(x):  # where the inspection does not look: a layer that keeps a count of its own is refused
    return Calls.count(x)

class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        {backward_trap}
        return gradient

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        {sample_trap}
        return torch.full((4,), index / 64), torch.zeros(4)

class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

class Trap(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(4, 4)

    def forward(self, x):
        calls = count(x)
        {trap}
        return Passing.apply(self.weights(x))

def job():
    return Job(layers={layers}, loss=nn.MSELoss(reduction="sum"), dataset=Data(), optimizer={optimizer})
"""


def broken_job(directory: Path, **traps: str) -> RunConfig:
    path = directory / "broken.py"
    usual = {
        **dict.fromkeys(("trap", "backward_trap", "sample_trap"), "pass"),
        "layers": "[Trap, Trap]",
        "optimizer": "partial(torch.optim.SGD, lr=1e-3)",
    }
    path.write_text(BROKEN_JOB.format(**{**usual, **traps}))
    return RunConfig(
        job=str(path),
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        steps=6,
        batch=Batch(micro_batches=4, micro_batch_size=2),
        timeouts=PATIENT,
    )


def assert_ended_with_checkpoint(ended: Ended) -> None:
    """Check that the run has failed with a checkpoint of the state after all of its steps."""
    assert ended.code == 1
    assert ended.summary["status"] == "failed"
    assert complete_checkpoints(ended.run.checkpoints)[-1] == len(ended.steps) > 0


def test_an_error_that_every_worker_meets_ends_the_run(tmp_path: Path) -> None:
    ended = train_here(broken_job(tmp_path, trap="if calls > 7: raise ValueError('a bug of mine')"), tmp_path / "run")
    assert_ended_with_checkpoint(ended)
    assert re.search(
        rf"ValueError: a bug of mine, at {tmp_path}/broken.py:\d+ in forward, in layer \d \(Trap\)",
        ended.summary["reason"],
    )
    log = ended.summary["reason"].rpartition("; see ")[2].partition(";")[0]
    assert "raise ValueError('a bug of mine')" in Path(log).read_text()


def test_workers_that_read_other_samples_than_were_examined_train_nothing(tmp_path: Path) -> None:
    config = broken_job(tmp_path)
    path = Path(config.job)
    path.write_text(path.read_text().replace("index / 64", "index + float(os.getpid())"))
    ended = train_here(config, tmp_path / "run")
    assert (ended.code, ended.steps) == (1, [])
    assert "`dataset`" in ended.summary["reason"]


def test_a_sample_that_cannot_be_read_ends_the_run(tmp_path: Path) -> None:
    sample = SampleOrder(64, 0).ids(3, 8)[7]
    begun = tmp_path / "run" / "metrics.jsonl"
    trap = f"if index == {sample} and os.path.exists({str(begun)!r}): raise OSError('input/output error')"
    ended = train_here(broken_job(tmp_path, sample_trap=trap), tmp_path / "run")
    assert_ended_with_checkpoint(ended)
    assert ended.steps == [0, 1, 2]
    assert f"reading sample {sample} of micro-batch 3 in step 3" in ended.summary["reason"]
    assert len(ended.lost) <= 1, "it is tried once elsewhere"


def test_without_another_holder_an_error_ends_the_run_and_loses_no_worker(tmp_path: Path) -> None:
    trap = "if Calls.made == 17: raise ValueError('a bug of mine')"  # in the fifth step
    config = broken_job(tmp_path, backward_trap=trap, layers="[Plain, Plain, Trap, Plain]").model_copy(
        update={"workers": 1, "parallel": Parallel(dp=1, pp=1)}
    )
    ended = train_here(config, tmp_path / "run")
    assert_ended_with_checkpoint(ended)
    assert not ended.lost
    assert re.search(
        rf"ValueError: a bug of mine, at {tmp_path}/broken.py:\d+ in backward, in layer 2,", ended.summary["reason"]
    )
    assert resume_here(ended).code == 0, "the call is counted anew"


def test_an_error_of_one_worker_is_its_loss(tmp_path: Path) -> None:
    flag = tmp_path / "taken"
    trap = (
        f"if calls == 8:\n            try: os.close(os.open({str(flag)!r}, os.O_CREAT | os.O_EXCL))\n"
        "            except FileExistsError: pass\n            else: raise ValueError('cosmic ray')"
    )
    ended = train_here(broken_job(tmp_path, trap=trap), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    failure = the_failure(ended)
    assert failure.cause.startswith(f"ValueError: cosmic ray, at {tmp_path}/broken.py:")
    assert failure.noticed_by == "self"


def test_a_sample_that_two_workers_read_differently_ends_the_run(tmp_path: Path) -> None:
    # Late in the order, so that no check before the start reads it, and of the first micro-batch of a step.
    sample = SampleOrder(64, 0).ids_at(16, 1)[0]
    trap = f"if index == {sample}: return torch.full((4,), float(os.getpid())), torch.zeros(4)"
    ended = train_here(broken_job(tmp_path, sample_trap=trap), tmp_path / "run")
    assert_ended_with_checkpoint(ended)
    assert ended.steps == [0, 1]
    assert "step 2" in ended.summary["reason"]
