"""The Ray cluster of a run: its nodes, those that the run asks for, their placement group, and the run directory there.

Nodes that do not share the run directory get a copy of it, and their parts of checkpoints are collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import math
import os
import secrets
import shutil
import socket
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import ray

# Ray's own libraries learn from it which nodes are drained.
from ray._private.state import state
from ray.exceptions import RayError
from ray.util import get_placement_group, list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group_table

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.ray.options import RESOURCES, ClusterOptions
from chameleon_ft.protocol.address import split_address
from chameleon_ft.storage.files import RunDirectory, replace_file

_MAX_SHOWN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live node of a Ray cluster.

    Attributes:
        address: its IP address; several nodes on one machine have the same one.
        resources: all that it has, by name, used or not.
    """

    id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """Nodes of one kind.

    Attributes:
        workers_per_node: workers that each of them runs.
        resources: what Ray reserves on each, by name.
    """

    num_nodes: int
    workers_per_node: int
    resources: Mapping[str, float]

    @classmethod
    def of(cls, config: RunConfig, options: ClusterOptions, nodes: Sequence[Node]) -> Self:
        """Return the request of a run, on a cluster that has these nodes at present.

        Raises:
            ConfigError: the workers of a node are to be counted by its accelerators, and no node has one; or nothing is
                to be reserved.
        """
        device = RESOURCES.get(config.device)
        per_node = options.workers_per_node or _usual_workers(config.workers, device, options, nodes)
        resources = {"CPU": per_node * options.cpus_per_worker, **options.resources}
        if device is not None:
            resources[device] = float(per_node)
        resources = {name: amount for name, amount in resources.items() if amount}
        if not resources:
            raise ConfigError("--cpus-per-worker 0: leaves Ray nothing to reserve; give --resource NAME=AMOUNT, too")
        return cls(num_nodes=math.ceil(config.workers / per_node), workers_per_node=per_node, resources=resources)

    def is_met_by(self, node: Node) -> bool:
        """Return whether a node has the resources, used or not."""
        return all(node.resources.get(name, 0.0) >= amount for name, amount in self.resources.items())

    def lack(self, nodes: Sequence[Node]) -> str:
        """Describe what a cluster of these nodes lacks."""
        fitting = sum(map(self.is_met_by, nodes))
        needed = f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} with {_described(self.resources)} each"
        if fitting >= self.num_nodes:
            return f"{needed}: {fitting} of its {len(nodes)} nodes have that, but other work uses some of it"
        lacking = [
            f"{node.address} has only {_described({name: node.resources.get(name, 0.0) for name in self.resources})}"
            for node in nodes
            if not self.is_met_by(node)
        ]
        shown = "; ".join(lacking[:_MAX_SHOWN] + [f"{len(lacking) - _MAX_SHOWN} more"] * (len(lacking) > _MAX_SHOWN))
        return f"{needed}: {fitting} of its {len(nodes)} nodes have that{f' ({shown})' if shown else ''}"


def _usual_workers(workers: int, device: str | None, options: ClusterOptions, nodes: Sequence[Node]) -> int:
    """Return the workers of each node: so few that they are spread widely, or one for each accelerator of a node.

    If not enough nodes have room for so many, it is another number with which all workers have a place, if there is
    one.
    """
    custom = NodeRequest(num_nodes=1, workers_per_node=1, resources=options.resources)
    rooms = [_room(node, device, options) for node in nodes if custom.is_met_by(node)]
    if device is None:
        numbers = [math.ceil(workers / count) for count in range(len(rooms), 0, -1)]
        suitable = sum(room >= 1 for room in rooms)
        fallback = math.ceil(workers / max(1, suitable))
    else:
        numbers = sorted({min(workers, int(room)) for room in rooms if room >= 1}, reverse=True)
        if not numbers:
            lacking = " and ".join([f"a {device}", *options.resources])
            raise ConfigError(
                f"the Ray cluster has no node with {lacking}, so the workers of a node cannot be counted by them; add "
                "such nodes, give --workers-per-node, or set the device"
            )
        fallback = numbers[0]
    fitting = (each for each in numbers if sum(room >= each for room in rooms) >= math.ceil(workers / each))
    return next(fitting, fallback)


