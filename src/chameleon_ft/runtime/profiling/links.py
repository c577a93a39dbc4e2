"""Measures the link between two processes, of this host or of two, and reductions over processes of this host."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from chameleon_ft.cluster import Link
from chameleon_ft.config import RunConfig
from chameleon_ft.control.wire.address import join_address, local_address_towards, split_address
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.runtime.communicators.store import serve_store
from chameleon_ft.runtime.profiling.exchange import Exchange, MeasuredLinks, Member, run_members

__all__ = ["local_backend", "measure_link_to", "measure_local_links", "message_sizes", "serve_link"]

_LOCAL_HOST: Final = "127.0.0.1"
_MESSAGE_BYTES: Final = (64, 4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_REDUCED_BYTES: Final = (1 << 16, 1 << 20, 1 << 23)
_MOST_REDUCING: Final = 8
_MOST_REQUEST_BYTES: Final = 1 << 16
_CONNECT_S: Final = 10.0


def message_sizes(boundary_bytes: Collection[int]) -> tuple[int, ...]:
    """Return sizes from a few bytes to many, and those of the messages that a run will send."""
    return tuple(sorted({*_MESSAGE_BYTES, *(size for size in boundary_bytes if 0 < size < _MESSAGE_BYTES[-1])}))


def local_backend(config: RunConfig) -> RunConfig:
    """Return `config` with a backend for two processes of this host: NCCL needs an accelerator for each of them."""
    if config.backend == "nccl" and torch.accelerator.device_count() < 2:
        return config.model_copy(update={"backend": "gloo"})
    return config


def measure_local_links(config: RunConfig, *, message_bytes: tuple[int, ...], repeats: int) -> MeasuredLinks:
    """Time messages between two processes, and all-reduces over as many as will hold the same layer, up to 8.

    Raises:
        ControlError: the processes cannot reach each other.
    """
    config = local_backend(config)
    most = min(max(2, config.parallel.dp), _MOST_REDUCING)
    if config.backend == "nccl":
        most = min(most, torch.accelerator.device_count())
    exchange = Exchange(
        message_bytes=message_bytes,
        reduced_bytes=_REDUCED_BYTES,
        reducing=tuple(range(2, most + 1)),
        repeats=repeats,
    )
    with serve_store(_LOCAL_HOST) as port:
        store = join_address(_LOCAL_HOST, port)
        member = partial(Member, config=config, exchange=exchange, workers=most, store=store, address=_LOCAL_HOST)
        return _measured([member(worker=worker, local_index=worker) for worker in range(most)])


def measure_link_to(peer: str, config: RunConfig, *, message_bytes: tuple[int, ...], repeats: int) -> Link:
    """Measure the link to the host where `serve_link` answers on `peer`, host:port.

    Raises:
        ConfigError: no process answers there.
        ControlError: the two processes cannot exchange messages.
    """
    here = local_address_towards(peer)
    exchange = Exchange(message_bytes=message_bytes, repeats=repeats)
    assert config.device != "emulated"
    with serve_store(here) as port:
        store = join_address(here, port)
        request = _Request(store=store, backend=config.backend, device=config.device, exchange=exchange)
        try:
            connection = socket.create_connection(split_address(peer), timeout=_CONNECT_S)
        except OSError as error:
            raise ConfigError(
                f"--peer {peer}: no process answers there ({error}); "
                f"start `chameleon profile --serve {peer}` on that host"
            ) from None
        with connection:
            connection.sendall(_REQUEST.dump_json(request) + b"\n")
            own = Member(config=config, exchange=exchange, worker=0, workers=2, store=store, address=here)
            return _measured([own]).link


def _measured(members: Sequence[Member]) -> MeasuredLinks:
    found = run_members(members)
    assert found is not None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One line of JSON, from the process that measures to the one that answers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    store: str
    backend: Literal["gloo", "nccl"]
    device: Literal["cpu", "cuda"]
    exchange: Exchange


_REQUEST: Final = TypeAdapter(_Request)


def serve_link(address: str, *, tell: Callable[[str], None]) -> None:
    """Listen on host:port and answer each process that measures, one after the other, until interrupted.

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
                    _answer(connection)
                    tell(f"{peer} has measured the link to here")
                except (ChameleonError, OSError) as error:
                    tell(f"{peer} could not measure the link to here: {error}")


def _answer(connection: socket.socket) -> None:
    connection.settimeout(_CONNECT_S)
    with connection.makefile("rb") as lines:
        line = lines.readline(_MOST_REQUEST_BYTES)
    try:
        request = _REQUEST.validate_json(line)
    except (ValidationError, ConfigError):
        raise ControlError("what it asked for was not understood; is it of the same version?") from None
    config = RunConfig(backend=request.backend, device=request.device)
    address = local_address_towards(request.store)
    run_members(
        [Member(config=config, exchange=request.exchange, worker=1, workers=2, store=request.store, address=address)]
    )
