"""A worker's control connection has closed, or its heartbeats have stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from chameleon_ft.control.detectors.base import ConnectionEnded, Finding, Lost, Signal

__all__ = ["ConnectionDetector"]


@dataclass(frozen=True, slots=True)
class ConnectionDetector:
    """Finds a worker lost when its control connection ends. The heartbeats themselves are the server's pings."""

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        if isinstance(signal, ConnectionEnded):
            cause = "control connection closed" if signal.how == "connection" else "no heartbeat"
            return self, (Lost(signal.worker, signal.how, cause),)
        return self, ()
