"""The agents of a run on Ray: one for each of its nodes, those that join the cluster later included."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final, TypeAlias

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.launch.ray import directory
from chameleon_ft.launch.ray.agent import AgentActor, AgentEnd
from chameleon_ft.launch.ray.cluster import NAMESPACE, agents_of, bundles_by_node, draining_nodes, give_back, live_nodes
from chameleon_ft.launch.ray.nodes import Node, NodeRequest
from chameleon_ft.observe import ControlAddress, RunDirectory

_POLL_S: Final = 1.0
_MOST_DEATHS: Final = 3
"""Processes of agents of one node that may die; then the node is left alone."""
_PLACING_S: Final = 15.0  # in which Ray places a bundle on a node that joins
_END_S: Final = 15.0  # longer than an agent gives its ranks

_Handle: TypeAlias = Any  # of an AgentActor; Ray makes its methods when it runs


class Agents:
    """Keeps an agent on every node of the placement group, and on every node that joins the cluster later.

    Agents are detached actors with names, so that they outlive the process of the coordinator, and the next one finds
    them.

    Args:
        name: of the run in Ray.
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
        self._handles: dict[str, _Handle] = {}  # by node id
        self._looked_after: dict[str, asyncio.Task[None]] = {}  # likewise
        self._draining: set[str] = set()  # nodes whose agents know that they are to leave
        self._spares: set[str] = set()  # nodes that were there before the run, which did not need them
        self._left_alone: set[str] = set()  # nodes whose agents have failed
        self._first_seen_s: dict[str, float] = {}  # by node id
        self._lacks_since_s: float | None = None  # when a bundle was found that is not placed; None if all are
        self._deaths: Counter[str] = Counter()
        self._found: set[str] | None = None  # nodes that had an agent when this process began to look

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
            with suppress(RayError):  # the head of the cluster may be away for a while
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
            if self._deaths[node.id] < _MOST_DEATHS:
                await asyncio.sleep(_POLL_S)
                del self._looked_after[node.id]
                return
            error = f"it ended {_MOST_DEATHS} times, at last because: {_first_line(died)}"
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
