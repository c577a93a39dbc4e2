"""Communicators: how tensors travel between the ranks of one generation, behind one interface for each backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from chameleon_ft.config import BACKENDS, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.registry import imported
from chameleon_ft.worker.communicators.base import (
    Channel,
    CommunicationError,
    Communicators,
    InFlight,
    Membership,
    Rendezvous,
)

__all__ = [
    "Channel",
    "CommunicationError",
    "Communicators",
    "InFlight",
    "Membership",
    "Rendezvous",
    "communicators_for",
]


def communicators_for(config: RunConfig, *, address: str, device: torch.device) -> Communicators:
    """Return unopened communicators of the backend that `config` names, for a rank that others reach at `address`.

    Raises:
        ConfigError: there are none of this backend.
    """
    backend = BACKENDS[config.backend]
    if backend.missing:
        raise ConfigError(f'backend = "{config.backend}": {backend.missing}; use gloo')
    make: Callable[..., Communicators] = imported(backend.communicators)
    return make(config, address=address, device=device)