def _room(node: Node, device: str | None, options: ClusterOptions) -> float:
    """Return for how many workers a node has accelerators, or CPUs if they compute on those."""
    if device is not None:
        return math.floor(node.resources.get(device, 0.0))
    if options.cpus_per_worker == 0:
        return math.inf
    return math.floor(node.resources.get("CPU", 0.0) / options.cpus_per_worker + 1e-9)


def _described(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


NAMESPACE: Final = "chameleon"
_KNOCK_S: Final = 5.0
_POLL_S: Final = 1.0
_ANSWER_S: Final = 10.0
# Ray starts the process of an actor within this time.
_START_S: Final = 60.0
# An actor in one of these states is about to run.
_COMING: Final = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})
# A bundle that is not placed has one of these as its node.
_NO_NODE: Final = {"", "f" * 56}


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at an address inside the block; of the one that this process uses, if it does.

    Raises:
        ConfigError: no cluster answers there.
    """
    if ray.is_initialized():
        yield
        return
    found = (os.environ.get("RAY_ADDRESS") or "auto") if address == "auto" else address
    _require_answer(found)
    try:
        ray.init(address=found, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise _no_cluster(found, str(error).strip().partition("\n")[0]) from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise ConfigError if nothing listens at an address: Ray itself would try for a minute."""
    if address in ("auto", "local"):
        if address == "local":
            raise ConfigError("--address local: is not a cluster; use `chameleon train` for a run on one machine")
        return
    if "://" in address:
        raise ConfigError(
            f"--address {address}: a Ray client is on no node of the cluster; run this command on one, with its "
            "HOST:PORT, or submit it by `ray job submit`"
        )
    try:
        socket.create_connection(split_address(address), timeout=_KNOCK_S).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from None


def _no_cluster(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--address {address}: no Ray cluster answers ({reason}); start one by `ray start --head`, and give the "
        "HOST:PORT that it prints, or set RAY_ADDRESS"
    )


def name_of(run: RunDirectory) -> str:
    """Return the name in Ray of a run's coordinator and its placement group, with which those of agents begin."""
    return f"chameleon-{run.path.name}-{hashlib.sha256(str(run.path).encode()).hexdigest()[:8]}"


