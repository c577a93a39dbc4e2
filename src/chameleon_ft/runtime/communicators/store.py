"""The rendezvous store, through which the ranks of a generation find each other.

A process of its own beside the coordinator serves it, never a rank, since any rank may be lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import Store, TCPStore

from chameleon_ft.control.wire.address import split_address
from chameleon_ft.runtime.communicators.base import CommunicationError
from chameleon_ft.runtime.process import end_with_parent, ignore_interrupts

__all__ = ["open_store", "serve_store", "store_main"]

_BACKLOG = 1024
_TIMEOUT = timedelta(seconds=30)


def store_main(host: str, pipe: Connection) -> None:
    """Serve a store on `host`, send its port through `pipe`, and end when the other end of `pipe` is closed."""
    end_with_parent()
    ignore_interrupts()
    with serve_store(host) as port, contextlib.suppress(EOFError, OSError):
        pipe.send(port)
        pipe.recv()


@contextmanager
def serve_store(host: str) -> Iterator[int]:
    """Serve a store on `host` inside the block; yields its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Torch would listen on every address of the machine.
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
    )
    try:
        yield port
    finally:
        del store


def open_store(address: str, *, timeout_s: float) -> Store:
    """Connect to the store at `address`, which is host:port. Raises CommunicationError."""
    host, port = split_address(address)
    timeout = timedelta(seconds=timeout_s)
    try:
        numeric_host = _numeric_address(host)
        with _without_name_server():
            return TCPStore(numeric_host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise CommunicationError(None, f"the rendezvous store at {address} cannot be reached: {error}") from None


@cache
def _numeric_address(host: str) -> str:
    """Return an address of `host`, looked up once for the life of the process. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


class _ResolverState(ctypes.Structure):
    """The beginning of `struct __res_state`, as resolv.h of the C library has it."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


@contextmanager
def _without_name_server() -> Iterator[None]:
    """Make lookups of this thread fail at once inside the block, unless files answer them.

    For its log alone, the store client of torch 2.13 looks up the name of every address that it connects to, in every
    generation anew. If the name server is away or its answer is lost, that costs five seconds and more. After a lookup
    has failed, torch does without them.
    """
    library = ctypes.CDLL(None)
    try:
        state_of_thread, initialize = library.__res_state, library.__res_init
    except AttributeError:  # another C library than glibc: its lookups take the time they take
        yield
        return
    initialize()
    state_of_thread.restype = ctypes.POINTER(_ResolverState)
    state = state_of_thread().contents
    servers, state.nscount = state.nscount, 0
    try:
        yield
    finally:
        state.nscount = servers
