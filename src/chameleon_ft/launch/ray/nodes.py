"""The nodes that a run asks Ray for, and what a cluster lacks of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError

__all__ = ["ClusterOptions", "Node", "NodeRequest"]

_RESOURCES: Final = {"cuda": "GPU", "xpu": "GPU", "npu": "NPU"}
"""Device -> the resource of Ray that counts such devices."""
_MOST_SHOWN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The Ray cluster of a run, and the share of it that the run takes.

    Attributes:
        address: host:port of the head; auto: that of RAY_ADDRESS, or else the cluster that runs on this machine.
        workers_per_node: None spreads the workers over the nodes that there are, or over all of their accelerators.
        cpus_per_worker: CPUs that Ray reserves for a worker.
        resources: custom resources that a node must have, and how much of each is reserved on it.
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
        if self.cpus_per_worker < 0 or self.wait_s < 0:
            raise ConfigError("--cpus-per-worker and --wait: should be 0 or more")
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU") or amount <= 0:
                raise ConfigError(
                    f"--resource {name}={amount:g}: should be a custom resource, and more than 0; CPUs and GPUs follow "
                    "from the workers of a node"
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
    if device is None:
        suitable = [node for node in nodes if node.resources.get("CPU", 0.0) >= options.cpus_per_worker]
        return math.ceil(workers / max(1, len(suitable)))
    most = max((int(node.resources.get(device, 0.0)) for node in nodes), default=0)
    if most == 0:
        raise ConfigError(
            f"the Ray cluster has no node with a {device}, so the workers of a node cannot be counted by them; add "
            "such nodes, give --workers-per-node, or set the device"
        )
    return min(workers, most)


def _described(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