def live_nodes() -> tuple[Node, ...]:
    """Return the nodes that are alive, those that are to leave included."""
    return tuple(
        Node(id=node["NodeID"], address=node["NodeManagerAddress"], resources=node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    )


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are to leave the cluster."""
    return frozenset(state.get_draining_nodes())


def agents_of(name: str) -> frozenset[str]:
    """Return the ids of the nodes that have an agent of the run of that name in Ray."""
    actors = (actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE)
    return frozenset(actor.removeprefix(f"{name}-") for actor in actors if actor.startswith(f"{name}-"))


def give_back(name: str) -> None:
    """Kill the agents of the run of that name in Ray, and remove its placement group."""
    for node in agents_of(name):
        # The actor has ended.
        with suppress(ValueError):
            ray.kill(ray.get_actor(f"{name}-{node}", namespace=NAMESPACE))
    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))


def remove_leftovers(name: str) -> None:
    """Remove the actors and the placement group that an earlier start of the run of that name in Ray has left.

    Raises:
        ConfigError: that start is live, as its coordinator says.
    """
    with suppress(ValueError):
        coordinator = ray.get_actor(name, namespace=NAMESPACE)
        is_coming = state.actor_table(coordinator._actor_id.hex()).get("State") in _COMING
        # Its node or its process is lost.
        with suppress(RayError):
            if ray.get(coordinator.outcome.remote(0.0), timeout=_START_S if is_coming else _ANSWER_S) is None:
                raise live_run(name)
        ray.kill(coordinator)
    give_back(name)
    until_s = time.monotonic() + _ANSWER_S
    while time.monotonic() < until_s and _is_taken(name):
        time.sleep(_POLL_S / 10)


def live_run(name: str) -> ConfigError:
    """Return the error of a start of the run of that name in Ray, which another start coordinates."""
    return ConfigError(f"actor {name}: coordinates this run already; wait until it is over, or stop it")


def _is_taken(name: str) -> bool:
    """Return whether an actor or the placement group of a run still has its name."""
    actors = (actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE)
    if any(actor == name or actor.startswith(f"{name}-") for actor in actors):
        return True
    with suppress(ValueError):
        get_placement_group(name)
        return True
    return False


def bundles_by_node(group: PlacementGroup) -> tuple[dict[str, int], bool]:
    """Return the index of the bundle on each node that has one, by node id, and whether all are placed."""
    table = placement_group_table(group)
    placed = {node: index for index, node in table["bundles_to_node_id"].items() if node not in _NO_NODE}
    return placed, table["state"] == "CREATED"


async def reserved(request: NodeRequest, *, name: str, wait_s: float) -> PlacementGroup:
    """Return the placement group of a run, of that name, once all of its nodes are there.

    It is detached, because Ray would remove it, with the agents, when the process of the coordinator dies.

    Raises:
        ConfigError: the cluster has too few resources, also after the wait.
    """
    try:
        # The process of the coordinator before this one may have made it.
        group: PlacementGroup = get_placement_group(name)
    except ValueError:
        bundles = [dict(request.resources)] * request.num_nodes
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=name, lifetime="detached")
    until_s, has_said = time.monotonic() + wait_s, False
    while not await asyncio.to_thread(group.wait, _POLL_S):
        lack = request.lack(live_nodes())
        if time.monotonic() > until_s:
            raise ConfigError(
                f"the Ray cluster has too few resources for {lack}; add nodes, ask for less by --workers-per-node, or "
                "wait longer by --wait"
            )
        if not has_said:
            has_said = True
            print(f"waiting up to {wait_s:g} s for {lack}", flush=True)
    return group


_MARK: Final = ".mark"
_SPARES: Final = ".spare-nodes"
# Marks the directories that `copy_to` has made.
_COPY: Final = ".copy"


def mark(run: RunDirectory) -> str:
    """Write a mark into a run directory, and return it, by which another node tells that it is this directory."""
    found = secrets.token_hex(8)
    replace_file(run.path / _MARK, found, mode=0o644)
    return found


def sees(run: RunDirectory, expected: str) -> bool:
    """Return whether this node sees the run directory with that mark."""
    with contextlib.suppress(OSError):
        return (run.path / _MARK).read_text(encoding="utf-8") == expected
    return False


def keep_spares(run: RunDirectory, nodes: list[str]) -> None:
    """Note the ids of the nodes that were there when the run began, and that it does not need."""
    replace_file(run.path / _SPARES, json.dumps(nodes), mode=0o644)


def spares(run: RunDirectory) -> set[str]:
    """Return the ids of the nodes that were there when the run began, and that it did not need."""
    with contextlib.suppress(OSError, ValueError):
        return set(json.loads((run.path / _SPARES).read_text(encoding="utf-8")))
    return set()


def packed(run: RunDirectory) -> bytes:
    """Return an archive of the files that ranks read."""
    return _archive(run, [run.config_file, run.start_plan_file, run.profile_file, run.path / "data", run.tls])


def copy_to(run: RunDirectory, archive: bytes) -> None:
    """Make the run directory on this node, from an archive of it.

    Raises:
        ConfigError: the path is taken by something else, or cannot be written.
    """
    copy = run.path / _COPY
    if run.path.exists() and not copy.exists():
        raise ConfigError(f"{run.path}: exists on a node that does not share it with the others; take another one")
    try:
        shutil.rmtree(run.path, ignore_errors=True)
        for directory in (run.path, run.checkpoints, run.logs):
            directory.mkdir(parents=True)
        copy.touch()
        _extract(run.path, archive)
    except OSError as error:
        raise ConfigError(f"{run.path}: cannot be made on a node: {error.strerror or error}") from None


def packed_checkpoints(run: RunDirectory) -> bytes | None:
    """Return an archive of the parts of checkpoints that were written to a copy of the run directory.

    None if this is no copy, or has none.
    """
    if not (run.path / _COPY).exists() or not any(run.checkpoints.iterdir()):
        return None
    return _archive(run, [run.checkpoints])


def keep_checkpoints(run: RunDirectory, archive: bytes) -> None:
    """Add the parts of checkpoints of another node."""
    _extract(run.path, archive)


def _archive(run: RunDirectory, paths: list[Path]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in paths:
            if path.exists():
                archive.add(path, arcname=path.relative_to(run.path))
    return content.getvalue()


def _extract(directory: Path, content: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(directory, filter="data")
