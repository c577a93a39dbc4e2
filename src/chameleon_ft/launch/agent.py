"""The agent of a host, with its ranks and maybe a coordinator that stands by; or one rank of a cluster's launcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NoReturn

from chameleon_ft.errors import ConfigError
from chameleon_ft.events.records import RunStatus
from chameleon_ft.host.agent import Agent
from chameleon_ft.host.fork_server import SAME_SIGNAL_S, exit_immediately
from chameleon_ft.launch import processes
from chameleon_ft.launch.coordinator import DEPOSED
from chameleon_ft.protocol.address import CoordinatorAccess, own_address
from chameleon_ft.protocol.messages import Examine, Exit
from chameleon_ft.protocol.parts import HostReport, Member
from chameleon_ft.storage.files import RunDirectory


def run_agent(
    access: CoordinatorAccess,
    *,
    workers: int,
    host: str | None,
    run: RunDirectory | None = None,
    stands_by: bool = False,
    drained_exit_code: int = 0,
) -> int:
    """Start and watch `workers` ranks of a run. Returns the exit code.

    Args:
        run: its directory, if this machine can read it.
        stands_by: Another coordinator is to stand by on this machine, which needs the directory.
        drained_exit_code: the exit code if the workers are drained and the run continues.

    Raises:
        ControlError: the coordinator does not answer, or has no place for this host.
    """

    async def whole() -> int:
        agent = create_agent(access, workers=workers, host=host, examine=processes.examine)
        standby = _HostedStandby(run, host) if run is not None and stands_by else None
        return await _run_agent(agent, run, standby, drained_exit_code=drained_exit_code)

    with processes.unattended():
        return asyncio.run(whole())


def create_agent(
    access: CoordinatorAccess,
    *,
    workers: int,
    host: str | None = None,
    lifeline: int | None = None,
    examine: Callable[[Examine], Awaitable[HostReport]] | None = None,
) -> Agent:
    """Return an agent for `workers` ranks, which the fork server of this process starts; see `Agent`.

    Args:
        lifeline: descriptor of the `Lifeline` of the process with which its ranks end; without one, they outlive all
            others, and end with the run.
    """
    lifelines = () if lifeline is None else (lifeline,)
    start_rank = partial(processes.start_fork_server().fork, processes.RANK, *lifelines)
    return Agent(access, slots=workers, host=host, start_rank=start_rank, examine=examine)


async def _run_agent(
    agent: Agent, run: RunDirectory | None, standby: _HostedStandby | None, *, drained_exit_code: int
) -> int:
    serving = asyncio.ensure_future(agent.serve())
    standing_by = None if standby is None else asyncio.ensure_future(standby.run())
    loop, terminated_s = asyncio.get_running_loop(), math.inf
    terminated_by: signal.Signals | None = None

    def interrupt() -> None:
        serving.cancel()
        if standby is not None:
            standby.send(signal.SIGINT)

    def terminate(number: signal.Signals) -> None:
        nonlocal terminated_s, terminated_by
        terminated_by = terminated_by or number
        if standby is not None and serving.done():
            standby.send(number)
        if loop.time() - terminated_s > SAME_SIGNAL_S or (terminated_s == math.inf and not agent.drain(number)):
            serving.cancel()
        elif terminated_s == math.inf and not serving.done():
            print("draining the workers of this agent; SIGTERM or Ctrl-C ends them at once", flush=True)
        terminated_s = min(terminated_s, loop.time())

    order: Exit | None = None
    with processes.signals_handled(interrupt=interrupt, terminate=terminate):
        try:
            order = await serving
            code = _told(order, run, is_terminated=terminated_s < math.inf)
            return drained_exit_code if order is not None and order.is_drained else code
        except asyncio.CancelledError:
            return 130 if terminated_s == math.inf else os.EX_TEMPFAIL
        finally:
            if standby is not None and standing_by is not None:
                standby.leave(order, terminated_by)
                await standing_by


def _told(order: Exit | None, run: RunDirectory | None, *, is_terminated: bool) -> int:
    """Print why the agent ends, and return its exit code."""
    if order is None and run is not None and (status := _status_at_end(run)) is not None:
        order = Exit(reason=f"the run is over: {status}", status=status)
    if order is not None:
        print(f"the agent ends: {order.reason}", flush=True)
        return order.exit_code
    print("the connection to the coordinator is lost; the ranks of this host have been ended", file=sys.stderr)
    return os.EX_TEMPFAIL if is_terminated else 1


def _status_at_end(run: RunDirectory) -> RunStatus | None:
    """Return how the run ended, while this agent was not connected; None if it is live, or its coordinator is lost."""
    if run.control_file.exists():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        status: RunStatus = json.loads(run.summary_file.read_text(encoding="utf-8"))["status"]
        return status
    return None


class _HostedStandby:
    """A coordinator that stands by in a process of its own, which outlives this one if that is killed."""

    def __init__(self, run: RunDirectory, host: str | None) -> None:
        self._run = run
        self._host = [] if host is None else ["--host", host]
        self._process: asyncio.subprocess.Process | None = None
        # Whether the agent has left the run.
        self._is_left = False

    async def run(self) -> None:
        """Stand by until the run is over; once more if it has led and another coordinator leads now."""
        command = [sys.executable, "-m", "chameleon_ft", "coordinator", "--standby", str(self._run.path), *self._host]
        code = DEPOSED
        while code == DEPOSED and not self._is_left:
            self._process = await asyncio.create_subprocess_exec(*command)
            code = await self._process.wait()
        if code < 0 and not self._is_left:
            name = signal.Signals(-code).name
            print(
                f"the coordinator that stood by here was ended by {name}; none stands by now",
                file=sys.stderr,
                flush=True,
            )

    def leads(self) -> bool:
        """Return whether it leads the run."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:
            control = self._run.read_control()
        except ConfigError:
            return False
        return control.pid == self._process.pid and control.has_process_here() is True

    def leave(self, order: Exit | None, terminated_by: signal.Signals | None) -> None:
        """End it if the agent leaves a run that continues elsewhere.

        If it leads, the run needs it, unless the agent was asked to end: then it leaves the run to a coordinator that
        stands by on another machine, or ends it with a checkpoint.

        Args:
            terminated_by: the signal by which the agent was asked to end.
        """
        self._is_left = True
        is_over = order is not None and order.status is not None
        if terminated_by is not None:
            self.send(terminated_by)
        elif is_over:
            # The standby has been told.
            pass
        elif self.leads():
            print("the coordinator of the run is on this machine, and leaves it at SIGTERM", flush=True)
        else:
            self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


def work(access: CoordinatorAccess, *, environ: Mapping[str, str]) -> NoReturn:
    """Be one rank, started by a launcher that sets RANK and LOCAL_RANK; ends the process.

    Raises:
        ControlError: the coordinator cannot be joined.
    """
    from chameleon_ft.worker.rank import rank_main

    code = rank_main(
        access,
        # The coordinator counts the incarnations.
        member=Member(int(environ["RANK"]), 0),
        host=own_address(environ.get("CHAMELEON_HOST"), towards=access.address),
        local_index=int(environ["LOCAL_RANK"]),
    )
    exit_immediately(code)
