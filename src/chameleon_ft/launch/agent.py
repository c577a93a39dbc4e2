"""The agent of a host, with its ranks."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from functools import partial
from pathlib import Path

from chameleon_ft.control.agent import Agent
from chameleon_ft.launch import processes
from chameleon_ft.runtime.process import SAME_SIGNAL_S

__all__ = ["create_agent", "run_agent"]


def run_agent(*, coordinator: str, token: str, tls: Path | None, workers: int, host: str | None) -> int:
    """Start and watch `workers` ranks of the run at `coordinator`, which is host:port. Returns the exit code.

    Raises:
        ControlError: the coordinator does not answer, or does not want this host.
    """
    return asyncio.run(_run_agent(coordinator=coordinator, token=token, tls=tls, workers=workers, host=host))


def create_agent(
    *,
    coordinator: str,
    token: str,
    tls: Path | None,
    workers: int,
    host: str | None = None,
    lifeline: int | None = None,
) -> Agent:
    """Return an agent for `workers` ranks, which the fork server of this process starts; see `Agent`.

    Args:
        lifeline: descriptor of the `Lifeline` of the process with which its ranks end; without one, they outlive all
            others, and end with the run.
    """
    lifelines = () if lifeline is None else (lifeline,)
    start_rank = partial(processes.start_fork_server().fork, processes.RANK, *lifelines)
    return Agent(coordinator=coordinator, token=token, tls=tls, slots=workers, host=host, start_rank=start_rank)


async def _run_agent(*, coordinator: str, token: str, tls: Path | None, workers: int, host: str | None) -> int:
    agent = create_agent(coordinator=coordinator, token=token, tls=tls, workers=workers, host=host)
    serving = asyncio.ensure_future(agent.serve())

    loop, terminated_s = asyncio.get_running_loop(), math.inf

    def terminate() -> None:
        nonlocal terminated_s
        if loop.time() - terminated_s > SAME_SIGNAL_S or (terminated_s == math.inf and not agent.drain()):
            serving.cancel()
        elif terminated_s == math.inf:
            print("draining the workers of this agent; SIGTERM or Ctrl-C ends them at once", flush=True)
        terminated_s = min(terminated_s, loop.time())

    try:
        with processes.signals_handled(SIGINT=serving.cancel, SIGTERM=terminate):
            order = await serving
        if order is not None:
            return order.exit_code
        print("the connection to the coordinator is lost; the ranks of this host have been ended", file=sys.stderr)
        return 1 if terminated_s == math.inf else os.EX_TEMPFAIL
    except asyncio.CancelledError:
        return 130 if terminated_s == math.inf else os.EX_TEMPFAIL
