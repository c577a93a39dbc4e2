"""Measures the link between two processes, of this host or of two, and reductions over processes of this host.

Messages and reductions between processes are timed, each with the communicators of a rank.

Both ends of the connection between two hosts know a token, and prove it. Both draw a number; the keys of the two
directions follow from these and the token. Every message carries its HMAC with its place in the order, so that none can
be made up, left out, repeated or answered by another. Nothing that is not authenticated is parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch._C._distributed_c10d import Store

from chameleon_ft.cluster import Link
from chameleon_ft.config import DEVICES, BackendName, DeviceName, RunConfig
from chameleon_ft.cost.profile import AllReduceTime, Spread
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.host.fork_server import ForkServer, receive
from chameleon_ft.protocol.address import join_address, local_address_towards, split_address
from chameleon_ft.protocol.codec import decode
from chameleon_ft.protocol.messages import Message, Publish
from chameleon_ft.schedule.channels import Channel, Kind
from chameleon_ft.worker.communicators.base import Communicators, Membership, Rendezvous
from chameleon_ft.worker.communicators.store import GenerationStore, open_store, serve_store
from chameleon_ft.worker.device import claim_device, communicators_for, wait_for_stream

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_MAX_MESSAGE_BYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct("!I")
_GENERATION: Final = 1


@dataclass(slots=True)
class PeerConnection:
    """An authenticated connection. It can be handed to another process, which continues where this one has stopped.

    Attributes:
        key: a secret of this connection, for others that the two ends make.
    """

    connection: socket.socket
    key: bytes
    _send_key: bytes
    _receive_key: bytes
    _sent: int = 0
    _received: int = 0

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Leave out the socket, whose descriptor is handed over beside the pickle."""
        return None, {name: getattr(self, name) for name in self.__slots__ if name != "connection"}

    @classmethod
    def opened(cls, connection: socket.socket, token: str, *, answers: bool) -> PeerConnection:
        """Exchange numbers with the other end. `answers`: whether this is the end that was connected to."""
        own = os.urandom(_NONCE_BYTES)
        connection.sendall(own)
        other = _exactly(connection, _NONCE_BYTES)
        numbers = other + own if answers else own + other
        secret = hmac.digest(token.encode(), b"chameleon profile" + numbers, "sha256")
        keys = [hmac.digest(secret, name, "sha256") for name in (b"to answer", b"answer", b"other connections")]
        send_key, receive_key = (keys[1], keys[0]) if answers else (keys[0], keys[1])
        return cls(connection, keys[2], send_key, receive_key)

    def send(self, text: str) -> None:
        """Send a text. Raises OSError if the connection is lost."""
        body = text.encode()
        mac = hmac.digest(self._send_key, _LENGTH.pack(self._sent) + body, "sha256")
        self._sent += 1
        self.connection.sendall(_LENGTH.pack(len(body)) + mac + body)

    def receive(self) -> str:
        """Wait for the next text.

        Raises:
            ControlError: the other end does not know the token.
            OSError: the connection is lost.
        """
        (length,) = _LENGTH.unpack(_exactly(self.connection, _LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise ControlError("the other end does not speak this protocol; is it of the same version?")
        mac, body = _exactly(self.connection, _MAC_BYTES), _exactly(self.connection, length)
        expected = hmac.digest(self._receive_key, _LENGTH.pack(self._received) + body, "sha256")
        if not hmac.compare_digest(mac, expected):
            raise ControlError("the other end has another token; set CHAMELEON_TOKEN to the same on both hosts")
        self._received += 1
        return body.decode()


class PeerStore:
    """The rendezvous store of two processes, one at each end of a connection: what one sets, the other one gets."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection
        self._store = GenerationStore(_GENERATION, self._requested)
        threading.Thread(target=self._receive, name="peer-store", daemon=True).start()

    def open(self, *, timeout_s: float) -> Store:
        """Return the store, whose waits end after `timeout_s`; see `Rendezvous.open_store`."""
        return self._store.opened(timeout_s=timeout_s)

    def _requested(self, message: Message) -> None:
        """Carry out a request of this end; what is looked up comes by itself."""
        if isinstance(message, Publish):
            self._connection.send(message.model_dump_json())
            self._store.take_in([(message.key, message.value)])

    def _receive(self) -> None:
        try:
            while True:
                message = decode(self._connection.receive())
                if isinstance(message, Publish):
                    self._store.take_in([(message.key, message.value)])
        except (ControlError, OSError):
            self._store.end()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes. Raises OSError if the connection ends before."""
    parts = bytearray()
    while len(parts) < count:
        if not (part := connection.recv(count - len(parts))):
            raise ConnectionResetError("the other end has closed the connection")
        parts += part
    return bytes(parts)


_WARM_UP: Final = 3
_TAG: Final = 0  # of an activation
_ELEMENT: Final = torch.float32
_MAX_BYTES: Final = 1 << 30
_MAX_REPEATS: Final = 10_000


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
        if not (self.message_bytes and all(0 < size <= _MAX_BYTES for size in sizes)):
            raise ConfigError(f"an exchange needs sizes between 1 and {_MAX_BYTES} bytes; got {sizes}")
        if not 1 <= self.repeats <= _MAX_REPEATS:
            raise ConfigError(f"repeats must be between 1 and {_MAX_REPEATS}; got {self.repeats}")


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
    with contextlib.suppress(OSError):
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
        channels=(Channel(0, 1, Kind.ACTIVATION), Channel(1, 0, Kind.ACTIVATION)) if member.worker < 2 else (),
        rendezvous=Rendezvous(
            partial(open_store, member.store) if member.peer is None else PeerStore(member.peer).open, member.key
        ),
    )
    try:
        communicators.open(membership)
        communicators.settle()
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
                # Posted before it is needed, as a rank does.
                receive = self.communicators.receive(there, peer=0, tag=_TAG)
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


_LOCAL_HOST: Final = "127.0.0.1"
_MESSAGE_BYTES: Final = (64, 4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_REDUCED_BYTES: Final = (1 << 16, 1 << 20, 1 << 23)
_MAX_REDUCING: Final = 8
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
    most = min(max(2, config.parallel.dp), _MAX_REDUCING)
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
