"""The client's end of the control connections."""

from __future__ import annotations

from pathlib import Path

from websockets.asyncio.client import connect

from chameleon_ft.control.wire.address import bearer, websocket_url
from chameleon_ft.control.wire.tls import tls_context

__all__ = ["control_connection"]

# The coordinator's own pings find a lost peer fast. These only end a peer that the network has cut off, which the
# coordinator has given up long before.
_PING_EVERY_S = 10.0
_PING_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0


def control_connection(coordinator: str, token: str, *, tls: Path | None = None) -> connect:
    """Return the connection to the coordinator at host:port, to be awaited or entered.

    It closes by itself after twenty seconds without an answer of the coordinator.

    Args:
        tls: directory for `tls_context`; None: no TLS.

    Raises:
        ConfigError: the directory cannot be used.
    """
    return connect(
        websocket_url(coordinator, tls=tls is not None),
        ssl=tls_context(tls),
        additional_headers=bearer(token),
        ping_interval=_PING_EVERY_S,
        ping_timeout=_PING_TIMEOUT_S,
        close_timeout=_CLOSE_TIMEOUT_S,
        compression=None,
        max_size=None,
        proxy=None,
    )
