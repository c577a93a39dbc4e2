"""Runs as jobs of a Ray cluster whose autoscaler adds nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chameleon_ft.config import Checkpoint, Optimizer, Parallel
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import Ended, assert_as_the_plain_loop, small_config
from tests.launch.ray.clusters import actors_of, wait_until
from tests.launch.ray.heads import autoscaled_head

pytestmark = pytest.mark.multiprocess


def test_a_job_gets_nodes_and_takes_in_more_and_is_stopped_and_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    ended = Ended(0, run)
    config = small_config(
        tmp_path,
        workers=2,
        steps=100_000,
        parallel=Parallel(dp=1, pp=2),
        checkpoint=Checkpoint(every=100_000),
        optimizer=Optimizer(lr=1e-3, min_lr=1e-3, warmup_steps=2),  # does not depend on the number of steps
        failures=unhurried(2),
    )
    command: list[str | Path] = ["--", sys.executable, "-m", "chameleon_ft", "ray", write_config(config, tmp_path)]
    command += ["--output-dir", run.path, "--workers-per-node", "2", "--resume", "auto"]
    with autoscaled_head(cpus=2, most=2) as head:
        job = head.submit(*command)
        wait_until(run.metrics_file.exists, job)
        assert "waiting up to 300 s for 1 node with 2 CPU each" in job.rest()
        head.request({"CPU": 2}, {"CPU": 2})
        wait_until(lambda: len(ended.events("joined")) == 2, job)

        stopped = head.job("stop", job.id)
        assert "was stopped" in stopped.stdout, stopped.stdout
        wait_until(lambda: run.summary_file.exists() and not actors_of(head.address))
        assert ended.summary["reason"] == "terminated by SIGTERM, with a checkpoint"

        steps = len(ended.steps) + 5
        again = head.job("submit", *command, "--steps", str(steps))
        assert again.returncode == 0, again.stdout
        assert "succeeded" in again.stdout
        assert actors_of(head.address) == []
    assert ended.steps == list(range(steps))
    assert_as_the_plain_loop(ended, steps=60)
