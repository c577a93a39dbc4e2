"""A Slurm cluster on this machine: a controller and nodes, each in a network namespace of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

import pytest

from chameleon_ft.host.fork_server import end_with

_PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare")
_SBIN: Final = "/usr/sbin:/sbin"  # where a user's PATH may not lead
_CONTROLLER: Final = "ctl"
_CONFIG: Final = """\
ClusterName=chameleon
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
SchedulerParameters=sched_interval=2,bf_interval=1,batch_sched_delay=1
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=6
SlurmctldTimeout=30
MessageTimeout=5
TCPTimeout=1
InactiveLimit=0
KillWait=120
MinJobAge=60
NodeName=DEFAULT CPUs=2 State=UNKNOWN
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def skip_without_slurm() -> None:
    """Skip the test if no Slurm can be started here."""
    path = f"{os.environ['PATH']}:{_SBIN}"
    if missing := [program for program in _PROGRAMS if shutil.which(program, path=path) is None]:
        pytest.skip(f"there is no {', '.join(missing)} here; Debian has them in slurm-wlm, munge and iproute2")
    if os.geteuid():
        pytest.skip("only root can make network namespaces")


class SlurmCluster:
    """A cluster whose nodes share the file system, and die with all of their processes.

    Args:
        directory: of its files.
        nodes: number of nodes, which are called n1, n2, ...
    """

    def __init__(self, directory: Path, *, nodes: int) -> None:
        self.directory = directory
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self._prefix = f"slurm-{os.getpid()}-{secrets.token_hex(2)}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{_SBIN}"
        self._environ = {**os.environ, "PATH": path, "SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in (*self.nodes, _CONTROLLER):
            self._kill_all(host)
        for process in self._processes.values():
            process.kill()
            process.wait()
        for host in (*self.nodes, _CONTROLLER):
            subprocess.run(["ip", "netns", "del", self._namespace(host)], check=False, capture_output=True)

    def command(self, *arguments: str | Path | int) -> str:
        """Run a command on the controller and return what it prints."""
        done = subprocess.run(
            [*self._on(_CONTROLLER), *map(str, arguments)],
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, job: str, field: str) -> str:
        """Return a field of `scontrol show job`."""
        words = self.command("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))

    def state_of(self, node: str) -> str:
        """Return the state of a node, such as idle or drained."""
        return self.command("sinfo", "--noheader", "--nodes", node, "--format=%T").rstrip("*")

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait; the time limit of the test bounds it."""
        while not condition():
            time.sleep(0.5)

    def kill_node(self, node: str) -> None:
        """Pull the cable of a node and end all of its processes, as a loss of power does."""
        self._ip(_CONTROLLER, "link", "set", node, "down")
        self._kill_all(node)

    def start_node(self, node: str) -> None:
        """Boot a node."""
        self._ip(_CONTROLLER, "link", "set", node, "up")
        self._run(node, node, "slurmd", "-D")

    def _start(self) -> None:
        for index, host in enumerate((_CONTROLLER, *self.nodes)):
            subprocess.run(["ip", "netns", "add", self._namespace(host)], check=True, capture_output=True)
            self._ip(host, "link", "set", "lo", "up")
            address = f"{self._address(index)}/24"
            if host == _CONTROLLER:
                self._ip(host, "link", "add", "eth0", "type", "bridge")
            else:
                peer = ("peer", "name", "eth0", "netns", self._namespace(host))
                self._ip(_CONTROLLER, "link", "add", host, "type", "veth", *peer)
                self._ip(_CONTROLLER, "link", "set", host, "master", "eth0", "up")
            self._ip(host, "addr", "add", address, "dev", "eth0")
            self._ip(host, "link", "set", "eth0", "up")
        nodes = (f"NodeName={node} NodeAddr={self._address(index + 1)}" for index, node in enumerate(self.nodes))
        text = _CONFIG.format(
            controller=_CONTROLLER,
            controller_address=self._address(0),
            directory=self.directory,
            nodes="\n".join(nodes),
        )
        (self.directory / "slurm.conf").write_text(text)
        (self.directory / "state").mkdir()
        self._start_munge()
        self._run(_CONTROLLER, _CONTROLLER, "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        self.wait_until(lambda: all(self.state_of(node) == "idle" for node in self.nodes))

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.directory.chmod(0o755)
        files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={self.directory / name}" for option, name in files.items()]
        self._run("munge", None, "munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.wait_until((self.directory / "munge.socket").exists)

    def _run(self, name: str, host: str | None, *command: str) -> None:
        """Start a service, on a host with its own name and network."""
        prefix: Sequence[str] = ()
        if host is not None:
            prefix = self._on(host)
        if (old := self._processes.get(name)) is not None:
            old.wait()
        with (self.directory / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [*prefix, *command],
                env=self._environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),
            )

    def _on(self, host: str) -> tuple[str, ...]:
        """Return the prefix of a command on a host. `ip netns exec` would hide the control groups of the machine."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh")
        return ("nsenter", f"--net=/run/netns/{self._namespace(host)}", *named)

    def _kill_all(self, host: str) -> None:
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _ip(self, host: str, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self._namespace(host), *arguments], check=True, capture_output=True)

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _address(self, index: int) -> str:
        return f"10.78.0.{index + 1}"
