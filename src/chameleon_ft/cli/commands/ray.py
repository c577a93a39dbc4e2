"""`chameleon ray`: train on the nodes of a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from chameleon_ft.cli.arguments import StartArguments, parse_start
from chameleon_ft.errors import ConfigError
from chameleon_ft.session.start import prepare_run


@dataclass(frozen=True, kw_only=True)
class RayArguments(StartArguments):
    """Train on the nodes of a Ray cluster. Run it on one of them, or submit it by `ray job submit`.

    The coordinator is an actor on this node, which Ray restarts if it dies, and each node of the run has an actor with
    its workers. Nodes that join the cluster later join the run, and nodes that Ray drains leave it. Ctrl-C, SIGTERM and
    `ray job stop` end the run with a checkpoint; a second signal ends it at once.

    Every field that is set by hand is a flag. A flag overrides CONFIG; fields that neither sets have the defaults
    shown here.
    """

    address: Annotated[str, "HOST:PORT|auto"] = "auto"
    """Address of the cluster; auto: that in RAY_ADDRESS, or else the cluster that this machine belongs to."""
    workers_per_node: int | None = None
    """Workers on each node; by default as many as it has accelerators, or on CPUs, all workers spread evenly."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray reserves for each worker."""
    resource: Annotated[tuple[str, ...], "NAME=AMOUNT"] = ()
    """Custom resource that a node must have, and how much of it is reserved; repeat the flag for several."""
    wait: float = 300.0
    """Seconds to wait for nodes with these resources; 0 fails at once if they are not there."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(RayArguments, arguments, command="ray")
    from chameleon_ft.launch.ray import ClusterOptions, train

    options = ClusterOptions(
        address=given.address,
        workers_per_node=given.workers_per_node,
        cpus_per_worker=given.cpus_per_worker,
        resources=dict(map(_resource, given.resource)),
        wait_s=given.wait,
    )
    prepared = prepare_run(given.request(flags))
    return prepared.start(partial(train, options=options))


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        found = float(amount)
    except ValueError:
        found = 0.0
    if not name or not 0 < found < math.inf:
        raise ConfigError(f"--resource {text}: should be NAME=AMOUNT, such as trainer=1, and more than 0")
    return name, found
