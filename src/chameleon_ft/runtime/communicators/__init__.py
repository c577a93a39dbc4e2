"""Communicators: how tensors travel between the ranks of one generation, behind one interface for each backend."""

from __future__ import annotations

from chameleon_ft.runtime.communicators.backend import communicators_for
from chameleon_ft.runtime.communicators.base import (
    Channel,
    CommunicationError,
    Communicators,
    InFlight,
    Membership,
    open_store,
)

__all__ = [
    "Channel",
    "CommunicationError",
    "Communicators",
    "InFlight",
    "Membership",
    "communicators_for",
    "open_store",
]
