"""Arguments of the commands that join a coordinator.

The client is imported lazily, because `--help` must not wait for it.

Arguments of torchrun that `chameleon agent` accepts, and advice for those that it does not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

from chameleon_ft.cli.arguments import OptionalInt, OptionalPath, OptionalStr, metavar
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.events.records import RunStatus
from chameleon_ft.protocol.address import TOKEN_VARIABLE, CoordinatorAccess, split_address
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.run_lock import RunLock

_RETRY_S: Final = 0.1  # twice as long before each attempt that follows
_RETRY_MAX_S: Final = 2.0
_OVER_S: Final = 5.0  # for which a run that is finished is not resumed, with more steps


@dataclass(frozen=True, kw_only=True)
class JoinArguments:
    """The arguments that name the coordinator."""

    run: Annotated[OptionalPath, metavar("RUN")] = None
    """Directory of the run, if this machine can read it: it holds the address of the coordinator and the token."""
    coordinator: Annotated[OptionalStr, metavar("HOST:PORT")] = None
    """Address that the coordinator printed, instead of --run."""
    token: Annotated[
        OptionalStr,
        metavar(
            "TOKEN",
            "Join token, which the coordinator prints on a terminal and keeps in the run's control.json. Prefer the "
            f"environment variable {TOKEN_VARIABLE}, which other users of the machine cannot see.",
        ),
    ] = None

    tls: Annotated[
        OptionalPath,
        metavar(
            "DIRECTORY",
            "Directory with ca.pem, cert.pem and key.pem, if the coordinator wants TLS; with --run "
            "by default the one that the coordinator uses.",
        ),
    ] = None

    wait_s: float = 300.0
    """Seconds to wait for the coordinator, if it does not answer yet."""

    def find_coordinator(self) -> CoordinatorAccess | None:
        """Wait for the coordinator, and return the way to it.

        Returns None, and says so, if all steps of the run are trained and no process resumes it.

        Raises:
            ConfigError: the arguments and the environment name no coordinator or two, the address is malformed or the
                token is missing; or there is no such run, or it is not live, after the wait.
            ControlError: the coordinator rejects the token, or does not answer within the wait.
        """
        from chameleon_ft.launch.live_run import require_coordinator

        if not self.wait_s >= 0:
            raise ConfigError(f"--wait-s {self.wait_s:g}: should be 0 or more")
        began_s, pause_s, has_said = time.monotonic(), _RETRY_S, False
        while True:
            try:
                found = self._coordinator()
                if not self._may_lead():
                    require_coordinator(found.address, found.token, tls=found.tls)
                return found
            except (ConfigError, ControlError, OSError) as error:
                # The files of a run are written by another machine, and may be those of a coordinator that is gone.
                is_final = self.run is None and isinstance(error, ChameleonError)
                waited_s, status = time.monotonic() - began_s, self._status_of_last_start()
                if status == "finished" and waited_s > min(_OVER_S, self.wait_s - pause_s):
                    print(f"{self.run}: the run is over: all of its steps are done", flush=True)
                    return None
                if is_final or self._is_wrong() or waited_s + pause_s > self.wait_s:
                    if isinstance(error, ChameleonError):
                        raise
                    raise ControlError(
                        f"no coordinator answers at {found.address} within {self.wait_s:g} s: {error}; check that it "
                        "runs, the address and --tls"
                    ) from None
            if not has_said:
                has_said = True
                print(f"waiting up to {self.wait_s:g} s for the coordinator {self._where(status)}", flush=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    def _may_lead(self) -> bool:
        """Return whether this process may continue the run itself, so that it need not wait for a coordinator."""
        return False

    def _where(self, status: RunStatus | None) -> str:
        """Return where the coordinator is expected, and why it is not there yet as far as the files of the run tell."""
        if self.run is None:
            return f"at {self.coordinator}"
        if not self.run.exists():
            return f"of {self.run}, where there is no directory yet"
        if not RunDirectory(self.run).config_file.exists():
            return f"of {self.run}, which is not a run directory yet"
        return f"of {self.run}" if status is None else f"of {self.run}, which is {status}"

    def _status_of_last_start(self) -> RunStatus | None:
        """Return how the run has ended; None if it is live, is being resumed or its coordinator is lost."""
        if self.run is None or RunDirectory(self.run).control_file.exists() or RunLock.is_in(self.run):
            return None
        from chameleon_ft.coordinator.journal import LastEntry

        with contextlib.suppress(ChameleonError):  # a damaged journal
            last = LastEntry.newest(RunDirectory(self.run))
            return None if last is None else last.status
        return None

    def _is_wrong(self) -> bool:
        """Return whether these arguments cannot become right by waiting."""
        is_found_once = (self.run is None) != (self.coordinator is None)
        return not is_found_once or (self.run is not None and self.token is not None)

    def _coordinator(self) -> CoordinatorAccess:
        if (self.run is None) == (self.coordinator is None):
            raise ConfigError("give either --run RUN or --coordinator HOST:PORT, so that the coordinator can be found")
        if self.run is not None:
            if self.token is not None:
                raise ConfigError(f"--token: for --coordinator; that of --run {self.run} is in its control.json")
            run = RunDirectory.open(self.run)
            control, patience_s = run.read_control(), run.config().timeouts.reconnect_s
            found = replace(CoordinatorAccess.of(control), patience_s=patience_s, run=self.run.absolute())
            return found if self.tls is None else replace(found, tls=self.tls)
        assert self.coordinator is not None
        split_address(self.coordinator)  # raises if it is malformed
        token = self.token or os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise ConfigError(
                f"a join token is needed: set {TOKEN_VARIABLE} or give --token; it is in the run's control.json"
            )
        return CoordinatorAccess(address=self.coordinator, token=token, tls=self.tls)


_JOB: Final = "the coordinator names the job, not the agents: `chameleon coordinator CONFIG --job FILE.py:FUNCTION`"
_LOGS: Final = "logs are in the folder logs of the run directory; leave it out"
_REMEDIES: Final = {
    "--rdzv-id": "the join token tells which run it is; leave it out",
    "--rdzv-conf": "--wait-s is the time to wait for the coordinator, and the configuration has all other timeouts",
    "--standalone": "use `chameleon train` or `chameleon run`, which start all that a run on one machine needs",
    "--max-restarts": "workers are restarted if the run has recovery.respawn, up to recovery.max_respawns times",
    "--monitor-interval": "an agent notices the end of a worker at once; leave it out",
    "--node-rank": "machines are numbered in the order in which they join; leave it out",
    "--master-addr": "write --rdzv-endpoint HOST:PORT",
    "--master-port": "write --rdzv-endpoint HOST:PORT",
    "--local-addr": "write --host ADDRESS",
    "--log-dir": _LOGS,
    "--redirects": _LOGS,
    "--tee": _LOGS,
    "--local-ranks-filter": _LOGS,
    "-r": _LOGS,
    "-t": _LOGS,
    "--role": "all workers of a run do the same; leave it out",
    "--start-method": "agents fork workers from a process that has loaded torch; leave it out",
    "--module": _JOB,
    "-m": _JOB,
    "--no-python": _JOB,
    "--run-path": _JOB,
}


@dataclass(frozen=True, kw_only=True)
class TorchrunArguments(JoinArguments):
    """Arguments that `chameleon agent` shares with torchrun, under the names of both."""

    workers: OptionalInt = None
    """Worker processes to start here, one for each accelerator. Required."""
    nproc_per_node: Annotated[OptionalStr, metavar("INT")] = None
    """torchrun's name for --workers."""
    rdzv_endpoint: Annotated[OptionalStr, metavar("HOST:PORT")] = None
    """torchrun's name for --coordinator."""
    rdzv_backend: Annotated[OptionalStr, metavar("chameleon")] = None
    """No other value is accepted: the workers meet at the coordinator."""
    nnodes: Annotated[OptionalStr, metavar("INT")] = None
    """Machines with which the run begins, checked with --run; leave it out on a machine that is added later."""

    def num_workers(self) -> int:
        """Return the workers of this machine. Raises ConfigError."""
        if self.workers is not None and self.nproc_per_node is not None:
            raise ConfigError("--workers and --nproc-per-node: mean the same; give one of them")
        if self.workers is None and self.nproc_per_node is None:
            raise ConfigError("--workers is missing: give the number of workers of this machine, one per accelerator")
        if self.workers is not None:
            return _at_least_one("--workers", str(self.workers))
        return _at_least_one("--nproc-per-node", self.nproc_per_node or "")

    def num_nodes(self) -> int | None:
        """Return the machines with which the run begins, if they are given. Raises ConfigError."""
        if self.nnodes is None:
            return None
        least, colon, most = self.nnodes.partition(":")
        if colon and most != least:
            raise ConfigError(
                f"--nnodes {self.nnodes}: should be one number. A run begins with the workers of its configuration, "
                "continues as long as its layers are held, and takes in machines that join later: start agents there"
            )
        return _at_least_one("--nnodes", least)

    def endpoint(self) -> str | None:
        """Return the address of the coordinator, if it is given. Raises ConfigError."""
        if self.rdzv_backend not in (None, "chameleon"):
            raise ConfigError(
                f"--rdzv-backend {self.rdzv_backend}: workers meet at the coordinator of the run; leave it out"
            )
        if self.rdzv_endpoint is not None and self.coordinator is not None:
            raise ConfigError("--coordinator and --rdzv-endpoint: mean the same; give one of them")
        return self.coordinator if self.rdzv_endpoint is None else self.rdzv_endpoint


def _at_least_one(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} {text}: should be a whole number, 1 or more")
    return int(text)


def refuse_foreign_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError if an argument is one of torchrun that agents do not follow."""
    for argument in arguments:
        if argument.endswith(".py"):
            raise ConfigError(f"{argument}: {_JOB}")
        flag = argument.partition("=")[0].replace("_", "-")
        if (remedy := _REMEDIES.get(flag)) is not None:
            raise ConfigError(f"{flag}: is an argument of torchrun that agents do not take; {remedy}")
