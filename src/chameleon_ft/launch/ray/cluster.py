"""The Ray cluster: connecting to it, its nodes, and the placement group of a run."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import ray
from ray._private.state import state  # Ray's own libraries learn from it which nodes are drained
from ray.exceptions import RayError
from ray.util import get_placement_group, list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group_table

from chameleon_ft.control.wire.address import split_address
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.ray.nodes import Node, NodeRequest
from chameleon_ft.observe import RunDirectory

NAMESPACE: Final = "chameleon"
_KNOCK_S: Final = 5.0
_POLL_S: Final = 1.0
_ANSWER_S: Final = 10.0
_START_S: Final = 60.0  # in which Ray starts the process of an actor
_COMING: Final = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})  # states of an actor
_NO_NODE: Final = {"", "f" * 56}  # of a bundle that is not placed


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
        with suppress(ValueError):  # it has ended
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
        with suppress(RayError):  # its node or its process is lost
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
        group: PlacementGroup = get_placement_group(name)  # of the process of the coordinator before this one
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
