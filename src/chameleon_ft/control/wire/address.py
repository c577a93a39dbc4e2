"""How the control connection is addressed and authorized."""

from __future__ import annotations

import socket

from chameleon_ft.errors import ConfigError

__all__ = ["bearer", "join_address", "local_address_towards", "split_address", "websocket_url"]


def split_address(address: str) -> tuple[str, int]:
    """Split host:port. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"address {address!r}: write it as HOST:PORT, such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Write host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def websocket_url(address: str) -> str:
    """Return the URL of the coordinator at host:port."""
    return f"ws://{join_address(*split_address(address))}/"


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries the join token."""
    return {"Authorization": f"Bearer {token}"}


def local_address_towards(address: str) -> str:
    """Return this host's own address on the route to host:port. Sends nothing. Raises ConfigError."""
    host, port = split_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"address {address!r}: there is no route to it from here: {error.strerror or error}"
        ) from None
