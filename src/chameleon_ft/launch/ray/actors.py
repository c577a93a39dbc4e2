"""The actors of a run on Ray: an agent on each node, those that join later included, and the coordinator.

The ranks of a node are children of its actor's process. Ray restarts the actor of the coordinator, which then continues
the run from its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeAlias

import ray
from ray.exceptions import RayError
from ray.util import get_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from chameleon_ft.config import RunConfig
from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.events.records import RunStatus
from chameleon_ft.host.agent import Agent
from chameleon_ft.host.fork_server import Lifeline
from chameleon_ft.launch import processes
from chameleon_ft.launch.agent import create_agent
from chameleon_ft.launch.coordinator import Beside, InterruptCount, begin_run, continue_run
from chameleon_ft.launch.processes import start_fork_server
from chameleon_ft.launch.ray import cluster as directory
from chameleon_ft.launch.ray.cluster import (
    NAMESPACE,
    Node,
    NodeRequest,
    agents_of,
    bundles_by_node,
    draining_nodes,
    give_back,
    live_nodes,
    name_of,
    reserved,
)
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.protocol.messages import Exit
from chameleon_ft.storage.files import ControlAddress, RunDirectory

_FOLLOW_S: Final = 0.5
# An actor outlives the run for this time, so that the coordinator can ask how it ended.
_UNASKED_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """How an agent ended.

    Attributes:
        order: The order of the coordinator to exit; None if it is lost.
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
    # Their sizes before this start of the run.
    read = {file: file.stat().st_size for file in run.logs.glob("worker-*.log")}
    while True:
        for worker in agent.workers:
            file = run.logs / f"worker-{worker}.log"
            with contextlib.suppress(OSError), file.open("rb") as log:
                log.seek(read.get(file, 0))
                for line in log:
                    if not line.endswith(b"\n"):
                        # The line is not complete yet.
                        break
                    read[file] = read.get(file, 0) + len(line)
                    print(f"worker {worker}: {line.decode(errors='replace')}", end="", flush=True)
        await asyncio.sleep(_FOLLOW_S)


_POLL_S: Final = 1.0
_MAX_DEATHS: Final = 3
"""Processes of agents of one node that may die; then the node is left alone."""
# Ray places a bundle on a node that joins within this time.
_PLACING_S: Final = 15.0
# An agent gives its ranks less time.
_END_S: Final = 15.0

# A handle of an AgentActor, whose methods Ray makes when it runs.
_Handle: TypeAlias = Any


