"""Ray clusters on this machine: several raylets at one address, without dashboard and without reports of usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import psutil
import pytest

from chameleon_ft.host.fork_server import end_with

if TYPE_CHECKING:
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

RAY = (sys.executable, "-m", "ray.scripts.scripts")

# Where a user has a token, Ray would ask for it.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "RAY_AUTH_MODE": "disabled"}
_SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 10,
    "worker_niceness": 0,  # as without Ray: at 15, its default, other work of this machine holds workers up
}
_NAMED = (
    "import json, sys, ray; ray.init(sys.argv[1], logging_level='error', log_to_driver=False); "
    "print(json.dumps([each['name'] for each in ray.util.list_named_actors(all_namespaces=True)]))"
)


@contextmanager
def quiet_environment() -> Iterator[None]:
    """Have Ray send no reports, print no colours, and ask for no token, in processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Cluster]:
    """Yield a cluster of a head, where a driver runs and no worker, and a node for each number of CPUs."""
    pytest.importorskip("ray")
    from ray._private import node
    from ray.cluster_utils import Cluster

    # Its processes end with this one, however that ends; its handlers of signals stay as they are.
    bound = mock.patch.object(node, "Node", partial(_bound_node, node.Node))
    with quiet_environment(), bound:
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


def _bound_node(kind: Callable[..., Node], *arguments: Any, **named: Any) -> Node:
    return kind(*arguments, **{**named, "spawn_reaper": True})


@contextmanager
def node_that_does_not_see(hidden: Path, cluster: Cluster, *, cpus: int) -> Iterator[None]:
    """Have a cluster a node with an empty directory of its own at `hidden`; skips the test if none can be mounted."""
    private = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(hidden)]
    if subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    flags = (f"--address={cluster.address}", f"--num-cpus={cpus}", "--min-worker-port=0", "--max-worker-port=0")
    started = subprocess.Popen(
        [*private, *RAY, "start", *flags, "--block"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(end_with, os.getpid()),
    )
    try:
        yield
    finally:
        end_all(started)


def actors_of(address: str) -> list[str]:
    """Return the names of the actors of the cluster at an address."""
    done = subprocess.run([sys.executable, "-c", _NAMED, address], capture_output=True, text=True, check=True)
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
    subprocess.run(
        [*RAY, "drain-node", *(f"--{name}={value}" for name, value in flags.items())], check=True, capture_output=True
    )


def end_all(started: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it has started: a node that is asked to end waits for its actors."""
    children = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
    for process in (started, *children):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(children)
    started.wait()


class Running(Protocol):
    """A command, or a job."""

    @property
    def is_running(self) -> bool: ...

    def rest(self) -> str:
        """Return all that it has printed, once it has ended."""


def wait_until(holds: Callable[[], object], command: Running | None = None) -> None:
    """Wait until something holds, while a command runs; the time limit of the test bounds this."""
    while not holds():
        assert command is None or command.is_running, command.rest()
        time.sleep(0.3)
