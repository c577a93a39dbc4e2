"""Timed messages and reductions between processes, each with the communicators of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final

import torch

from chameleon_ft.cluster import Link
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.profiles import AllReduceTime, Spread
from chameleon_ft.runtime.communicators import Channel, Communicators, Membership, Rendezvous, communicators_for
from chameleon_ft.runtime.communicators.store import open_store
from chameleon_ft.runtime.device import claim_device, wait_for_stream
from chameleon_ft.runtime.fork_server import ForkServer, receive
from chameleon_ft.runtime.profiling.peer import PeerConnection, PeerStore

_WARM_UP: Final = 3
_TAG: Final = 0
_ELEMENT: Final = torch.float32
_MOST_BYTES: Final = 1 << 30
_MOST_REPEATS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The messages and reductions of some processes.

    Attributes:
        message_bytes: sizes of the messages that workers 0 and 1 send each other.
        reduced_bytes: sizes of the all-reduces.
        reducing: numbers of workers that reduce; the first workers are taken.
        repeats: number of timings of each.

    Raises:
        ConfigError: sizes or repeats are invalid.
    """

    message_bytes: tuple[int, ...]
    reduced_bytes: tuple[int, ...] = ()
    reducing: tuple[int, ...] = ()
    repeats: int = 20

    def __post_init__(self) -> None:
        sizes = (*self.message_bytes, *self.reduced_bytes)
        if not (self.message_bytes and all(0 < size <= _MOST_BYTES for size in sizes)):
            raise ConfigError(f"an exchange needs sizes between 1 and {_MOST_BYTES} bytes; got {sizes}")
        if not 1 <= self.repeats <= _MOST_REPEATS:
            raise ConfigError(f"repeats must be between 1 and {_MOST_REPEATS}; got {self.repeats}")


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """The link between workers 0 and 1 of an exchange, and its reductions."""

    link: Link
    all_reduces: tuple[AllReduceTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of an exchange.

    Attributes:
        config: names the backend, the device and the timeouts.
        worker: its number among `workers`.
        store: host:port of the rendezvous store, for processes of this host.
        peer: instead of a store, the connection with the other one of two members.
        key: a secret of the members.
        address: address of this host by which the others reach it.
        local_index: number of this process on its host, which picks its accelerator.
    """

    config: RunConfig
    exchange: Exchange
    worker: int
    workers: int
    store: str = ""
    peer: PeerConnection | None = None
    key: bytes
    address: str
    local_index: int = 0


def run_members(members: Sequence[Member]) -> MeasuredLinks | None:
    """Run one process for each member and return what worker 0 measured, if it is the first. Leaves no process behind.

    Raises:
        ChameleonError: a member could not take part.
    """
    # Otherwise torch warns, for every connection to the store, that it cannot resolve the peer's name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return asyncio.run(_run_members(members))


async def _run_members(members: Sequence[Member]) -> MeasuredLinks | None:
    server = ForkServer(__name__, (signal.SIGINT,))
    pipes, processes, answers = [], [], []
    try:
        for member in members:
            ours, theirs = Pipe(duplex=False)
            pipes.append(ours)
            with theirs:
                files = [theirs.fileno()] + ([] if member.peer is None else [member.peer.connection.fileno()])
                processes.append(await server.fork(f"{__name__}:_member_main", *files, member=member))
        # The first error ends the wait for the others, which may hang without the member that failed.
        answers = [asyncio.create_task(_received(pipe)) for pipe in pipes]
        measured, *_ = await asyncio.gather(*answers)
        return measured
    finally:
        server.end()
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        for process in processes:
            process.kill()
        for process in processes:
            await process.wait()
        for pipe in pipes:
            pipe.close()


async def _received(pipe: Connection) -> MeasuredLinks | None:
    try:
        found = await receive(pipe)
    except EOFError:
        raise ControlError("a process that measures links has ended without reporting an error") from None
    if isinstance(found, ChameleonError):
        raise found
    assert found is None or isinstance(found, MeasuredLinks)
    return found


def _member_main(descriptor: int, *connections: int, member: Member) -> None:
    if member.peer is not None:
        (connection,) = connections
        member = replace(member, peer=replace(member.peer, connection=socket.socket(fileno=connection)))
    found: MeasuredLinks | ChameleonError | None
    try:
        found = _take_part(member)
    except ChameleonError as error:
        found = ControlError(f"links cannot be measured: {error}")
    with contextlib.suppress(OSError):  # the receiver may be gone after an interrupt
        Connection(descriptor, readable=False).send(found)


def _take_part(member: Member) -> MeasuredLinks | None:
    device = claim_device(member.config, member.local_index)
    communicators = communicators_for(member.config, address=member.address, device=device)
    members = tuple(range(member.workers))
    membership = Membership(
        generation=1,
        worker=member.worker,
        members=members,
        groups=tuple(members[:count] for count in member.exchange.reducing),
        channels=(Channel(0, 1, forward=True), Channel(1, 0, forward=True)) if member.worker < 2 else (),
        rendezvous=Rendezvous(
            partial(open_store, member.store) if member.peer is None else PeerStore(member.peer).open, member.key
        ),
    )
    try:
        communicators.open(membership)
        return _Exchanging(communicators, device, member.exchange.repeats).run(member.exchange, member.worker)
    finally:
        communicators.close()


@dataclass(frozen=True, slots=True)
class _Exchanging:
    """One worker's part in an exchange."""

    communicators: Communicators
    device: torch.device
    repeats: int

    def run(self, exchange: Exchange, worker: int) -> MeasuredLinks | None:
        """Take part; worker 0 returns what it has measured. Raises CommunicationError."""
        messages: list[tuple[int, float]] = []
        for num_bytes in exchange.message_bytes:
            if worker == 0:
                # Half of the round-trip time.
                messages.append((num_bytes, statistics.median(self._ping(num_bytes)) / 2))
            elif worker == 1:
                self._pong(num_bytes)
        reductions = [
            AllReduceTime(workers, num_bytes, Spread.of(self._reduce(tuple(range(workers)), num_bytes)))
            for workers in exchange.reducing
            if worker < workers
            for num_bytes in exchange.reduced_bytes
        ]
        return MeasuredLinks(fit_link(messages), tuple(reductions)) if worker == 0 else None

    def _ping(self, num_bytes: int) -> list[float]:
        there, back = self._tensor(num_bytes), self._tensor(num_bytes)

        def once() -> None:
            answer = self.communicators.receive(back, peer=1, tag=_TAG)
            sent = self.communicators.send(there, peer=1, tag=_TAG)
            answer.wait()
            sent.wait()

        return self._timed(once)

    def _pong(self, num_bytes: int) -> None:
        there, back = self._tensor(num_bytes), self._tensor(num_bytes)
        count = _WARM_UP + self.repeats
        receive = self.communicators.receive(there, peer=0, tag=_TAG)
        for number in range(count):
            receive.wait()
            wait_for_stream(self.device)
            if number + 1 < count:
                receive = self.communicators.receive(there, peer=0, tag=_TAG)  # before it is needed, as a rank does
            self.communicators.send(back, peer=0, tag=_TAG).wait()

    def _reduce(self, group: tuple[int, ...], num_bytes: int) -> list[float]:
        # A barrier, so that each reduction begins when the previous one has ended.
        reduced = self._tensor(num_bytes)
        return self._timed(lambda: self.communicators.all_reduce(reduced, group).wait())

    def _timed(self, once: Callable[[], None]) -> list[float]:
        times_s: list[float] = []
        for _ in range(_WARM_UP + self.repeats):
            start = time.perf_counter()
            once()
            wait_for_stream(self.device)
            times_s.append(time.perf_counter() - start)
        return times_s[_WARM_UP:]

    def _tensor(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(-(-num_bytes // _ELEMENT.itemsize), dtype=_ELEMENT, device=self.device)


def fit_link(times: Sequence[tuple[int, float]]) -> Link:
    """Return the link whose predictions for messages of (bytes, seconds) have the least sum of relative errors.

    Unlike least squares, this does not give outliers extra weight. The best of the
    rising lines passes through two of the points, or through one with no latency at all, so trying these is enough.
    """
    candidates = [(0.0, seconds / num_bytes) for num_bytes, seconds in times]
    for (few, short_s), (many, long_s) in combinations(sorted(times), 2):
        if many > few and long_s > short_s:
            byte_s = (long_s - short_s) / (many - few)
            candidates.append((short_s - byte_s * few, byte_s))
    latency_s, byte_s = min(
        (candidate for candidate in candidates if candidate[0] >= 0 and candidate[1] > 0),
        key=lambda line: sum(abs(line[0] + line[1] * num_bytes - seconds) / seconds for num_bytes, seconds in times),
    )
    return Link(latency_s, 1 / byte_s)
