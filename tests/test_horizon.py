"""The schedule of the learning rate keeps its horizon when a run resumes with more steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.optim import warmup_cosine
from chameleon_ft.verify.verification import Verification, repeat_run
from tests.harness import resume_here, small_config, train_here
from tests.worker.toy import toy_job

SCHEDULED = f"{__file__}:scheduled_job"


def scheduled_job(config: RunConfig) -> Job:
    """A job whose optimizer is told the number of steps."""
    return toy_job(config.steps)


def test_a_job_gets_the_horizon_as_its_steps() -> None:
    first = RunConfig(job=SCHEDULED, steps=3)
    longer = first.model_copy(update={"steps": 9})
    assert load_job(SCHEDULED, first).num_layers == 3
    assert load_job(SCHEDULED, longer.with_horizon_of(first)).num_layers == 3
    assert load_job(SCHEDULED, longer.model_copy(update={"horizon_steps": 5}).with_horizon_of(first)).num_layers == 5


@pytest.mark.multiprocess
def test_a_run_that_is_resumed_with_more_steps_keeps_its_schedule(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, workers=1, steps=4, parallel=Parallel(dp=1, pp=1), batch=Batch(micro_batches=1, micro_batch_size=2)
    )
    ended = resume_here(train_here(config, tmp_path / "run"), steps=6)
    ended = resume_here(ended, steps=8, horizon_steps=20)
    scheduled = [warmup_cosine(step, peak=1e-3, floor=1e-4, warmup_steps=2, total_steps=4) for step in range(6)]
    moved = [warmup_cosine(step, peak=1e-3, floor=1e-4, warmup_steps=2, total_steps=20) for step in (6, 7)]
    assert [record.lr for record in ended.run.steps()] == pytest.approx([*scheduled, *moved])
    assert ended.run.config().horizon_steps == 20
    assert Verification.of(repeat_run(ended.run), tolerance=1e-5).first_step_outside is None
