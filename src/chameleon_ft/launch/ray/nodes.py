"""The nodes that a run asks Ray for, and what a cluster lacks of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError

_RESOURCES: Final = {"cuda": "GPU", "xpu": "GPU", "npu": "NPU"}
"""Device -> the resource of Ray that counts such devices."""
_MOST_SHOWN: Final = 4
_LEAST_AMOUNT: Final = 0.0001  # that Ray reserves
_FOLLOWING: Final = ("CPU", *dict.fromkeys(_RESOURCES.values()), "object_store_memory")
"""Resources that are not given by name: they follow from the workers of a node, or Ray does not reserve them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The Ray cluster of a run, and the share of it that the run takes.

    Attributes:
        address: host:port of the head; auto: that of RAY_ADDRESS, or else the cluster that runs on this machine.
        workers_per_node: None spreads the workers over the nodes that there are, or over all of their accelerators.
        cpus_per_worker: CPUs that Ray reserves for a worker.
        resources: custom resources that a node must have, and how much of each is reserved on it; memory in bytes.
        wait_s: how long to wait for nodes with all of that.
    """

    address: str = "auto"
    workers_per_node: int | None = None
    cpus_per_worker: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        if self.workers_per_node is not None and self.workers_per_node < 1:
            raise ConfigError(f"--workers-per-node {self.workers_per_node}: should be 1 or more")
        if not (0 <= self.cpus_per_worker < math.inf and self.wait_s >= 0):
            raise ConfigError("--cpus-per-worker and --wait: should be 0 or more")
        if 0 < self.cpus_per_worker < _LEAST_AMOUNT:
            raise ConfigError(f"--cpus-per-worker {self.cpus_per_worker:g}: should be 0, or {_LEAST_AMOUNT} or more")
        for name, amount in self.resources.items():
            if name in _FOLLOWING or not _LEAST_AMOUNT <= amount < math.inf:
                raise ConfigError(
                    f"--resource {name}={amount:g}: should be a custom resource, or memory in bytes, and "
                    f"{_LEAST_AMOUNT} or more; CPUs and accelerators follow from the workers of a node"
                )


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
        device = _RESOURCES.get(config.device)
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
        shown = "; ".join(lacking[:_MOST_SHOWN] + [f"{len(lacking) - _MOST_SHOWN} more"] * (len(lacking) > _MOST_SHOWN))
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
