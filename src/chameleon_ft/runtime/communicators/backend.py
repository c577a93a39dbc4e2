"""The choice of a backend."""

from __future__ import annotations

from chameleon_ft.config import RunConfig
from chameleon_ft.runtime.communicators.base import Communicators

__all__ = ["communicators_for"]


def communicators_for(config: RunConfig, *, address: str) -> Communicators:
    """Return unopened communicators of the backend that `config` names.

    Args:
        address: address of this host by which the other ranks reach it.
    """
    if config.backend == "nccl":
        from chameleon_ft.runtime.communicators.nccl import NcclCommunicators

        return NcclCommunicators(timeouts=config.timeouts)
    from chameleon_ft.runtime.communicators.gloo import GlooCommunicators

    return GlooCommunicators(timeouts=config.timeouts, address=address)
