"""Runs on a real Ray cluster, whose nodes are on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chameleon_ft.observe import RunDirectory
from tests.harness import Command, Ended, assert_as_the_plain_loop
from tests.launch.ray.clusters import actors_of, drain, ray_cluster, wait_until

pytestmark = pytest.mark.multiprocess

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.toml"
# Three nodes with two workers each; small enough for two cores, and with updates so small that rounding does not grow
# in some hundred steps.
SMALLER = [
    *("--workers", 6, "--parallel.dp", 3, "--batch.micro-batches", 6, "--steps", 100_000, "--failures", "none"),
    *("--model.dim", 32, "--model.ffn-dim", 64, "--model.seq-len", 32, "--optimizer.lr", 2e-4),
    *("--health.no-detect-slow", "--recovery.worker-mtbf-hours", 1e6, "--timeouts.heartbeat-timeout-s", 10),
    *("--timeouts.watchdog-min-s", 15),
]


def test_nodes_are_lost_and_join_and_are_drained_and_the_coordinator_is_lost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    ended = Ended(0, run)

    with ray_cluster(2, 2, 2) as cluster:
        command = ("ray", QUICKSTART, "--address", cluster.address, "--output-dir", run.path, *SMALLER)
        with Command(*command) as training:

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
        wait_until(lambda: not actors_of(cluster))
    assert ended.summary["reason"] == "terminated by SIGTERM, with a checkpoint"
    assert ended.summary["samples_lost"] == ended.summary["samples_repeated"] == 0
    assert ended.steps == list(range(len(ended.steps)))
    assert len(ended.events("took_over")) == 1
    assert max(step.workers for step in ended.run.steps() if step.generation > 2) == 6
    assert ended.run.steps()[-1].workers == 4
    assert len(ended.failures) == 2, "those of the node that was lost"
    assert_as_the_plain_loop(ended, steps=100)


def test_what_a_cluster_lacks_is_said_and_waited_for_as_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ray_cluster(1) as cluster:
        command = ("ray", QUICKSTART, "--address", cluster.address, "--workers-per-node", 4, "--output-dir", run)
        with Command(*command, "--wait", 0) as refused:
            assert refused.wait() == 2, refused.printed
        assert "has too few resources for 2 nodes with 4 CPU each: 0 of its 2 nodes have that" in refused.printed
        assert "Traceback" not in refused.printed
        assert not run.exists()
        with Command(*command) as waiting:
            waiting.read_until("waiting up to 300 s for 2 nodes with 4 CPU each")
            waiting.signal(signal.SIGINT)
            assert waiting.wait() == 130, waiting.printed
        assert actors_of(cluster) == []
