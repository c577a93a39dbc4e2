"""A pretended library of the device, with the contract of NCCL and the interface of torch's ProcessGroupNCCL.

Ranks may be processes, or threads of one process with a stream each. The contract, with its sources, of which the
first four are pages of https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/:

- usage/streams.html: a call returns once its operation is enqueued, and the status is told by the stream's events.
- usage/p2p.html, api/p2p.html: an operation has no tag, and holds its stream until the peer has called the other half,
  of an equal size. So two ranks that both send first hold each other.
- usage/collectives.html: all ranks of a communicator call its collectives in one order, with equal sizes. If they do
  not, the results are undefined: here equal sizes are mixed up, and unequal sizes, or different operations, are held.
- usage/communicators.html: creation needs all members. It returns at once if the communicator is not blocking. A lost
  peer, or one that aborts, leaves the operations of the others held until they abort, too; they are of no use then.
- api/comms.html (ncclCommAbort): an abort ends what is in flight, whose outputs are garbage, and no other communicator.
- api/comms.html (ncclCommShrink): some members of a communicator form another, without the rest, which may be lost.
  Nothing may be in flight. Torch waits for it on the host, with the lock of the larger one:
  https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/NCCLUtils.cpp (NCCLComm::shrink)
- Each communicator takes the next of the 32 streams of the most urgent priority, whether or not it is in use:
  https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDAStream.cpp (getStreamFromPool)
- A rank that shares its device with another one is refused, except by NCCL_MULTI_RANK_GPU_ENABLE=1:
  https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
- Operations run on a stream of the group, behind what is on the current stream. `wait` puts the current stream behind
  the operation, blocks no host, and says nothing about success:
  https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp
- The first operation waits, on the host, until the communicator is formed. That holds the lock that an abort needs, so
  an abort waits for it, until TORCH_NCCL_NONBLOCKING_TIMEOUT:
  https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/NCCLUtils.cpp (getNcclComm)

Where NCCL leaves open whether a program hangs, this one hangs: a small message is never buffered, and an abort returns
only once the streams have passed all operations of the communicator, also those behind others that are held. Torch's
watchdog, which would end the process, is not here: TORCH_NCCL_ASYNC_ERROR_HANDLING has to be 0.

Messages are frames over TCP. Gloo, on torch 2.13, could not do: its waits cannot be aborted, and a lost peer fails them
at once. PRETENDED_NCCL_CREATION_S sets how long creation takes once all members are there, PRETENDED_NPU names the
device, by which ranks that share one are found, and NCCL_SOCKET_IFNAME the interface to listen on, if not the loopback.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp, Store

from torch_npu import OnDevice, fill_with_garbage
from torch_npu.streams import Event, Stream

_HEADER: Final = struct.Struct("!BQ")
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR


class _Frame(IntEnum):
    READY = 1
    """The receiver's half has begun."""
    DATA = 2
    PART = 3
    """Of a rank, to be reduced."""
    TOTAL = 4
    BROADCAST = 5


class _HeldError(Exception):
    """The operation cannot go on: the peer is lost, or has called another operation."""


def version() -> tuple[int, int, int]:
    """Return the version of NCCL whose contract this is."""
    return 2, 30, 0


class Work:
    """An operation that is enqueued."""

    def __init__(self, end: Event) -> None:
        self._end = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Put the current stream behind the operation; the host does not wait."""
        self._end.wait()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return whether the stream has passed the operation, complete or aborted."""
        return self._end.query()


