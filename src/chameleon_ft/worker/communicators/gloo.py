"""Communicators over gloo: TCP between processes, on any machine.

On torch 2.13, neither `abort` nor `shutdown` of a gloo process group wakes a thread that waits in it; shutting down
its sockets does, within milliseconds. The library does not expose its sockets, so this file finds them by what appears
in /proc/self/fd while it connects, and by the addresses that its members have published. It also asks the kernel
whether the other ends still acknowledge anything: a network may drop all packets between two hosts that both reach the
coordinator.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from chameleon_ft.config import RunConfig, Timeouts
from chameleon_ft.worker.communicators.base import CommunicationError, InFlight, Membership, TreeVote, issue
from chameleon_ft.worker.communicators.store import GenerationStore
from chameleon_ft.worker.device import copied_to_host, copy_across, host_memory_for

_DESCRIPTORS = Path("/proc/self/fd")
# Gloo publishes values that begin with an address, which this many bytes contain.
ADDRESS_BYTES: Final = 256
_KEEPALIVE_S: Final = 2
_PROBED_CONNECTIONS_PER_S: Final = 200
# As many as the kernel allows: the coordinator decides when a connection is given up.
_MAX_PROBES: Final = 127
# In /proc/net/tcp.
_SYN_SENT: Final = "02"
_UNANSWERED_ATTEMPTS: Final = 3
_LAST_ACK_RECV_OFFSET: Final = 56


class SocketTracker:
    """The TCP connections between the members of a group that this process opens between `start` and `settle`.

    They are identified by inode, since a file descriptor number may be reused at once. Listening sockets are left
    alone: gloo ends the process when its listening socket fails. So are connections that the job makes, for example to
    where it reads its data, and one to another coordinator, once `narrow` was called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: Callable[[], Sequence[bytes]] | None = None
        self._before: set[int] | None = None
        self._settled: list[socket.socket] = []
        self._probed_s = _KEEPALIVE_S

    def start(self) -> None:
        """Track every connection from now on."""
        with self._lock:
            self._before = {inode for _, inode in _open_sockets()}

    def narrow(self, published: Callable[[], Sequence[bytes]]) -> None:
        """Track only connections of which one end is an address that a member listens at, and has published."""
        self._published = published

    def settle(self) -> None:
        """Track no later connection."""
        with self._lock:
            # A duplicate names the connection itself, whatever becomes of the library's descriptor.
            self._settled = list(self._new_connections())
            self._before = None
            self._probed_s = max(_KEEPALIVE_S, len(self._settled) // _PROBED_CONNECTIONS_PER_S)
            for connection in self._settled:
                _keep_alive(connection, self._probed_s)

    def shut_down(self) -> None:
        """End the tracked connections. Called from any thread, also before `settle`."""
        with self._lock:
            for connection in self._connections():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def silences(self) -> list[tuple[bytes, float]]:
        """Return the other end of each settled connection, and for how many seconds that has not answered."""
        with self._lock:
            return [
                (end, _unanswered_s(each) - self._probed_s) for each in self._settled for _, end in _both_ends(each)
            ]

    def ends(self) -> list[tuple[bytes, bytes]]:
        """Return the own and the other end of each connection."""
        with self._lock:
            return [both for connection in self._connections() for both in _both_ends(connection)]

    def unanswered(self) -> list[bytes]:
        """Return the other ends of the connections that this process tries to make, and that are not answered."""
        own = {inode for _, inode in _open_sockets()}
        return [end for end, attempts, inode in _connecting() if attempts >= _UNANSWERED_ATTEMPTS and inode in own]

    def close(self) -> None:
        """End the tracked connections and forget them."""
        self.shut_down()
        with self._lock:
            for connection in self._settled:
                connection.close()
            self._settled = []
            self._before = self._published = None

    def _connections(self) -> Iterator[socket.socket]:
        yield from self._settled
        for connection in self._new_connections():
            with connection:
                yield connection

    def _new_connections(self) -> Iterator[socket.socket]:
        if self._before is None:
            return
        known = None
        if self._published is not None:
            known = b"".join(value[:ADDRESS_BYTES] for value in self._published())
        for descriptor, inode in _open_sockets():
            if inode in self._before:
                continue
            try:
                connection = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
                and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and (known is None or any(end in known for end in _ends_of(connection)))
            ):
                yield connection
            else:
                connection.close()


