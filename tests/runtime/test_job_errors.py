"""Real runs of jobs whose own code fails, on one worker or on all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Health, Parallel, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import complete_checkpoints
from tests.harness import PATIENT, assert_trained_as_if_nothing_failed, train_here
from tests.runtime.failures import the_failure

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

class Trap(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(4, 4)

    def forward(self, x):
        calls = count(x)
        {trap}
        return self.weights(x)

def job():
    data = [(torch.full((4,), i / 64), torch.zeros(4)) for i in range(64)]
    return Job(layers=[Trap, Trap], loss=nn.MSELoss(reduction="sum"), dataset=data, optimizer={optimizer})
"""


def broken_job(
    directory: Path, *, trap: str = "pass", optimizer: str = "partial(torch.optim.SGD, lr=1e-3)"
) -> RunConfig:
    path = directory / "broken.py"
    path.write_text(BROKEN_JOB.format(trap=trap, optimizer=optimizer))
    return RunConfig(
        job=str(path),
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        steps=6,
        batch=Batch(micro_batches=4, micro_batch_size=2),
        timeouts=PATIENT,
    )


def test_an_error_that_every_worker_meets_ends_the_run(tmp_path: Path) -> None:
    ended = train_here(broken_job(tmp_path, trap="if calls > 7: raise ValueError('a bug of mine')"), tmp_path / "run")
    assert ended.code == 1
    assert re.search(
        rf"ValueError: a bug of mine, at {tmp_path}/broken.py:\d+ in forward; see",
        ended.summary["reason"],
    )
    log = ended.summary["reason"].rpartition("; see ")[2]
    assert "raise ValueError('a bug of mine')" in Path(log).read_text()


def test_an_error_in_the_first_step_ends_the_run(tmp_path: Path) -> None:
    trap = "if calls > 2: raise ValueError('the third time')"  # the first two times are before training
    config = broken_job(tmp_path, trap=trap).model_copy(update={"batch": Batch(micro_batches=8, micro_batch_size=2)})
    ended = train_here(config, tmp_path / "run")
    assert (ended.code, ended.steps) == (1, [])
    assert "failed in step 0: ValueError: the third time" in ended.summary["reason"]


def test_workers_that_read_other_samples_than_were_examined_train_nothing(tmp_path: Path) -> None:
    config = broken_job(tmp_path)
    path = Path(config.job)
    path.write_text(path.read_text().replace("i / 64", "i + float(os.getpid())"))
    ended = train_here(config, tmp_path / "run")
    assert (ended.code, ended.steps) == (1, [])
    assert "`dataset`" in ended.summary["reason"]


def test_a_layer_that_cannot_be_run_at_all_is_named_before_a_worker_starts(tmp_path: Path) -> None:
    config = broken_job(tmp_path, trap="if calls: raise ValueError('always')")
    with pytest.raises(ConfigError, match=r"layer 0 \(Trap\) cannot be run on .* \(ValueError: always\)"):
        train_here(config, tmp_path / "run")


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


def test_a_loss_that_is_no_number_ends_the_run_if_so_configured(tmp_path: Path) -> None:
    config = broken_job(tmp_path, optimizer="partial(torch.optim.SGD, lr=1e18)")
    stopping = config.model_copy(update={"health": Health(detect_slow=False, on_bad_step="stop")})
    ended = train_here(stopping, tmp_path / "run")
    assert ended.code == 1
    assert "also when it was computed again, first in the forward of micro-batch" in ended.summary["reason"]
    assert complete_checkpoints(ended.run.checkpoints)
