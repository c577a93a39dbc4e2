"""Arguments about hosts that `chameleon plan` and `chameleon simulate` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, Optional, Union

import tyro

from chameleon_ft.cli.arguments import metavar
from chameleon_ft.config import MOST_WORKERS
from chameleon_ft.errors import ConfigError

_MOST_MEMORY: Final = 1e9


@dataclass(frozen=True)
class HostArguments:
    """The hosts of the workers, and the state that they keep."""

    workers_per_host: int = 8
    """Workers per host. Links between hosts are slower, and a host fails as a whole."""
    host_memory: Annotated[
        Optional[float],  # noqa: UP045
        metavar(
            "FLOAT",
            "Memory of a host that is available for its workers, in 10^9 bytes: snapshots that would take more than "
            "half of it are not taken. Unlimited if not given.",
        ),
    ] = None
    optimizer_redundancy: Annotated[
        Optional[Union[int, Literal["all"]]],  # noqa: UP007, UP045
        metavar(
            "INT|{all}",
            "Holders of a layer that keep the same part of its optimizer state; by default that of the configuration, "
            "or 2 without one.",
        ),
    ] = None

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory of a host; None if not given. Raises ConfigError if it is no possible number."""
        if self.host_memory is None:
            return None
        if not 1e-9 <= self.host_memory <= _MOST_MEMORY:
            raise ConfigError(
                f"--host-memory {self.host_memory:g}: should be a number of 10^9 bytes above 0, "
                f"{_MOST_MEMORY:g} at most"
            )
        return round(self.host_memory * 1e9)

    def owners(self, usual: int | None) -> int | None:
        """Return how many workers own each slice of the optimizer's state; None if every holder keeps all of it.

        Args:
            usual: the number if none is given.

        Raises:
            ConfigError: the given number is below one.
        """
        if self.optimizer_redundancy is None:
            return usual
        if self.optimizer_redundancy == "all":
            return None
        if self.optimizer_redundancy < 1:
            raise ConfigError(f"--optimizer-redundancy {self.optimizer_redundancy}: should be 1 or more")
        return self.optimizer_redundancy


USUAL_HOSTS: Final = HostArguments()

Hosts = Annotated[HostArguments, tyro.conf.OmitArgPrefixes]
"""Type of a dataclass field that holds these flags; on the command line they have no prefix."""


def hosts_of(workers: int, per_host: int) -> dict[int, str]:
    """Return the host of each worker. Raises ConfigError if a host would have no worker, or there are too many."""
    if per_host < 1:
        raise ConfigError(f"--workers-per-host {per_host}: should be 1 or more")
    if workers > MOST_WORKERS:
        raise ConfigError(f"--workers {workers}: should be {MOST_WORKERS} at most")
    return {worker: f"host{worker // per_host}" for worker in range(workers)}