def _ends_of(connection: socket.socket) -> Iterator[bytes]:
    """Yield the port and the address of both ends, as `struct sockaddr_in` and `sockaddr_in6` have them."""
    for end in (connection.getsockname, connection.getpeername):
        with contextlib.suppress(OSError):
            host, port, *others = end()
            flow = struct.pack(">I", others[0]) if others else b""
            yield struct.pack(">H", port) + flow + socket.inet_pton(connection.family, host.partition("%")[0])


def _keep_alive(connection: socket.socket, every_s: int) -> None:
    """Have the kernel probe a connection while it is idle, so that it knows whether its packets arrive."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MAX_PROBES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _both_ends(connection: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Yield the own and the other end, unless it has ended."""
    own, *other = _ends_of(connection)
    yield from ((own, each) for each in other)


def _unanswered_s(connection: socket.socket) -> float:
    """Return the seconds since the other end has acknowledged anything."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_RECV_OFFSET + 4)
    return int.from_bytes(info[_LAST_ACK_RECV_OFFSET:], sys.byteorder) / 1e3


def _connecting() -> Iterator[tuple[bytes, int, int]]:
    """Yield the other end, the repeated attempts and the inode of each connection that is not answered yet."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, _, end, state, _, _, attempts, _, _, inode, *_ = line.split()
                if state == _SYN_SENT:
                    address, port = map(bytes.fromhex, end.split(":"))
                    words = struct.unpack(f">{len(address) // 4}I", address)  # each as the processor stores it
                    flow = bytes(4 if table == "tcp6" else 0)
                    yield port + flow + struct.pack(f"={len(words)}I", *words), int(attempts, 16), int(inode)


