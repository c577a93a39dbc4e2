"""How the control connection is addressed and authorized."""

from __future__ import annotations

import socket
from pathlib import Path

from chameleon_ft.errors import ConfigError

__all__ = [
    "bearer",
    "join_address",
    "local_address_towards",
    "require_worker_ports",
    "split_address",
    "websocket_url",
]

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def split_address(address: str) -> tuple[str, int]:
    """Split host:port. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"address {address!r}: write it as HOST:PORT, such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Write host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def websocket_url(address: str, *, tls: bool = False) -> str:
    """Return the URL of the coordinator at host:port."""
    return f"{'wss' if tls else 'ws'}://{join_address(*split_address(address))}/"


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries the join token."""
    return {"Authorization": f"Bearer {token}"}


def require_worker_ports(allowed: str, *, kernel_range: Path = _KERNEL_RANGE) -> None:
    """Raise ConfigError if this host may give a listening worker another port than those of `control.worker_ports`.

    The communication libraries listen on ports that the kernel picks from its own range, and offer no choice.
    """
    if not allowed:
        return
    first, last = map(int, kernel_range.read_text(encoding="ascii").split())
    low, high = map(int, allowed.split("-"))
    if first < low or last > high:
        raise ConfigError(
            f"control.worker_ports = {allowed}: this host gives workers ports from {first} to {last}; "
            f'run `sysctl -w net.ipv4.ip_local_port_range="{low} {high}"` on it, or in the network namespace of the '
            "workers, or allow these ports"
        )


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
