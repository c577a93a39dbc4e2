"""Rendezvous stores, through which the members of a generation find each other.

In a run, the coordinator serves the store over the authenticated control connections. Torch's own store, which accepts
every client, serves only processes of one host that measure its links.
"""

from __future__ import annotations

import ctypes
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

from torch._C._distributed_c10d import Store, TCPStore

from chameleon_ft.protocol.address import split_address
from chameleon_ft.protocol.messages import LookUp, Message, Publish
from chameleon_ft.worker.communicators.base import CommunicationError

_BACKLOG = 1024
_TIMEOUT = timedelta(seconds=30)
_ASK_AFTER_S = 1.0


class GenerationStore(Store):
    """The store of one generation, on a rank: what it looks up or publishes goes over the control connection.

    Torch calls it from the threads that form groups, the control thread calls `take_in` and `end`. Any thread may hand
    a message to the control connection by `send`.
    """

    def __init__(self, generation: int, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._generation = generation
        self._send = send
        self._timeout = _TIMEOUT
        self._values: dict[str, bytes] = {}
        self._own: list[bytes] = []
        self._members_of_prefix: dict[str, int] = {}
        self._is_over = False
        self._changed = threading.Condition()

    def opened(self, *, timeout_s: float) -> Store:
        """Return this store, whose waits end after `timeout_s` unless they have a timeout of their own."""
        self._timeout = timedelta(seconds=timeout_s)
        return self

    def expect(self, prefix: str, members: int) -> None:
        """Note that each of so many members of a group publishes one value under `prefix`, and needs all of them.

        Gloo publishes a single one, in a folder of that prefix.
        """
        self._members_of_prefix[prefix] = members

    def take_in(self, values: Iterable[tuple[str, bytes]]) -> None:
        """Take in values that were looked up, and others beside them."""
        with self._changed:
            self._values.update(values)
            self._changed.notify_all()

    def published(self) -> list[bytes]:
        """Return the values that this rank has published, and all that it knows of others."""
        with self._changed:
            return [*self._own, *self._values.values()]

    def addresses(self, prefix: str) -> dict[int, bytes]:
        """Return what the other members of a group have published that is known here, by their number in it."""
        with self._changed:
            return {
                int(key.rpartition("/")[2]): value
                for key, value in self._values.items()
                if key.startswith(f"{prefix}/")
            }

    def end(self) -> None:
        """End all waits, because the generation is over."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- what torch calls --------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch gives bytes
        with self._changed:
            self._own.append(bytes(value))
        self._send(Publish(generation=self._generation, key=key, value=bytes(value), members=self._members_of(key)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:
            with self._changed:
                # The values of a group come by themselves, unless the connection was lost meanwhile.
                asks_s = time.monotonic() + (_ASK_AFTER_S if self._members_of(key) else 0.0)
                while key not in self._values:
                    if self._is_over:
                        raise RuntimeError("the generation is over")
                    if time.monotonic() >= asks_s:
                        self._send(LookUp(generation=self._generation, key=key))
                        asks_s = math.inf
                        continue
                    until_s = min(asks_s, deadline)
                    if not self._changed.wait(max(0.0, until_s - time.monotonic())) and until_s == deadline:
                        raise RuntimeError(f"no member has published {key} in time")

    def _members_of(self, key: str) -> int | None:
        return next(
            (members for prefix, members in self._members_of_prefix.items() if key.startswith(f"{prefix}/")), None
        )


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
    except AttributeError:
        # With another C library than glibc, lookups take the time they take.
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
