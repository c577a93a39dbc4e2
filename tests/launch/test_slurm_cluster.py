"""Runs in a real Slurm: nodes are drained and lost, and jobs are requeued and resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from chameleon_ft.config import Batch, Checkpoint, Parallel, TrainConfig, config_to_toml
from chameleon_ft.launch.slurm import BatchScript, Machines, with_reachable_host
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import PATIENT, Ended, assert_as_the_plain_loop, small_config
from tests.slurm_cluster import SlurmCluster, skip_without_slurm
from tests.stored import event_lines

# Jobs start twice in a test, and it takes a while until Slurm gives up a node.
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(390)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    skip_without_slurm()
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3) as started:
        yield started


MINUTES = 60  # that a job may take
CHECKPOINT_S = 100  # before its time limit


def configured(directory: Path, *, nodes: int) -> TrainConfig:
    """Return a run that goes on until it is ended, and soon gives up a node that is lost."""
    return small_config(
        directory,
        workers=nodes,
        steps=1_000_000,
        parallel=Parallel(dp=nodes, pp=1),
        batch=Batch(micro_batches=6, micro_batch_size=2),
        checkpoint=Checkpoint(every=20),
        timeouts=PATIENT.model_copy(update={"reconnect_s": 10.0}),
        failures=unhurried(nodes),
    )


class Submitted:
    """A run with a worker on each node, in a job that takes an hour at most."""

    def __init__(self, cluster: SlurmCluster, run: RunDirectory, job: str) -> None:
        self._cluster = cluster
        self.run = run
        self.job = job

    @classmethod
    def by_command(cls, cluster: SlurmCluster, directory: Path, *, nodes: int) -> Self:
        """Submit it as a user does."""
        file = write_config(configured(directory, nodes=nodes), directory)
        run = RunDirectory(directory / "run")
        options = ("--workers-per-node", 1, "--time", MINUTES, "--checkpoint-s", CHECKPOINT_S)
        printed = cluster.command("chameleon", "slurm", file, "--output-dir", run.path, *options)
        return cls(cluster, run, printed.split()[1])

    @classmethod
    def with_short_polls(cls, cluster: SlurmCluster, directory: Path, *, nodes: int) -> Self:
        """Submit the same script, which looks at the nodes more often."""
        run = RunDirectory(directory / "run")
        config = with_reachable_host(configured(directory, nodes=nodes), chooser="Slurm")
        script = BatchScript(
            config=config,
            run=run.path,
            machines=Machines.for_run(config, nodes=nodes, workers_per_node=1),
            python=sys.executable,
            time_limit=str(MINUTES),
            checkpoint_s=CHECKPOINT_S,
            poll_s=2.0,
        )
        script.config_file.write_text(config_to_toml(config))
        script.file.write_text(script.text())
        return cls(cluster, run, cluster.command("sbatch", "--parsable", script.file))

    @property
    def state(self) -> str:
        return self._cluster.show(self.job, "JobState")

    @property
    def batch_host(self) -> str:
        return self._cluster.show(self.job, "BatchHost")

    @property
    def nodes(self) -> list[str]:
        return self._cluster.command("scontrol", "show", "hostnames", self._cluster.show(self.job, "NodeList")).split()

    @property
    def log(self) -> str:
        file = self.run.path.with_name(f"{self.run.path.name}-{self.job}.log")
        return file.read_text() if file.exists() else ""

    @property
    def restarts(self) -> int:
        return int(self._cluster.show(self.job, "Restarts"))

    def last_step(self) -> int:
        return max((record.step for record in self.run.steps()), default=-1) if self.run.metrics_file.exists() else -1

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait while the job is there."""

        def holds() -> object:
            assert self.state in {"PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING", "NODE_FAIL"}, self.log
            return condition()

        self._cluster.wait_until(holds)

    def trains(self, *, steps: int = 5) -> None:
        """Wait for some more steps."""
        before = self.last_step()
        self.wait_until(lambda: self.last_step() >= before + steps)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in event_lines(self.run) if event["event"] == name]

    def cancel(self) -> Ended:
        """Cancel the job, which ends the run with a checkpoint."""
        self._cluster.command("scancel", self.job)
        self._cluster.wait_until(lambda: self.state == "CANCELLED")
        self._cluster.wait_until(self.run.summary_file.exists)
        return Ended(75, self.run)


def test_nodes_that_are_drained_or_lost_leave_the_run(cluster: SlurmCluster, tmp_path: Path) -> None:
    submitted = Submitted.with_short_polls(cluster, tmp_path, nodes=3)
    submitted.trains()
    first, second, third = submitted.nodes
    assert submitted.batch_host == first
    cluster.command("scontrol", "update", f"NodeName={third}", "State=DRAIN", "Reason=service")
    submitted.wait_until(lambda: cluster.state_of(third) == "drained")
    assert submitted.nodes == [first, second]
    assert [third in event["host"] for event in submitted.events("host_drained")] == [True]
    assert submitted.run.failures() == [], "no worker was lost"
    submitted.trains()
    cluster.kill_node(second)
    submitted.wait_until(submitted.run.failures)
    submitted.trains()
    submitted.wait_until(lambda: cluster.state_of(second) == "down")
    submitted.trains()
    ended = submitted.cancel()
    assert ended.summary["status"] == "terminated"
    assert ended.summary["samples_lost"] == 0
    assert ended.steps == list(range(len(ended.steps)))
    assert len(ended.lost) == 1
    assert_as_the_plain_loop(ended, steps=30)
    assert submitted.state == "CANCELLED", "it is not requeued"
    cluster.command("scontrol", "update", f"NodeName={third}", "State=RESUME")
    cluster.start_node(second)
    cluster.wait_until(lambda: all(cluster.state_of(node) == "idle" for node in cluster.nodes))


def test_the_time_limit_and_the_loss_of_the_coordinators_node_requeue_the_job_which_resumes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    submitted = Submitted.by_command(cluster, tmp_path, nodes=2)
    submitted.trains()
    cluster.command("scontrol", "update", f"JobId={submitted.job}", "TimeLimit=2")  # minutes
    submitted.wait_until(lambda: submitted.restarts == 1)
    cluster.command("scontrol", "update", f"JobId={submitted.job}", f"TimeLimit={MINUTES}")
    assert json.loads(submitted.run.summary_file.read_text())["status"] == "terminated"
    submitted.trains()
    assert len(submitted.events("started")) == 2
    steps = [record.step for record in submitted.run.steps()]
    assert steps == list(range(len(steps))), "no step is repeated"
    lost = submitted.batch_host
    cluster.kill_node(lost)
    submitted.wait_until(lambda: submitted.restarts == 2)
    submitted.wait_until(lambda: len(submitted.events("started")) == 3)
    submitted.trains()
    assert submitted.batch_host != lost
    assert_as_the_plain_loop(submitted.cancel(), steps=30)
    cluster.start_node(lost)
