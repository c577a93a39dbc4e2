"""The link to another host: a process there answers, for as long as it is wanted, and one here measures."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from chameleon_ft.cluster import Link
from chameleon_ft.config import RunConfig
from chameleon_ft.control.wire.address import join_address, local_address_towards, split_address
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.runtime.profiling.exchange import Exchange
from chameleon_ft.runtime.profiling.links import link_of
from chameleon_ft.runtime.profiling.members import Member, memberships, rendezvous_store, run_members

__all__ = ["measure_link_to", "serve_link"]

_MOST_BYTES = 1 << 16
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One line of JSON, from the one that measures to the one that answers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    store: str
    backend: Literal["gloo", "nccl"]
    device: Literal["cpu", "cuda"]
    exchange: Exchange


_REQUEST = TypeAdapter(_Request)


def serve_link(address: str, *, tell: Callable[[str], None]) -> None:
    """Listen on host:port and answer whoever measures, one after the other, until interrupted.

    Raises:
        ConfigError: it is not possible to listen there.
    """
    host, port = split_address(address)
    try:
        listener = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise ConfigError(f"--serve {address}: cannot listen there: {error.strerror}") from None
    with listener:
        tell(f"answering on {join_address(host, listener.getsockname()[1])}; Ctrl-C ends it")
        while True:
            connection, (peer, *_) = listener.accept()
            with connection:
                try:
                    _answer(connection)
                    tell(f"{peer} has measured the link to here")
                except (ChameleonError, OSError) as error:
                    tell(f"{peer} could not measure the link to here: {error}")


def measure_link_to(peer: str, config: RunConfig, *, message_bytes: tuple[int, ...], repeats: int) -> Link:
    """The link to the host where `serve_link` answers on `peer`, host:port.

    Raises:
        ConfigError: nobody answers there.
        ControlError: the two processes cannot exchange messages.
    """
    here = local_address_towards(peer)
    exchange = Exchange(message_bytes=message_bytes, repeats=repeats)
    assert config.device != "emulated"
    with rendezvous_store(here, timeout_s=config.timeouts.rendezvous_s) as store:
        request = _Request(store=store, backend=config.backend, device=config.device, exchange=exchange)
        try:
            connection = socket.create_connection(split_address(peer), timeout=_CONNECT_S)
        except OSError as error:
            raise ConfigError(
                f"--peer {peer}: nobody answers there ({error}); start `chameleon profile --serve {peer}` on that host"
            ) from None
        with connection:
            connection.sendall(_REQUEST.dump_json(request) + b"\n")
            membership = memberships(2, (), store=store)[0]
            found = run_members(
                [Member(config=config, membership=membership, exchange=exchange, address=here, local_index=0)]
            )
    return link_of(found)


def _answer(connection: socket.socket) -> None:
    connection.settimeout(_CONNECT_S)
    with connection.makefile("rb") as lines:
        line = lines.readline(_MOST_BYTES)
    try:
        request = _REQUEST.validate_json(line)
    except (ValidationError, ConfigError):
        raise ControlError("what it asked for was not understood; is it of the same version?") from None
    run_members(
        [
            Member(
                config=RunConfig(backend=request.backend, device=request.device),
                membership=memberships(2, (), store=request.store)[1],
                exchange=request.exchange,
                address=local_address_towards(request.store),
                local_index=0,
            )
        ]
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
