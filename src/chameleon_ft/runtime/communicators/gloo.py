"""Communicators over gloo: TCP between processes, on any machine."""

from __future__ import annotations

import hmac
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from chameleon_ft.config import Timeouts
from chameleon_ft.runtime.communicators.base import CommunicationError, InFlight, Membership, issue
from chameleon_ft.runtime.communicators.sockets import ADDRESS_BYTES, SocketTracker
from chameleon_ft.runtime.communicators.store import GenerationStore
from chameleon_ft.runtime.communicators.vote import TreeVote

_Group = Any  # torch's stubs of a backend leave out send, recv and allreduce

_POLL_S = 0.01
_SILENT_S = 1.0  # longer than an answer takes
_CALL_OFF_AFTER_S = 0.05  # an operation that ends with its connection ends within milliseconds of it


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
        self._waiters: dict[int, Waiter] = {}  # by the thread that waits
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._reductions: list[Work] = []
        self._worker = -1
        self._world: tuple[int, ...] = ()
        self._store: Store | None = None  # a store in Python must outlive the groups
        self._addresses: Callable[[], Mapping[int, bytes]] = dict  # of the others, by their number in the world
        self._ports: Sequence[int] = ()  # from which they have connected with this worker, likewise
        self._opening_at_s = 0.0
        self._forming: threading.Thread | None = None
        self._error: CommunicationError | None = None  # with which it ended
        self._votes: deque[TreeVote] = deque(maxlen=2)  # once the last is complete, all messages of the one before are

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
        host = tensor.cpu()
        work = issue(peer, self._groups[self._world].send, [host], self._world.index(peer), tag)
        return _Message(work, peer, host, None, self._wait)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        host = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
        work = issue(peer, self._groups[self._world].recv, [host], self._world.index(peer), tag)
        return _Message(work, peer, host, tensor, self._wait)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        if group not in self._groups:
            self.settle()
        host = tensor.cpu()
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
                for waiter in self._waiters.values():
                    waiter.cancel()

    def close(self) -> None:
        while self._forming is not None and self._forming.is_alive():
            self.interrupt()
            self._forming.join(_POLL_S)
        # First the connections, so that the groups' destructors find nothing to wait for.
        self._sockets.close()
        with self._lock:
            waiters, self._waiters = tuple(self._waiters.values()), {}
        for waiter in waiters:
            waiter.stop()
        self._votes.clear()  # a live message keeps the group's sockets open after the group is gone
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
            waiter = self._waiters.get(threading.get_ident())
            if waiter is None:
                waiter = self._waiters[threading.get_ident()] = Waiter()
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
            self.target.copy_(self.host)


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
        self._current: _Ticket | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._work, name="gloo-waiter", daemon=True)
        self._thread.start()

    def wait(self, work: _Waitable) -> None:
        """Block until `work` is done. Raises its error, or WaitCancelledError."""
        ticket = _Ticket(work)
        self._current = ticket
        if self._cancelled:  # read after `_current` is set; `cancel` sets and reads in the opposite order
            raise WaitCancelledError("the wait was cancelled")
        self._tickets.put(ticket)
        ticket.settled.acquire()
        self._current = None
        if ticket.error is not None:
            raise ticket.error
        if not ticket.finished:
            raise WaitCancelledError("the wait was cancelled")

    def cancel(self) -> None:
        """End the current wait, and every later one, at once. Called from any thread."""
        self._cancelled = True
        if (ticket := self._current) is not None:
            ticket.settled.release()

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
                ticket.error = error.with_traceback(None)  # a traceback would keep the operation alive
            ticket.work = None
            ticket.settled.release()
            del ticket
