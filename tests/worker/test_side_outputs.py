"""Auxiliary losses and metrics of layers count once in each step, however it is computed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from chameleon_ft.config import Parallel, RunConfig
from chameleon_ft.job import Job
from chameleon_ft.verify import PlainLoop
from chameleon_ft.worker.execution import executor
from tests.harness import PATIENT, assert_trained_as_if_nothing_failed, fails, train_here
from tests.worker.interrupted import BATCH, LAYERS, Cluster, plan_of_pairs
from tests.worker.toy import Penalised, Routed, examined, toy_job


def job() -> Job:
    """The job that the run of this file names."""
    return toy_job(LAYERS, kinds=(Routed, Penalised, Routed))


JOB = examined(job(), BATCH.micro_batch_size)


@pytest.fixture(autouse=True)
def _one_computes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads share torch's random numbers, of which every forward sets the key."""
    compute, lock = executor._StepExecution._compute, threading.Lock()

    def alone(self: Any, *arguments: Any) -> Tensor | None:
        with lock:
            return compute(self, *arguments)

    monkeypatch.setattr(executor._StepExecution, "_compute", alone)


def test_they_are_found_before_a_run() -> None:
    routed = ("auxiliary_loss", "positive", "share")
    assert JOB.side_outputs == ((), routed, ("auxiliary_loss",), routed, ())


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_they_count_once_however_a_step_is_computed(split: bool, recompute: bool) -> None:
    """One of the pipelines has a detour; then a worker is lost at some point of the step, and another in its rest."""
    plan = plan_of_pairs(split=split, recompute=recompute)
    cluster = Cluster(plan, tied=False, job=JOB)
    cluster.run()
    cluster.assert_is_the_whole_step()
    for worker in (1, 4):
        for count in range(0, len(cluster.program[worker]) + 1, 3):
            hit = Cluster(plan, tied=False, job=JOB)
            hit.run(stop=(worker, count))
            hit.lose(worker)
            rest = hit.rest()
            if worker == 4:
                hit.run(rest, stop=(0, 2))
                hit.lose(0)
                rest = hit.rest()
            hit.run(rest)
            hit.assert_is_the_whole_step()


@pytest.mark.multiprocess
def test_a_run_records_them_as_the_plain_loop_does_through_a_failure(tmp_path: Path) -> None:
    config = RunConfig(
        job=f"{__file__}:job",
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=BATCH,
        steps=6,
        timeouts=PATIENT,
        failures=(fails(3, step=2, phase="backward"),),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    loop = PlainLoop(config, job())
    for record in ended.run.steps():
        plain = loop.run_step(record.step, job())
        assert record.auxiliary_loss == pytest.approx(plain.auxiliary_loss, rel=1e-5)
        assert plain.auxiliary_loss > 0.1
        assert record.metrics == pytest.approx(plain.metrics, rel=1e-5)
        assert record.metrics.keys() == {"share", "positive"}
