"""The actor of the coordinator, which Ray restarts and which then continues the run from its journal."""

from __future__ import annotations

import asyncio
import signal
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeAlias

import ray
from ray.util import get_placement_group

from chameleon_ft.config import RunConfig
from chameleon_ft.control.coordinator import Coordinator
from chameleon_ft.control.state.state import Phase
from chameleon_ft.errors import ChameleonError
from chameleon_ft.launch.coordinator import Beside, InterruptCount, begin_run
from chameleon_ft.launch.processes import start_fork_server
from chameleon_ft.launch.ray.agents import Agents
from chameleon_ft.launch.ray.cluster import give_back, name_of, reserved
from chameleon_ft.launch.ray.nodes import NodeRequest
from chameleon_ft.launch.standby import continue_run
from chameleon_ft.observe import ControlAddress, RunDirectory, RunStatus
from chameleon_ft.observe.terminal import TerminalView

Outcome: TypeAlias = RunStatus | ChameleonError
"""How a run ended, or why it could not begin."""

_DRIVER_SILENT_S: Final = 30.0
"""Seconds after which a driver that has not asked for the outcome is lost; then the run ends with a checkpoint."""
_WATCH_S: Final = 1.0
_SPAWN: Final = get_context("spawn")  # the process of an actor has threads of Ray, so it cannot be forked


class CoordinatorActor:
    """Coordinates a run from the moment at which Ray starts the process; one that replaces another continues its run.

    Args:
        run: its directory.
        wait_s: how long to wait for the nodes of `request`.
    """

    def __init__(self, config: RunConfig, run: Path, *, resume: bool, request: NodeRequest, wait_s: float) -> None:
        self._config = config
        self._run = RunDirectory(run)
        self._resume = resume
        self._request = request
        self._wait_s = wait_s
        self._takes_over = _replaces_another() and self._run.control_file.exists()
        self._signals: Sequence[signal.Signals] = ()
        self._obeyed = 0  # of the signals
        self._coordinator: Coordinator | None = None
        self._interrupts: InterruptCount | None = None
        self._heard_s = time.monotonic()  # when the driver asked last
        start_fork_server()
        self._running = asyncio.get_running_loop().create_task(self._coordinate())
        self._watching = asyncio.get_running_loop().create_task(self._watch_driver())

    async def outcome(self, wait_s: float) -> Outcome | None:
        """Return how the run ended; None if it has not within that time."""
        self._heard_s = time.monotonic()
        await asyncio.wait({self._running}, timeout=wait_s)
        return self._running.result() if self._running.done() else None

    async def obey(self, signals: Sequence[signal.Signals]) -> None:
        """Act on the signals that the driver has received, all since its start."""
        self._signals = signals
        self._act()

    async def _coordinate(self) -> Outcome:
        name, run = name_of(self._run), self._run
        try:
            if self._takes_over:
                group = get_placement_group(name)
            else:
                group = await reserved(self._request, name=name, wait_s=self._wait_s)
            agents = Agents(
                name=name,
                run=run,
                request=self._request,
                group=group,
                needs_directory=self._needs_directory(),
            )
            beside: Beside = partial(self._beside, agents)
            if self._takes_over:
                return await continue_run(run.own(run.config()), run=run, beside=beside, processes=_SPAWN)
            await agents.start()
            view = TerminalView(steps=self._config.steps, files=str(run.path))
            return await begin_run(
                self._config, run=run, resume=self._resume, view=view, beside=beside, processes=_SPAWN
            )
        except ChameleonError as error:
            return error
        except asyncio.CancelledError:
            return "interrupted" if self._signals[-1] == signal.SIGINT else "terminated"

    def _needs_directory(self) -> str:
        """Return why every node has to see the run directory; nothing if it need not."""
        if self._config.store.url:  # each node writes to that, and reads from it
            return ""
        if self._config.checkpoint.every != 0:
            return "checkpoints are written to it and read from it"
        return "the run resumes from its checkpoint" if self._resume else ""

    @asynccontextmanager
    async def _beside(
        self, agents: Agents, control: ControlAddress, coordinator: Coordinator, interrupts: InterruptCount
    ) -> AsyncIterator[None]:
        def fail(reason: str) -> None:
            if coordinator.state.phase is Phase.GATHERING:
                coordinator.end("failed", reason)
            elif coordinator.state.phase is not Phase.OVER:
                print(f"{reason}; the run continues without this node", flush=True)

        def kept(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                coordinator.broken(error)

        self._coordinator, self._interrupts = coordinator, interrupts
        self._obeyed = 1 if coordinator.state.ending else 0  # by the coordinator before this one
        self._act()
        keeping = asyncio.create_task(agents.keep(control, failed=fail))
        keeping.add_done_callback(kept)
        try:
            yield
        finally:
            keeping.cancel()
        await agents.finish()

    def _act(self) -> None:
        """Act on the signals that have not been obeyed; before training, the first one ends the run."""
        if self._coordinator is None or self._interrupts is None:
            if self._signals and not self._takes_over:
                self._running.cancel()
            return
        for number in self._signals[self._obeyed :]:
            if number == signal.SIGINT:
                self._interrupts.request("driver")
            else:
                self._coordinator.terminate(number)
        self._obeyed = max(self._obeyed, len(self._signals))

    async def _watch_driver(self) -> None:
        """End the run if its driver is lost, and this actor once it is not needed any more."""
        is_told = False
        while True:
            await asyncio.sleep(_WATCH_S)
            if time.monotonic() - self._heard_s < _DRIVER_SILENT_S:
                continue
            if self._running.done():
                give_back(name_of(self._run))
                ray.kill(ray.get_runtime_context().current_actor)
            elif not is_told:
                is_told = True
                print("the driver of the run is lost; the run ends with a checkpoint", flush=True)
                await self.obey([*self._signals, signal.SIGTERM])


def _replaces_another() -> bool:
    """Return whether Ray has started this process because the one before has died."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what it calls itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