class Agents:
    """Keeps an agent on every node of the placement group, and on every node that joins the cluster later.

    Agents are detached actors with names, so that they outlive the process of the coordinator, and the next one finds
    them.

    Args:
        name: The name of the run in Ray.
        needs_directory: why every node has to see the run directory; empty if it does not.
    """

    def __init__(
        self, *, name: str, run: RunDirectory, request: NodeRequest, group: PlacementGroup, needs_directory: str
    ) -> None:
        self._name = name
        self._run = run
        self._request = request
        self._group = group
        self._needs_directory = needs_directory
        self._mark = directory.mark(run)
        self._archive: ray.ObjectRef[bytes] | None = None
        # All of these are by the ids of nodes.
        self._handles: dict[str, _Handle] = {}
        self._looked_after: dict[str, asyncio.Task[None]] = {}
        # Nodes whose agents know that they are to leave.
        self._draining: set[str] = set()
        # Nodes that were there before the run, which did not need them.
        self._spares: set[str] = set()
        # Nodes whose agents have failed.
        self._left_alone: set[str] = set()
        self._first_seen_s: dict[str, float] = {}
        # When a bundle was found that is not placed; None if all are.
        self._lacks_since_s: float | None = None
        self._deaths: Counter[str] = Counter()
        # Nodes that had an agent when this process began to look.
        self._found: set[str] | None = None

    async def start(self) -> None:
        """Start an agent on every node of the placement group.

        Raises:
            ConfigError: a node does not see the run directory, and has to.
            ControlError: an agent cannot be started.
        """
        placed, _ = await asyncio.to_thread(bundles_by_node, self._group)
        live = await asyncio.to_thread(live_nodes)
        # The process of another coordinator is to tell them from nodes that join while there is none.
        directory.keep_spares(self._run, [node.id for node in live if node.id not in placed])
        nodes = [node for node in live if node.id in placed]
        self._handles = {node.id: self._actor(node, placed[node.id]) for node in nodes}
        try:
            await asyncio.gather(*(self._admit(node, self._handles[node.id]) for node in nodes))
        except RayError as error:
            raise ControlError(f"an agent cannot be started: {_first_line(error)}") from None

    async def keep(self, control: ControlAddress, *, failed: Callable[[str], None]) -> None:
        """Have the agents serve the run, and look for nodes that join the cluster or are to leave it.

        Args:
            failed: called with the reason when a node is left alone because its agent has failed.
        """
        self._spares = directory.spares(self._run)
        while True:
            # The head of the cluster may be away for a while.
            with suppress(RayError):
                await self._look(control, failed)
            await asyncio.sleep(_POLL_S)

    async def finish(self) -> None:
        """Wait until the agents have ended, which the coordinator has told them; kill those that do not."""
        tasks = self._looked_after.values()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)
        give_back(self._name)

    async def _look(self, control: ControlAddress, failed: Callable[[str], None]) -> None:
        nodes, draining = await asyncio.to_thread(live_nodes), await asyncio.to_thread(draining_nodes)
        placed, are_all_placed = await asyncio.to_thread(bundles_by_node, self._group)
        if self._found is None:
            self._found = set(await asyncio.to_thread(agents_of, self._name))
        if are_all_placed:
            self._lacks_since_s = None
        elif self._lacks_since_s is None:
            self._lacks_since_s = time.monotonic()
        for node in nodes:
            if node.id in self._looked_after:
                if node.id in draining - self._draining and await self._drain(node):
                    self._draining.add(node.id)
            elif node.id in self._left_alone or (node.id in draining and node.id not in self._found):
                continue
            elif node.id in self._found or node.id in placed or self._may_join(node, nodes):
                self._found.discard(node.id)
                handle = self._handles[node.id] = self._actor(node, placed.get(node.id))
                self._looked_after[node.id] = asyncio.create_task(self._serve(node, handle, control, failed))

    def _may_join(self, node: Node, nodes: Collection[Node]) -> bool:
        """Return whether a node of the live `nodes` that has no bundle is to join the run.

        If bundles are not placed, it may get one. But Ray moves the bundles of all lost nodes or none, so if more nodes
        were lost than are free, it gets none.
        """
        now_s, is_spare = time.monotonic(), node.id in self._spares
        first_seen_s = self._first_seen_s.setdefault(node.id, now_s)
        if self._lacks_since_s is None:
            is_needed = not is_spare
        else:
            serving = {each.id for each in nodes} & self._looked_after.keys() - self._left_alone
            is_short = len(serving) < self._request.num_nodes
            is_needed = now_s - max(first_seen_s, self._lacks_since_s) > _PLACING_S and (is_short or not is_spare)
        return is_needed and self._request.is_met_by(node)

    def _actor(self, node: Node, bundle: int | None) -> _Handle:
        """Return the actor of a node, started now if there is none; in its bundle of the group, if that has one."""
        resources = dict(self._request.resources)
        strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy
        if bundle is None:
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        else:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return (
            ray.remote(AgentActor)
            .options(
                name=f"{self._name}-{node.id}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=resources.pop("memory", None),
                resources=resources,
                scheduling_strategy=strategy,
            )
            .remote(self._run.path, workers=self._request.workers_per_node)
        )

    async def _admit(self, node: Node, handle: _Handle) -> None:
        """Have a node see the run directory, or a copy of it.

        Raises:
            ConfigError: it does not, and has to; or the copy cannot be made.
        """
        if await handle.sees.remote(self._mark):
            return
        if self._needs_directory:
            raise ConfigError(
                f"{self._run.path}: node {node.address} does not see this directory, and {self._needs_directory}; put "
                "the run directory on a file system that all nodes share, by --output-dir, or the checkpoints in an "
                "object store, by --store.url, or train without them by --checkpoint.every 0"
            )
        if self._archive is None:
            self._archive = ray.put(directory.packed(self._run))
        if error := await handle.copy_run.remote(self._archive):
            raise ConfigError(f"node {node.address}: {error}")

    async def _serve(self, node: Node, handle: _Handle, control: ControlAddress, failed: Callable[[str], None]) -> None:
        """Have the agent of a node serve the run; if its process dies, another one is started, unless too many have."""
        try:
            await self._admit(node, handle)
            end: AgentEnd = await handle.serve.remote(control)
            error = end.error
            if end.checkpoints is not None:
                await asyncio.to_thread(directory.keep_checkpoints, self._run, end.checkpoints)
            if end.order is None and not error:
                ray.kill(handle)
                raise RayError("it lost the coordinator")
        except RayError as died:
            self._deaths[node.id] += 1
            if self._deaths[node.id] < _MAX_DEATHS:
                await asyncio.sleep(_POLL_S)
                del self._looked_after[node.id]
                return
            error = f"it ended {_MAX_DEATHS} times, at last because: {_first_line(died)}"
        except ChameleonError as refused:
            error = str(refused)
        except OSError as full:
            error = f"its part of the last checkpoint cannot be written: {full}"
        self._left_alone.add(node.id)
        if error:
            failed(f"the agent of node {node.address} failed: {error}")

    async def _drain(self, node: Node) -> bool:
        try:
            is_told: bool = await self._handles[node.id].drain.remote()
        except RayError:
            return False
        if is_told:
            print(f"Ray drains node {node.address}; its workers leave the run", flush=True)
        return is_told


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


Outcome: TypeAlias = RunStatus | ChameleonError
"""How a run ended, or why it could not begin."""

_DRIVER_SILENT_S: Final = 30.0
"""Seconds after which a driver that has not asked for the outcome is lost; then the run ends with a checkpoint."""
_WATCH_S: Final = 1.0
# The process of an actor has threads of Ray, so it cannot be forked.
_SPAWN: Final = get_context("spawn")


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
        self._num_obeyed = 0
        self._coordinator: Coordinator | None = None
        self._interrupts: InterruptCount | None = None
        # When the driver asked last.
        self._heard_s = time.monotonic()
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
            return await begin_run(self._config, run=run, resume=self._resume, beside=beside, processes=_SPAWN)
        except ChameleonError as error:
            return error
        except asyncio.CancelledError:
            return "interrupted" if self._signals[-1] == signal.SIGINT else "terminated"

    def _needs_directory(self) -> str:
        """Return why every node has to see the run directory; nothing if it need not."""
        # Each node writes to that, and reads from it.
        if self._config.store.url:
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
        # The coordinator before this one may have obeyed the first signal.
        self._num_obeyed = 1 if coordinator.state.ending else 0
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
        for number in self._signals[self._num_obeyed :]:
            if number == signal.SIGINT:
                self._interrupts.request("driver")
            else:
                self._coordinator.terminate(number)
        self._num_obeyed = max(self._num_obeyed, len(self._signals))

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
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