def _open_sockets() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of every open socket of this process."""
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                yield int(entry.name), int(target[len("socket:[") : -1])


_Group = Any  # torch's stubs of a backend leave out send, recv and allreduce

_POLL_S = 0.01
_SILENT_S = 1.0
# An operation that ends with its connection ends within milliseconds of it.
_CALL_OFF_AFTER_S = 0.05


class GlooCommunicators:
    """One gloo group over all members for messages, those of votes too, and one for each smaller group that reduces.

    The groups are made directly, not by `dist.init_process_group`, so that a generation that fails leaves nothing
    global behind. Those that reduce are formed by a thread of its own, because the first messages do not need them.
    Tensors on an accelerator travel through host memory.
    """

    def __init__(self, *, timeouts: Timeouts, address: str) -> None:
        self._timeouts = timeouts
        self._address = address
        self._sockets = SocketTracker()
        self._interrupted_at: float | None = None
        self._lock = threading.Lock()
        self._waiter_of_thread: dict[int, Waiter] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._reductions: list[Work] = []
        self._worker = -1
        self._world: tuple[int, ...] = ()
        # A store in Python must outlive the groups.
        self._store: Store | None = None
        # By number in the world: addresses of the others, and ports from which they have connected with this worker.
        self._addresses: Callable[[], Mapping[int, bytes]] = dict
        self._ports: Sequence[int] = ()
        self._opening_at_s = 0.0
        self._forming: threading.Thread | None = None
        self._error: CommunicationError | None = None
        # Once the last vote is complete, all messages of the one before are.
        self._votes: deque[TreeVote] = deque(maxlen=2)

    @classmethod
    def of_rank(cls, config: RunConfig, *, address: str, device: torch.device) -> Self:
        """Return those of a rank; host memory carries the tensors of any device."""
        return cls(timeouts=config.timeouts, address=address)

    def open(self, membership: Membership) -> None:
        with _LEFTOVERS_LOCK:
            _LEFTOVERS[:] = [leftover for leftover in _LEFTOVERS if not leftover.at_rest()]
        self._sockets.start()
        self._worker, self._world = membership.worker, membership.members
        self._opening_at_s = time.monotonic()
        try:
            form = self._former(membership)
            form(0, membership.members)
            if self._addresses() and membership.worker in membership.members:
                self._exchange_ports()
            self._raise_if_interrupted()
        except BaseException as error:
            self._sockets.settle()
            if isinstance(error, RuntimeError):
                raise _cannot_be_formed(error) from None
            raise
        self._forming = threading.Thread(
            target=self._form_all, args=(form, membership.groups), name="gloo-groups", daemon=True
        )
        self._forming.start()

    def settle(self) -> None:
        if self._forming is not None:
            self._forming.join()
        if self._error is not None:
            raise CommunicationError(None, str(self._error))

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        host = copied_to_host(tensor)
        work = issue(peer, self._groups[self._world].send, [host], self._world.index(peer), tag)
        return _Message(work, peer, host, None, self._wait)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        host = host_memory_for(tensor)
        work = issue(peer, self._groups[self._world].recv, [host], self._world.index(peer), tag)
        return _Message(work, peer, host, tensor, self._wait)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        if group not in self._groups:
            self.settle()
        host = copied_to_host(tensor)
        work = issue(None, self._groups[group].allreduce, [host])
        with self._lock:
            self._reductions = [earlier for earlier in self._reductions if not earlier.is_completed()]
            self._reductions.append(work)
        return _Message(work, None, host, tensor, self._wait)

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        vote = TreeVote(ballot, worker=self._worker, group=group, communicators=self)
        self._votes.append(vote)
        return vote

    def unreached(self) -> dict[int, float]:
        silences = self._sockets.silences()
        if self._forming is None or self._forming.is_alive():
            silences += [(end, time.monotonic() - self._opening_at_s) for end in self._sockets.unanswered()]
        silent = ((self._number_of(end), since_s) for end, since_s in silences if since_s >= _SILENT_S)
        return {self._world[number]: since_s for number, since_s in silent if number is not None}

    def interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        self._sockets.shut_down()
        if now - self._interrupted_at > _CALL_OFF_AFTER_S:
            with self._lock:
                for waiter in self._waiter_of_thread.values():
                    waiter.cancel()

    def close(self) -> None:
        while self._forming is not None and self._forming.is_alive():
            self.interrupt()
            self._forming.join(_POLL_S)
        # First the connections, so that the groups' destructors find nothing to wait for.
        self._sockets.close()
        with self._lock:
            waiters, self._waiter_of_thread = tuple(self._waiter_of_thread.values()), {}
        for waiter in waiters:
            waiter.stop()
        # A live message keeps the group's sockets open after the group is gone.
        self._votes.clear()
        leftover = _Leftover(self._groups, self._reductions, waiters)
        self._groups, self._reductions = {}, []
        if not leftover.at_rest(within_s=_CALL_OFF_AFTER_S):
            with _LEFTOVERS_LOCK:
                _LEFTOVERS.append(leftover)

    def _number_of(self, end: bytes) -> int | None:
        """Return which member of the world is at this end of a connection."""
        port, host = end[:2], end[2:]
        for number, address in self._addresses().items():
            known = address[:ADDRESS_BYTES]
            connected_from = self._ports[number] if number < len(self._ports) else 0
            if end in known or (host in known and port == connected_from.to_bytes(2, "big")):
                return number
        return None

    def _exchange_ports(self) -> None:
        """Tell each member from which port this worker has connected with it; 0 if it has connected with this one."""
        addresses = self._addresses()
        known = b"".join(each[:ADDRESS_BYTES].ljust(ADDRESS_BYTES) for each in addresses.values())
        numbers = list(addresses)
        ports = torch.zeros(len(self._world), dtype=torch.int64)
        for own, other in self._sockets.ends():
            if (place := known.find(other)) >= 0:
                ports[numbers[place // ADDRESS_BYTES]] = int.from_bytes(own[:2], "big")
        found = torch.empty_like(ports)
        self._wait(self._groups[self._world].alltoall_base(found, ports, [], []))
        self._ports = found.tolist()

    def _former(self, membership: Membership) -> Callable[[int, tuple[int, ...]], None]:
        """Return a function that forms a group, by its number and its members, if this rank is in it."""
        store = self._store = membership.rendezvous.open_store(timeout_s=self._timeouts.rendezvous_s)
        if isinstance(store, GenerationStore):
            self._sockets.narrow(store.published)
            self._addresses = partial(store.addresses, f"generation-{membership.generation}/group-0")
        device = ProcessGroupGloo.create_device(hostname=self._address)

        def form(index: int, group: tuple[int, ...]) -> None:
            if membership.worker not in group or group in self._groups:
                return
            self._raise_if_interrupted()
            forming = _Forming(
                partial(
                    gloo_group,
                    store,
                    f"generation-{membership.generation}/group-{index}",
                    group.index(membership.worker),
                    len(group),
                    device=device,
                    timeout_s=self._timeouts.transport_s,
                    key=membership.rendezvous.key,
                )
            )
            self._wait(forming)
            self._groups[group] = forming.group

        return form

    def _form_all(self, form: Callable[[int, tuple[int, ...]], None], groups: Sequence[tuple[int, ...]]) -> None:
        """Form the groups that reduce, one after the other, because they are in one order on all ranks."""
        try:
            for index, group in enumerate(groups, 1):
                form(index, group)
        except CommunicationError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001 - `settle` raises it
            self._error = _cannot_be_formed(error)
        finally:
            self._sockets.settle()

    def _wait(self, work: _Waitable) -> None:
        """Wait in the calling thread, in a way that `interrupt` can cancel."""
        with self._lock:
            waiter = self._waiter_of_thread.get(threading.get_ident())
            if waiter is None:
                waiter = self._waiter_of_thread[threading.get_ident()] = Waiter()
        waiter.wait(work)

    def _raise_if_interrupted(self) -> None:
        if self._interrupted_at is not None:
            raise CommunicationError(None, "the generation is over")


def gloo_group(
    store: Store, prefix: str, rank: int, size: int, *, device: Any, timeout_s: float, key: bytes = b""
) -> Any:
    """Connect a group with all its members, which are numbered from 0; blocks until they are there.

    Gloo accepts any connection that presents a small number, so each pair of members then proves to the other over
    their connection that it knows `key`.

    Raises:
        RuntimeError: a member is gone, or does not know `key`.
    """
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    if isinstance(store, GenerationStore):
        store.expect(prefix, size)
    group = gloo(PrefixStore(prefix, store), rank, size, options)
    given = _proofs(key, prefix, [(rank, other) for other in range(size)])
    found = torch.empty_like(given)
    group.alltoall_base(found, given, [], []).wait()
    expected = _proofs(key, prefix, [(other, rank) for other in range(size)])
    if strangers := (found != expected).any(1).nonzero().flatten().tolist():
        raise RuntimeError(
            f"the connections to members {strangers} of {prefix} lead to processes without the secret of this run; "
            "keep foreign processes from connecting to the ports of the workers"
        )
    return group


def _cannot_be_formed(error: BaseException) -> CommunicationError:
    return CommunicationError(None, f"the communicators cannot be formed: {error}")


def _proofs(key: bytes, prefix: str, directions: Sequence[tuple[int, int]]) -> Tensor:
    """Return what each (sender, receiver) of a group proves its knowledge of `key` with, as rows of bytes."""
    digests = [hmac.digest(key, f"{prefix} {sender} {receiver}".encode(), "sha256") for sender, receiver in directions]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(len(directions), -1)


@dataclass(slots=True)
class _Forming:
    """A group that is being formed.

    A member that others connect to has no connection yet that an interruption could end. If the others have left, gloo
    sleeps until its timeout. So a `Waiter` waits for the group, as for a message.
    """

    form: Callable[[], _Group]
    group: _Group = None

    def wait(self) -> None:
        self.group = self.form()


@dataclass(slots=True)
class _Message:
    """A gloo message, with the host tensor it reads or fills, and the tensor to copy that to if it is another one."""

    work: Work | None
    peer: int | None
    host: Tensor
    target: Tensor | None
    wait_for: Callable[[Work], None]

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            self.wait_for(self.work)
        except RuntimeError as error:
            raise CommunicationError(self.peer, str(error)) from None
        finally:
            # A live Work keeps the group's sockets open after the group is gone.
            self.work = None
        if self.target is not None and self.target is not self.host:
            copy_across(self.target, self.host)


@dataclass(slots=True)
class _Leftover:
    """Groups of a closed generation, in which an operation may still be asleep.

    The destructor of a group waits for its reductions, and holds the interpreter's lock meanwhile.
    """

    groups: dict[tuple[int, ...], _Group]
    reductions: list[Work]
    waiters: tuple[Waiter, ...]

    def at_rest(self, *, within_s: float = 0.0) -> bool:
        deadline = time.monotonic() + within_s
        if not all(waiter.join(max(0.0, deadline - time.monotonic())) for waiter in self.waiters):
            return False
        while not all(reduction.is_completed() for reduction in self.reductions):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True


_LEFTOVERS: list[_Leftover] = []
_LEFTOVERS_LOCK = threading.Lock()


class _Waitable(Protocol):
    def wait(self) -> object: ...


class WaitCancelledError(RuntimeError):
    """The wait was cancelled; the operation may still be asleep."""


class _Ticket:
    """One wait. The first to release `settled`, the waiting thread or `cancel`, decides how it ended."""

    def __init__(self, work: _Waitable) -> None:
        self.work: _Waitable | None = work
        self.error: BaseException | None = None
        self.finished = False
        self.settled = threading.Semaphore(0)


class Waiter:
    """Waits for one operation at a time on behalf of another thread, in a way that can be cancelled.

    When a connection ends in the middle of a message, gloo (as of torch 2.13) tells the operations that are queued, but
    not the one whose bytes are in flight, which sleeps until its timeout. So a separate thread sleeps there.
    """

    def __init__(self) -> None:
        self._tickets: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._newest: _Ticket | None = None
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._work, name="gloo-waiter", daemon=True)
        self._thread.start()

    def wait(self, work: _Waitable) -> None:
        """Block until `work` is done. Raises its error, or WaitCancelledError."""
        ticket = _Ticket(work)
        with self._lock:
            if self._is_cancelled:
                raise WaitCancelledError("the wait was cancelled")
            self._newest = ticket
        self._tickets.put(ticket)
        ticket.settled.acquire()
        if ticket.error is not None:
            raise ticket.error
        if not ticket.finished:
            raise WaitCancelledError("the wait was cancelled")

    def cancel(self) -> None:
        """End the current wait, and every later one, at once. Called from any thread."""
        with self._lock:
            self._is_cancelled = True
            if self._newest is not None:
                self._newest.settled.release()

    def stop(self) -> None:
        """Have the thread end as soon as it wakes."""
        self._tickets.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `stop`; False if it still sleeps in an operation that was cancelled."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            assert ticket.work is not None
            try:
                ticket.work.wait()
                ticket.finished = True
            except BaseException as error:  # noqa: BLE001
                # A traceback would keep the operation alive.
                ticket.error = error.with_traceback(None)
            ticket.work = None
            ticket.settled.release()
            del ticket
