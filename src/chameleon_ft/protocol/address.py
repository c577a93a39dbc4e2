"""How the control connection is addressed and authorized.

Mutual TLS of the control connections: both ends present a certificate that one authority has signed.

A directory holds the authority's certificate in `ca.pem`, and the own certificate and private key in `cert.pem` and
`key.pem`. Names in certificates are not compared with addresses: any process with a certificate of this authority
belongs to the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import socket
import ssl
import struct
import subprocess
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Self

from chameleon_ft.errors import ConfigError
from chameleon_ft.storage.files import ControlAddress

AUTO_HOST: Final = "auto"
"""The value of `control.host` for the address at which other machines reach this one."""

TOKEN_VARIABLE: Final = "CHAMELEON_TOKEN"
"""Environment variable with the join token."""

_NO_HOST: Final = re.compile(r"[\s\x00-\x1f/?#@%\[\]\\]")
_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAccess:
    """How a process reaches the coordinator of a run, and is admitted.

    Attributes:
        address: host:port.
        token: the join token of the run.
        tls: directory for `tls_context`; None: no TLS.
        others: addresses of coordinators that may lead instead.
        patience_s: how long to look for one that leads at first; later that is as the coordinator says.
        run: the run directory, if this host can read it: it has the address of a coordinator that no other has told.
    """

    address: str
    token: str = field(repr=False)
    tls: Path | None = None
    others: tuple[str, ...] = ()
    patience_s: float = 0.0
    run: Path | None = None

    @classmethod
    def of(cls, control: ControlAddress) -> Self:
        return cls(address=control.address, token=control.token, tls=control.tls)


def split_address(address: str) -> tuple[str, int]:
    """Split host:port. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") == host.endswith("]") else ""
    if not (_is_host(host) and port.isdecimal() and len(port) < 6 and int(port) < 65536):
        raise ConfigError(
            f"address {address!r}: write it as HOST:PORT, such as 10.0.0.1:29400, or [fd00::1]:29400 for IPv6"
        )
    return host, int(port)


def _is_host(text: str) -> bool:
    """Return whether a text may be an address or the name of a host; resolvers and URLs do not take all others."""
    if ":" in text:
        with contextlib.suppress(ValueError):
            return ip_address(text).version == 6
        return False
    with contextlib.suppress(UnicodeError):
        return text.encode("idna").isascii() and _NO_HOST.search(text) is None and bool(text)
    return False


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


def own_address(host: str | None, *, towards: str) -> str:
    """Return the address of this machine: that of `host` if it is given, see `address_of_host`, or of the route.

    Args:
        towards: host:port of the coordinator.
    """
    return address_of_host(host) if host else local_address_towards(towards)


def address_of_host(host: str) -> str:
    """Return the address that `host` stands for on this machine.

    Args:
        host: an address or host name, returned as it is; the name of a network interface, such as eth0; or `AUTO_HOST`,
            for the source address of the default route, of IPv6 if there are no addresses of IPv4, or of the only
            interface that is not loopback.

    Raises:
        ConfigError: the interface has no IPv4 address, or `AUTO_HOST` is ambiguous.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    if host in interfaces:
        if (address := _interface_address(host)) is None:
            raise ConfigError(f"interface {host!r}: has no IPv4 address; give the address to use in its place")
        return address
    if host != AUTO_HOST:
        return host
    try:
        # The name of a machine often resolves to 127.0.1.1, so the routing table is asked instead. The addresses are
        # those of the documentation (RFC 5737 and 3849), and nothing is sent.
        return local_address_towards("192.0.2.1:9")
    except ConfigError:
        pass
    addresses = {name: address for name in interfaces if (address := _interface_address(name)) is not None}
    own = {name: address for name, address in addresses.items() if not address.startswith("127.")}
    if len(own) == 1:
        return next(iter(own.values()))
    if not own:
        with contextlib.suppress(ConfigError):  # a machine that has IPv6 alone
            return local_address_towards("[2001:db8::1]:9")
    found = ", ".join(f"{name} ({address})" for name, address in own.items()) or "none"
    raise ConfigError(
        f'host "{AUTO_HOST}": this machine has no default route, and its network interfaces with an address are: '
        f"{found}; name one, or give the address at which the other machines reach this one"
    )


def _interface_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


_FILES = ("ca.pem", "cert.pem", "key.pem")


def tls_context(directory: Path | None, *, server: bool = False) -> ssl.SSLContext | None:
    """Return the context of one end of the control connections; None without a directory.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """
    if directory is None:
        return None
    authority, certificate, key = (directory / name for name in _FILES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except OSError as error:  # which errors of the format are too
        raise ConfigError(
            f"TLS directory {directory}: {error.strerror or error}; it must hold {', '.join(_FILES)}, "
            "readable by this user, with the key of that certificate"
        ) from None
    return context


def generate_certificates(directory: Path) -> None:
    """Make the directory for one run: a new certificate that is its own authority, and that all its processes share.

    Raises:
        ConfigError: there is no openssl command, or it fails.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    authority, certificate, key = (directory / name for name in _FILES)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    usage = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    names = ["-days", "3650", "-subj", "/CN=chameleon", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run([*command, *usage, *names], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise ConfigError(
            'control.tls = "generate": there is no openssl command on this host; install it, or give a directory with '
            "certificates"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f'control.tls = "generate": openssl failed: {error.stderr.strip()}') from None
    key.chmod(0o600)
    shutil.copy(certificate, authority)
