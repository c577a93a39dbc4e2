"""Measures the link between two processes, of this host or of two, and reductions over processes of this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from chameleon_ft.cluster import Link
from chameleon_ft.config import DEVICES, BackendName, DeviceName, RunConfig
from chameleon_ft.control.wire.address import join_address, local_address_towards, split_address
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.runtime.communicators.store import serve_store
from chameleon_ft.runtime.profiling.exchange import Exchange, MeasuredLinks, Member, run_members
from chameleon_ft.runtime.profiling.peer import PeerConnection

_LOCAL_HOST: Final = "127.0.0.1"
_MESSAGE_BYTES: Final = (64, 4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_REDUCED_BYTES: Final = (1 << 16, 1 << 20, 1 << 23)
_MOST_REDUCING: Final = 8
_ACCEPTED: Final = "accepted"
_NOT_UNDERSTOOD: Final = "the other end is of another version"
_CONNECT_S: Final = 10.0


def message_sizes(boundary_bytes: Collection[int]) -> tuple[int, ...]:
    """Return sizes from a few bytes to many, and those of the messages that a run will send."""
    return tuple(sorted({*_MESSAGE_BYTES, *(size for size in boundary_bytes if 0 < size < _MESSAGE_BYTES[-1])}))


def local_backend(config: RunConfig) -> RunConfig:
    """Return `config` for two processes of this host: over gloo if they have to share its accelerator."""
    if DEVICES[config.device].is_accelerator and torch.accelerator.device_count() < 2:
        return config.model_copy(update={"backend": "gloo", "share_devices": True})
    return config


def measure_local_links(config: RunConfig, *, message_bytes: tuple[int, ...], repeats: int) -> MeasuredLinks:
    """Time messages between two processes, and all-reduces over as many as will hold the same layer, up to 8.

    Raises:
        ControlError: the processes cannot reach each other.
    """
    config = local_backend(config)
    most = min(max(2, config.parallel.dp), _MOST_REDUCING)
    if DEVICES[config.device].is_accelerator and not config.share_devices:
        most = min(most, torch.accelerator.device_count())
    exchange = Exchange(
        message_bytes=message_bytes,
        reduced_bytes=_REDUCED_BYTES,
        reducing=tuple(range(2, most + 1)),
        repeats=repeats,
    )
    with serve_store(_LOCAL_HOST) as port:
        store = join_address(_LOCAL_HOST, port)
        key = os.urandom(32)
        member = partial(
            Member, config=config, exchange=exchange, workers=most, store=store, key=key, address=_LOCAL_HOST
        )
        return _measured([member(worker=worker, local_index=worker) for worker in range(most)])


def measure_link_to(peer: str, config: RunConfig, *, token: str, message_bytes: tuple[int, ...], repeats: int) -> Link:
    """Measure the link to the host where `serve_link` answers on `peer`, host:port, with the same token.

    Raises:
        ConfigError: no process answers there.
        ControlError: the two processes have different tokens, or cannot exchange messages.
    """
    here = local_address_towards(peer)
    exchange = Exchange(message_bytes=message_bytes, repeats=repeats)
    request = _Request(backend=config.backend, device=config.device, exchange=exchange)
    try:
        connection = socket.create_connection(split_address(peer), timeout=_CONNECT_S)
    except OSError as error:
        raise ConfigError(
            f"--peer {peer}: no process answers there ({error}); start `chameleon profile --serve {peer}` on that host"
        ) from None
    with connection:
        try:
            authenticated = PeerConnection.opened(connection, token, answers=False)
            authenticated.send(_REQUEST.dump_json(request).decode())
            if (refusal := authenticated.receive()) != _ACCEPTED:
                raise ControlError(f"--peer {peer}: {refusal}")
        except OSError as error:
            raise ControlError(
                f"--peer {peer}: the other end does not answer ({error}); set CHAMELEON_TOKEN here to the token that "
                "it has printed"
            ) from None
        connection.settimeout(None)
        return _measured([_member(config, exchange, authenticated, worker=0, address=here)]).link


def _member(config: RunConfig, exchange: Exchange, connection: PeerConnection, *, worker: int, address: str) -> Member:
    return Member(
        config=config,
        exchange=exchange,
        worker=worker,
        workers=2,
        peer=connection,
        key=connection.key,
        address=address,
    )


def _measured(members: Sequence[Member]) -> MeasuredLinks:
    found = run_members(members)
    assert found is not None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The first message, from the process that measures to the one that answers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    backend: BackendName
    device: DeviceName
    exchange: Exchange


_REQUEST: Final = TypeAdapter(_Request)


def serve_link(address: str, *, token: str, tell: Callable[[str], None]) -> None:
    """Listen on host:port and answer each process that measures and has the token, one by one, until interrupted.

    Raises:
        ConfigError: it is not possible to listen there.
    """
    host, port = split_address(address)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--serve {address}: cannot listen there: {error.strerror}") from None
    with listener:
        tell(f"answering on {join_address(host, listener.getsockname()[1])}; Ctrl-C ends it")
        while True:
            connection, (peer, *_) = listener.accept()
            with connection:
                try:
                    _answer(connection, token)
                    tell(f"{peer} has measured the link to here")
                except (ChameleonError, OSError) as error:
                    tell(f"{peer} could not measure the link to here: {error}")


def _answer(connection: socket.socket, token: str) -> None:
    connection.settimeout(_CONNECT_S)
    authenticated = PeerConnection.opened(connection, token, answers=True)
    text = authenticated.receive()
    try:
        request = _REQUEST.validate_json(text)
    except (ValidationError, ConfigError):
        authenticated.send(_NOT_UNDERSTOOD)
        raise ControlError("what it asked for was not understood; is it of the same version?") from None
    authenticated.send(_ACCEPTED)
    connection.settimeout(None)
    config = RunConfig(backend=request.backend, device=request.device)
    address = connection.getsockname()[0]
    run_members([_member(config, request.exchange, authenticated, worker=1, address=address)])
