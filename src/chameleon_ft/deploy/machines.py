"""The machines that a scheduler is asked for, and the address of a coordinator whose machine it chooses."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

from chameleon_ft.config import MOST_WORKERS, RunConfig
from chameleon_ft.errors import ConfigError

_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines with equally many workers."""

    nodes: int
    workers_per_node: int

    @classmethod
    def for_run(cls, config: RunConfig, *, nodes: int | None, workers_per_node: int) -> Self:
        """Return the machines of a run; those that its workers need if `nodes` is None.

        Raises ConfigError if there are too few or too many. Workers beyond those of the run join it as newcomers.
        """
        for flag, value in (("--workers-per-node", workers_per_node), ("--nodes", nodes)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: should be 1 or more")
        needed = -(-config.workers // workers_per_node)
        if nodes is not None and nodes < needed:
            raise ConfigError(
                f"--nodes {nodes}: the run begins with {config.workers} workers, and {nodes} machines with "
                f"{workers_per_node} each have {nodes * workers_per_node}; take --nodes {needed}, or fewer workers"
            )
        if workers_per_node > MOST_WORKERS or (nodes is not None and nodes * workers_per_node > MOST_WORKERS):
            raise ConfigError(
                f"--workers-per-node {workers_per_node}{'' if nodes is None else f' --nodes {nodes}'}: a run has "
                f"{MOST_WORKERS} workers at most"
            )
        return cls(nodes or needed, workers_per_node)


def with_reachable_host(config: RunConfig, *, chooser: str) -> RunConfig:
    """Return `config` with a `control.host` that holds on any machine, because a scheduler chooses it.

    Args:
        chooser: name of the scheduler, for the message.

    Raises:
        ConfigError: `control.host` is the address of one machine.
    """
    host = config.control.host
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        is_loopback = host == "localhost"
    else:
        is_loopback = address.is_loopback
        if not is_loopback:
            raise ConfigError(
                f'control.host = "{host}": {chooser} chooses the machine of the coordinator; set auto, or the name of '
                "a network interface that all machines have"
            )
    if not is_loopback:
        return config
    return config.model_copy(update={"control": config.control.model_copy(update={"host": _AUTO})})
