"""The share of a Ray cluster that a run takes; known without Ray itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from chameleon_ft.errors import ConfigError

RESOURCES: Final = {"cuda": "GPU", "xpu": "GPU", "npu": "NPU"}
"""Device -> the resource of Ray that counts such devices."""
# Ray reserves no less.
_MIN_AMOUNT: Final = 0.0001
_FOLLOWING: Final = ("CPU", *dict.fromkeys(RESOURCES.values()), "object_store_memory")
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
        if 0 < self.cpus_per_worker < _MIN_AMOUNT:
            raise ConfigError(f"--cpus-per-worker {self.cpus_per_worker:g}: should be 0, or {_MIN_AMOUNT} or more")
        for name, amount in self.resources.items():
            if name in _FOLLOWING or not _MIN_AMOUNT <= amount < math.inf:
                raise ConfigError(
                    f"--resource {name}={amount:g}: should be a custom resource, or memory in bytes, and "
                    f"{_MIN_AMOUNT} or more; CPUs and accelerators follow from the workers of a node"
                )
