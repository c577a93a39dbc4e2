"""Keeping torch's store client away from the name server.

On torch 2.13 it looks up the name of every address that it connects to, only to have it for its log. Every generation
connects anew, and an answer that is lost, or a name server that is not there, costs five seconds and more. Where one
such lookup fails, torch does without them from then on.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

__all__ = ["numeric_address", "without_name_server"]


class _ResolverState(ctypes.Structure):
    """The beginning of `struct __res_state`, as resolv.h of the C library has it."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


@cache
def numeric_address(host: str) -> str:
    """Return an address of `host`, looked up once for the life of the process. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


@contextmanager
def without_name_server() -> Iterator[None]:
    """Have lookups of this thread fail at once inside the block, unless files answer them."""
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
