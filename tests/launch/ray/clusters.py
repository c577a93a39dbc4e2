"""Ray clusters on this machine: several raylets at one address, without dashboard and without reports of usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.harness import Command

if TYPE_CHECKING:
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

__all__ = ["actors_of", "drain", "ray_cluster", "wait_until"]

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
_SYSTEM = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
_NAMED = (
    "import json, sys, ray; ray.init(sys.argv[1], logging_level='error', log_to_driver=False); "
    "print(json.dumps([each['name'] for each in ray.util.list_named_actors(all_namespaces=True)]))"
)


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Cluster]:
    """Yield a cluster of a head, where a driver runs and no worker, and a node for each number of CPUs."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": _SYSTEM},
        shutdown_at_exit=False,
    )
    try:
        for number in cpus:
            cluster.add_node(num_cpus=number)
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def actors_of(cluster: Cluster) -> list[str]:
    """Return the names of the actors of a cluster."""
    done = subprocess.run([sys.executable, "-c", _NAMED, cluster.address], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def drain(cluster: Cluster, node: Node) -> None:
    """Announce that a node will leave the cluster, in an hour."""
    flags = {
        "address": cluster.address,
        "node-id": node.node_id,
        "reason": "DRAIN_NODE_REASON_PREEMPTION",
        "reason-message": "a test",
        "deadline-remaining-seconds": 3600,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in flags.items())], check=True, capture_output=True)


def wait_until(holds: Callable[[], object], command: Command | None = None) -> None:
    """Wait until something holds, while a command runs; the time limit of the test bounds this."""
    while not holds():
        assert command is None or command.is_running, command.wait() and command.printed
        time.sleep(0.1)
