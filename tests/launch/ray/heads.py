"""A Ray cluster as a user starts it on this machine: a head with a job server, and an autoscaler that adds nodes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chameleon_ft.host.fork_server import end_with
from tests.launch.ray.clusters import RAY, end_all, quiet_environment, wait_until

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_REQUEST = (
    "import json, sys, ray; from ray.autoscaler.sdk import request_resources; "
    "ray.init(sys.argv[1], logging_level='error'); request_resources(bundles=json.loads(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a cluster.

    Attributes:
        address: host:port of the cluster.
        jobs: URL of its job server.
    """

    address: str
    jobs: str

    def job(self, command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of `ray job`, and return it with all that it prints."""
        return subprocess.run(
            [*RAY, "job", command, "--address", self.jobs, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def submit(self, *arguments: str | Path) -> Job:
        """Submit a job, and do not wait for it."""
        submitted = self.job("submit", "--submission-id", "submitted", "--no-wait", *arguments)
        assert submitted.returncode == 0, submitted.stdout
        return Job(self, "submitted")

    def request(self, *bundles: dict[str, float]) -> None:
        """Have the autoscaler see to it that the cluster has room for these bundles."""
        subprocess.run(
            [sys.executable, "-c", _REQUEST, self.address, json.dumps(bundles)], check=True, capture_output=True
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a cluster."""

    head: Head
    id: str

    @property
    def is_running(self) -> bool:
        return not _client(self.head.jobs).get_job_status(self.id).is_terminal()

    def rest(self) -> str:
        """Return all that it has printed."""
        return self.head.job("logs", self.id).stdout


@cache
def _client(jobs: str) -> JobSubmissionClient:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(jobs)


@contextmanager
def autoscaled_head(*, cpus: int, most: int) -> Iterator[Head]:
    """Run `ray start --head`; its autoscaler adds up to `most` nodes, of so many CPUs each, where they are needed."""
    ray = pytest.importorskip("ray")
    host = ray.util.get_node_ip_address()
    with ExitStack() as stack:
        stack.enter_context(quiet_environment())
        # Its path has to be short, because sockets are in it.
        scratch = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        port, jobs, *others = _free_ports(4)
        config = scratch / "autoscaler.json"
        config.write_text(json.dumps(_autoscaler(f"{host}:{port}", cpus=cpus, most=most)))
        flags: dict[str, object] = {
            "port": port,
            "dashboard-port": jobs,
            "dashboard-agent-listen-port": others[0],
            "ray-client-server-port": others[1],
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": 0,
            "temp-dir": scratch,
            "autoscaling-config": config,
        }
        environ = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        log = stack.enter_context((scratch / "start.log").open("wb"))
        started = subprocess.Popen(
            [*RAY, "start", "--head", "--block", *(f"--{name}={value}" for name, value in flags.items())],
            env={**os.environ, **environ},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()),
        )
        stack.callback(end_all, started)
        wait_until(lambda: _answers(jobs) or started.poll() is not None)
        assert started.poll() is None, (scratch / "start.log").read_text()
        yield Head(f"{host}:{port}", f"http://127.0.0.1:{jobs}")


def _autoscaler(address: str, *, cpus: int, most: int) -> dict[str, Any]:
    """Return the configuration of an autoscaler whose nodes are processes of this machine."""
    provider = {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True}
    commands = ("head_start_ray", "worker_start_ray", "initialization", "setup", "head_setup", "worker_setup")
    return {
        **{f"{name}_commands": [] for name in commands},
        "cluster_name": "test",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "idle_timeout_minutes": 60,
        "upscaling_speed": 1.0,
        "max_workers": most,
        "provider": {**provider, "disable_launch_config_check": True, "gcs_address": address},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "node": {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
    }


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(number)]


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
