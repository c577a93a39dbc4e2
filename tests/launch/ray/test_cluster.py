"""Runs on a real Ray cluster, whose nodes are on this machine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chameleon_ft.config import Checkpoint, Optimizer, Parallel, Recovery
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import checkpoint_storage
from tests.configs import unhurried, write_config
from tests.harness import Command, Ended, assert_as_the_plain_loop, small_config
from tests.launch.ray.clusters import actors_of, drain, node_that_does_not_see, ray_cluster, wait_until

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.multiprocess

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.toml"


def test_nodes_are_lost_and_join_and_are_drained_and_the_coordinator_is_lost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    ended = Ended(0, run)
    config = small_config(
        tmp_path,
        steps=100_000,
        parallel=Parallel(dp=3, pp=2, optimizer_redundancy="auto"),
        # Updates so small that rounding does not grow in some hundred steps.
        optimizer=Optimizer(lr=2e-4, min_lr=1e-4, warmup_steps=2),
        checkpoint=Checkpoint(),
        recovery=Recovery(worker_mtbf_hours=1e6),
        failures=unhurried(6),
    )
    file = write_config(config, tmp_path)

    with ray_cluster(2, 2, 2) as cluster:  # three nodes with two workers each
        command = ("ray", file, "--address", cluster.address, "--output-dir", run.path)
        with Command(*command, own_interpreter=True) as training:

            def trains_on() -> None:
                """Wait for five more steps."""
                before = len(run.steps())
                wait_until(lambda: len(run.steps()) >= before + 5, training)

            wait_until(run.metrics_file.exists, training)
            trains_on()

            cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.unique_id)[0])
            wait_until(lambda: len(ended.lost) == 2, training)
            trains_on()

            first = run.read_control().pid
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: run.read_control().pid != first, training)
            trains_on()

            added = cluster.add_node(num_cpus=2)
            wait_until(lambda: any(len(record["workers"]) == 2 for record in ended.events("join")), training)
            trains_on()

            drain(cluster, added)
            wait_until(lambda: len(ended.events("drained")) == 2, training)
            trains_on()

            training.signal(signal.SIGTERM)
            assert training.wait() == os.EX_TEMPFAIL, training.printed
        wait_until(lambda: not actors_of(cluster.address))
    assert ended.summary["reason"] == "terminated by SIGTERM, with a checkpoint"
    assert ended.summary["samples_lost"] == ended.summary["samples_repeated"] == 0
    assert ended.steps == list(range(len(ended.steps)))
    assert len(ended.events("took_over")) == 1
    assert max(step.workers for step in ended.run.steps() if step.generation > 2) == 6
    assert ended.run.steps()[-1].workers == 4
    assert len(ended.failures) == 2, "those of the node that was lost"
    assert_as_the_plain_loop(ended, steps=100)


@pytest.fixture(scope="module")
def small_cluster() -> Iterator[Cluster]:
    """A head, and a node with one CPU."""
    with ray_cluster(1) as cluster:
        yield cluster


def test_what_a_cluster_lacks_is_said_and_waited_for_as_told(small_cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ("ray", QUICKSTART, "--address", small_cluster.address, "--workers-per-node", 4, "--output-dir", run)
    with Command(*command, "--wait", 0, own_interpreter=True) as refused:
        assert refused.wait() == 2, refused.printed
    assert "has too few resources for 2 nodes with 4 CPU each: 0 of its 2 nodes have that" in refused.printed
    assert "Traceback" not in refused.printed
    assert not run.exists()
    with Command(*command, own_interpreter=True) as waiting:
        waiting.read_until("waiting up to 300 s for 2 nodes with 4 CPU each")
        waiting.signal(signal.SIGINT)
        assert waiting.wait() == 130, waiting.printed
    assert actors_of(small_cluster.address) == []


def test_a_node_is_examined_and_gets_a_copy_of_a_run_directory_that_it_does_not_see(
    small_cluster: Cluster, tmp_path: Path
) -> None:
    run, hidden, store = RunDirectory(tmp_path / "runs" / "one"), tmp_path / "runs", f"file://{tmp_path}/store"
    hidden.mkdir()
    config = small_config(tmp_path, workers=4, steps=20, parallel=Parallel(dp=2, pp=2), checkpoint=Checkpoint(every=10))
    file = write_config(config, tmp_path)
    flags = ("--workers-per-node", 2, "--cpus-per-worker", "0.5", "--output-dir", run.path)
    command = ("ray", file, "--address", str(small_cluster.address), *flags)
    with node_that_does_not_see(hidden, small_cluster, cpus=1):
        with Command(
            *command, "--preflight.max-clock-error-s", "1e-9", "--store.url", store, own_interpreter=True
        ) as unfit:
            assert unfit.wait() == 1, unfit.printed
        assert "is not admitted: its clock is" in unfit.printed
        shutil.rmtree(run.path)
        with Command(*command, "--store.url", f"{store}-2", own_interpreter=True) as training:
            assert training.wait() == 0, training.printed
    ended = Ended(0, run)
    assert ended.steps == list(range(20))
    assert len(list(run.logs.glob("worker-*.log"))) == 2, "those of the other node are there"
    assert complete_checkpoints(checkpoint_storage(run.config(), run)) == [10, 20]
    assert_as_the_plain_loop(ended)