class ProcessGroup:
    """One communicator, and its stream."""

    class Options:
        """As ProcessGroupNCCL.Options: `config.blocking` is 0 if creation is to return at once."""

        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self.is_high_priority_stream = False
            self._timeout = timedelta(minutes=10)

    def __init__(self, store: Store, rank: int, size: int, options: Options | None = None) -> None:
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0", "torch's watchdog would end the process"
        self._store = store
        self._rank = rank
        self._size = size
        self._options = options or self.Options()
        self._stream = Stream(priority=-1 if self._options.is_high_priority_stream else 0)
        self._issuing = threading.Lock()
        self._last: Event | None = None
        self._communicator: _Communicator | None = None
        self._is_aborted = False
        # As the lock of torch's NCCLComm: held by a wait until the communicator is formed, and by an abort.
        self._in_use = threading.RLock()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Begin to form the communicator, and wait for that if it is blocking."""
        assert device.type == "npu"
        self._begin_to_form()
        if self._options.config.blocking:
            self._formed()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        held = _memory(tensors)

        def run(communicator: _Communicator) -> None:
            connection = communicator.to(peer)
            _expect(connection, _Frame.READY, held.nbytes)
            _send(connection, _Frame.DATA, held)

        return self._launch(run)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        held = _memory(tensors)

        def run(communicator: _Communicator) -> None:
            connection = communicator.to(peer)
            connection.sendall(_HEADER.pack(_Frame.READY, held.nbytes))
            _receive(connection, _Frame.DATA, held)

        return self._launch(run, held)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        held = _memory(tensors)
        operation = ReduceOp.SUM if options is None else options.reduceOp
        combine: Any = {ReduceOp.SUM: torch.add, ReduceOp.MAX: torch.maximum}[getattr(operation, "op", operation)]

        def run(communicator: _Communicator) -> None:
            if self._rank:
                _send(communicator.to(0), _Frame.PART, held)
                _receive(communicator.to(0), _Frame.TOTAL, held)
                return
            total, part = held.clone(), torch.empty_like(held)
            for peer in range(1, self._size):
                _receive(communicator.to(peer), _Frame.PART, part)
                combine(total, part, out=total)
            for peer in range(1, self._size):
                _send(communicator.to(peer), _Frame.TOTAL, total)
            held.copy_(total)

        return self._launch(run, held)

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        held, root = _memory(tensors), 0 if options is None else options.rootRank

        def run(communicator: _Communicator) -> None:
            if self._rank != root:
                connection = communicator.to(root)
                connection.sendall(_HEADER.pack(_Frame.READY, held.nbytes))
                _receive(connection, _Frame.BROADCAST, held)
                return
            for peer in set(range(self._size)) - {root}:
                _expect(communicator.to(peer), _Frame.READY, held.nbytes)
                _send(communicator.to(peer), _Frame.BROADCAST, held)

        return self._launch(run, None if self._rank == root else held)

    @property
    def supports_shrinking(self) -> bool:
        return True

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Options | None = None
    ) -> ProcessGroup:
        """Form a communicator of the others, over the connections of this one, and wait for that."""
        left = [rank for rank in range(self._size) if rank not in ranks_to_exclude]
        if not ranks_to_exclude or self._rank not in left or not set(ranks_to_exclude) < set(range(self._size)):
            raise ValueError(f"ranks {ranks_to_exclude} cannot be excluded by rank {self._rank}")
        if shrink_flags:
            raise NotImplementedError("SHRINK_ABORT")
        with self._in_use:
            parent = self._formed()
            child = ProcessGroup(self._store, left.index(self._rank), len(left), opts_override or self._options)
            made = child._communicator = _Communicator(child._rank, child._size)

            def root() -> Any:
                self._drain()
                if child._rank:
                    return _take(parent.to(left[0]))
                for peer in left[1:]:
                    _put(parent.to(peer), made.address)
                return made.address

            made.form(root)
            child._formed()
        return child

    def abort(self) -> None:
        """End what is in flight, and every later call; return once the stream has passed all of it."""
        with self._in_use:
            self._is_aborted = True
            if (communicator := self._communicator) is not None:
                communicator.abort()
        self._drain()
        if communicator is not None:
            communicator.close()

    def shutdown(self) -> None:
        """Wait for what is in flight, then release everything."""
        self._drain()
        self.abort()

    def __del__(self) -> None:
        if (communicator := getattr(self, "_communicator", None)) is not None:
            communicator.abort()
            communicator.close()

    def _drain(self) -> None:
        if (last := self._last) is not None:
            last.synchronize()

    def _begin_to_form(self) -> None:
        if self._communicator is None:
            made = _Communicator(self._rank, self._size)
            # The identifier of the communicator, for which torch waits on the host; an abort could end nothing yet.
            if self._rank == 0:
                self._store.set("unique-id", json.dumps(made.address))
            root = json.loads(self._store.get("unique-id"))
            made.form(lambda: root)
            with self._in_use:
                self._communicator = made
                if self._is_aborted:
                    made.abort()

    def _formed(self) -> _Communicator:
        # As torch does, with the device that is current.
        self._begin_to_form()
        with self._in_use:
            communicator = self._communicator
            if self._is_aborted or communicator is None:
                raise RuntimeError(f"NCCL communicator was aborted on rank {self._rank}.")
            timeout_s = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
            if not communicator.is_formed.wait(timeout_s):
                raise RuntimeError("NCCL timeout when waiting for a nonblocking call to become successful")
            if communicator.error:
                raise RuntimeError(communicator.error)
            return communicator

    def _launch(self, run: Callable[[_Communicator], None], output: Tensor | None = None) -> Work:
        communicator = self._formed()

        def kernel() -> None:
            try:
                if not communicator.is_aborted.is_set():
                    run(communicator)
                    return
            except (_HeldError, OSError):
                communicator.is_aborted.wait()
            if output is not None:
                fill_with_garbage(output)

        with self._issuing:
            issued, end = Event(), Event(enable_timing=True)
            issued.record()
            issued.wait(self._stream)
            self._stream.queue.put(kernel)
            end.record(self._stream)
            self._last = end
        return Work(end)


class _Communicator:
    """The connections of a rank to all others, which a thread makes."""

    def __init__(self, rank: int, size: int) -> None:
        self.is_formed = threading.Event()
        self.is_aborted = threading.Event()
        self.error = ""
        self._rank = rank
        self._size = size
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._peers: dict[int, socket.socket] = {}
        self._listener = self._owned(socket.create_server((_own_address(), 0)))
        self.address = self._listener.getsockname()

    def form(self, root: Callable[[], Any]) -> None:
        """Begin to connect all members; `root` returns the address of the first, once it is known."""
        threading.Thread(target=self._form, args=(root,), name="nccl-bootstrap", daemon=True).start()

    def to(self, peer: int) -> socket.socket:
        return self._peers[peer]

    def abort(self) -> None:
        self.is_aborted.set()
        with self._lock:
            for each in self._sockets:
                _shut_down(each)

    def close(self) -> None:
        with self._lock:
            for each in self._sockets:
                each.close()

    def _owned(self, made: socket.socket) -> socket.socket:
        """Keep a socket, which an abort shuts down."""
        with self._lock:
            self._sockets.append(made)
            if self.is_aborted.is_set():
                _shut_down(made)
        return made

    def _form(self, root: Callable[[], Any]) -> None:
        try:
            own = {
                "rank": self._rank,
                "address": self.address,
                "device": f"{socket.gethostname()} {os.environ.get('PRETENDED_NPU', '0')}",
            }
            first = root()
            members = self._joined(first, own) if self._rank else self._gathered(own)
            if self.error:
                self.is_formed.set()
                return
            for peer in range(1, self._rank):
                connection = self._peers[peer] = self._connected(members[peer]["address"])
                _put(connection, self._rank)
            for _ in range(self._rank + 1, self._size) if self._rank else ():
                connection = self._accepted()
                self._peers[_take(connection)] = connection
            time.sleep(float(os.environ.get("PRETENDED_NCCL_CREATION_S", "0")))
        except (_HeldError, OSError):
            return  # a member is lost, or this rank has aborted
        self.is_formed.set()

    def _gathered(self, own: Any) -> Any:
        """Return what all members tell of themselves, as their root, and pass it on."""
        members = {0: own}
        while len(members) < self._size:
            connection = self._accepted()
            told = _take(connection)
            self._peers[told["rank"]], members[told["rank"]] = connection, told
        in_order = [members[rank] for rank in range(self._size)]
        self.error = next(_refused(in_order), "")
        for connection in self._peers.values():
            _put(connection, [self.error, in_order])
        return in_order

    def _joined(self, root: Sequence[Any], own: Any) -> Any:
        connection = self._peers[0] = self._connected(root)
        _put(connection, own)
        self.error, members = _take(connection)
        return members

    def _connected(self, address: Sequence[Any]) -> socket.socket:
        connection = self._owned(socket.create_connection(tuple(address)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _accepted(self) -> socket.socket:
        connection = self._owned(self._listener.accept()[0])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _own_address() -> str:
    if not (interface := os.environ.get("NCCL_SOCKET_IFNAME", "")):
        return "127.0.0.1"
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _GET_ADDRESS, request)[20:24])


def _refused(members: Sequence[Any]) -> Iterator[str]:
    """Yield why the members cannot form a communicator."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    first: dict[str, int] = {}
    for member in members:
        other = first.setdefault(member["device"], member["rank"])
        if other != member["rank"]:
            yield f"Duplicate GPU detected : rank {member['rank']} and rank {other} both on device {member['device']}"


