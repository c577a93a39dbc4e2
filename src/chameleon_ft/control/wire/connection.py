"""The control connection as ranks and agents open it."""

from __future__ import annotations

from websockets.asyncio.client import connect

from chameleon_ft.control.wire.address import bearer, websocket_url

__all__ = ["control_connection"]

# The coordinator's own pings find a lost peer, fast. These only end what the network has cut off from it, which has
# been given up long before: they can be patient.
_PING_EVERY_S = 10.0
_PING_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0


def control_connection(coordinator: str, token: str) -> connect:
    """Return the connection to the coordinator at host:port, to be awaited or entered.

    It closes by itself once the coordinator has not been heard of for twenty seconds.
    """
    return connect(
        websocket_url(coordinator),
        additional_headers=bearer(token),
        ping_interval=_PING_EVERY_S,
        ping_timeout=_PING_TIMEOUT_S,
        close_timeout=_CLOSE_TIMEOUT_S,
        compression=None,
        max_size=None,
        proxy=None,
    )
