"""The actor of a node: the agent, whose ranks are children of the actor's process."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ray

from chameleon_ft.control.agent import Agent
from chameleon_ft.control.wire.address import CoordinatorAccess
from chameleon_ft.control.wire.messages import Exit
from chameleon_ft.errors import ChameleonError
from chameleon_ft.launch import processes
from chameleon_ft.launch.agent import create_agent
from chameleon_ft.launch.ray import directory
from chameleon_ft.launch.ray.cluster import NAMESPACE, give_back, name_of
from chameleon_ft.observe import ControlAddress, RunDirectory
from chameleon_ft.runtime.process import Lifeline

_FOLLOW_S: Final = 0.5
_UNASKED_S: Final = 30.0  # for which this actor outlives the run, so that the coordinator can ask how it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """How an agent ended.

    Attributes:
        order: of the coordinator to exit; None if it is lost.
        error: why the agent could not do its work; empty if it could.
        checkpoints: parts of checkpoints that its ranks have written where the others do not see them.
    """

    order: Exit | None
    error: str
    checkpoints: bytes | None


class AgentActor:
    """Serves a run on one node, as `chameleon agent` does.

    The ranks end with this process, and it ends with the raylet of its node. Their logs are copied to its output, which
    Ray collects. Once its workers have left the run, it stays until the run is over, so that a coordinator that
    continues the run knows.
    """

    def __init__(self, run: Path, *, workers: int) -> None:
        self._run = RunDirectory(run)
        self._workers = workers
        self._lifeline = Lifeline()
        self._agent: Agent | None = None
        self._serving: asyncio.Task[AgentEnd] | None = None
        processes.start_fork_server()

    async def sees(self, mark: str) -> bool:
        """Return whether this node sees the run directory, or serves the run on a copy of it."""
        return self._serving is not None or directory.sees(self._run, mark)

    async def copy_run(self, archive: bytes) -> str:
        """Make a run directory of its own for this node; return why that cannot be done, or nothing."""
        try:
            directory.copy_to(self._run, archive)
        except ChameleonError as error:
            return str(error)
        return ""

    async def serve(self, control: ControlAddress) -> AgentEnd:
        """Serve the run, and return how that ended. A coordinator that continues the run asks once more."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(control))
        return await asyncio.shield(self._serving)

    async def drain(self) -> bool:
        """Have all workers of this node leave the run; return False if that has to be asked again later."""
        return self._agent is not None and self._agent.drain()

    async def _serve(self, control: ControlAddress) -> AgentEnd:
        order, error = None, ""
        try:
            agent = self._agent = create_agent(
                CoordinatorAccess.of(control),
                workers=self._workers,
                lifeline=self._lifeline.descriptor,
                examine=processes.examine,
            )
            following = asyncio.create_task(_follow_logs(agent, self._run))
            try:
                order = await agent.serve()
            finally:
                agent.kill_all()
                await asyncio.sleep(_FOLLOW_S)
                following.cancel()
        except ChameleonError as raised:
            error = str(raised)
        if order is None or order.status is not None:
            asyncio.get_running_loop().call_later(_UNASKED_S, self._end)
        return AgentEnd(order=order, error=error, checkpoints=directory.packed_checkpoints(self._run))

    def _end(self) -> None:
        """End this actor, and all others of the run if its coordinator is lost for good."""
        name = name_of(self._run)
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            give_back(name)
        ray.kill(ray.get_runtime_context().current_actor)


async def _follow_logs(agent: Agent, run: RunDirectory) -> None:
    """Print the lines that the workers of an agent add to their logs."""
    read = {file: file.stat().st_size for file in run.logs.glob("worker-*.log")}  # before this start of the run
    while True:
        for worker in agent.workers:
            file = run.logs / f"worker-{worker}.log"
            with contextlib.suppress(OSError), file.open("rb") as log:
                log.seek(read.get(file, 0))
                for line in log:
                    if not line.endswith(b"\n"):
                        break  # it is not written yet
                    read[file] = read.get(file, 0) + len(line)
                    print(f"worker {worker}: {line.decode(errors='replace')}", end="", flush=True)
        await asyncio.sleep(_FOLLOW_S)