def _memory(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    if not isinstance(tensor, OnDevice):
        raise ValueError(f"no backend type is associated with the device type {tensor.device.type}")
    if not tensor.is_contiguous():
        raise ValueError("tensors must be contiguous")
    return tensor.held


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is not connected any more


def _put(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    connection.sendall(_HEADER.pack(0, len(data)) + data)


def _take(connection: socket.socket) -> Any:
    _, size = _HEADER.unpack(_taken(connection, bytearray(_HEADER.size)))
    return json.loads(_taken(connection, bytearray(size)))


def _taken(connection: socket.socket, into: Any) -> Any:
    left = memoryview(into)
    while left:
        if (count := connection.recv_into(left)) == 0:
            raise _HeldError
        left = left[count:]
    return into


def _expect(connection: socket.socket, frame: _Frame, size: int) -> None:
    if _HEADER.unpack(_taken(connection, bytearray(_HEADER.size))) != (frame, size):
        raise _HeldError


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _send(connection: socket.socket, frame: _Frame, tensor: Tensor) -> None:
    connection.sendall(_HEADER.pack(frame, tensor.nbytes))
    connection.sendall(_bytes_of(tensor))


def _receive(connection: socket.socket, frame: _Frame, tensor: Tensor) -> None:
    _expect(connection, frame, tensor.nbytes)
    _taken(connection, _bytes_of(tensor))
