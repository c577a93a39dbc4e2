"""Messages that carry the state of layers from one worker to another, and memory for layers before they arrive.

Under one tag a sender sends, in this order: size and checksum of the description; the description, with type and shape
of every tensor of every layer and the value of everything else; then for each layer its tensors, large ones in pieces,
and the checksum of each piece. The receiver needs no knowledge of the sender's optimizer, and neither side copies a
tensor. Because the receiver knows all layers from the beginning, it can allocate and receive the next layer while it
works on the previous one.

The first touch of a page that the system gives out costs as much as receiving it. So that a transfer does not wait for
that, a thread allocates while the rank waits for something else: blank layers for the parameters, and a block of memory
for the optimizer's state, whose division is known only when the layer is described.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from chameleon_ft.errors import ControlError
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import tensor_bytes
from chameleon_ft.worker.communicators.base import CommunicationError, Communicators, InFlight
from chameleon_ft.worker.device import is_host_memory
from chameleon_ft.worker.execution.layers import HeldLayer, LayerState
from chameleon_ft.worker.state_transfer.description import decode_description, encode_description

# Touched in some milliseconds, between two looks at whether it is still wanted.
_CHUNK_BYTES: Final = 1 << 24
# In bytes, as torch's allocator has it on a CPU.
_ALIGNMENT: Final = 64
# No common optimizer keeps more tensors of a parameter.
_TENSORS: Final = 4
# A smaller tensor has no page of its own.
_MIN_BYTES: Final = 1 << 12


class Memory:
    """A block of host memory that is given out in parts, first to last. It is freed with the last part in use."""

    def __init__(self, num_bytes: int) -> None:
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        self._used = 0

    def touch(self, *, unless: Callable[[], bool]) -> None:
        """Have the system give out all pages; return early once `unless` is true."""
        for piece in self._block.split(_CHUNK_BYTES):
            if unless():
                return
            piece.zero_()

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return a contiguous tensor of any values; None where it does not fit, or is too small to be worth it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _MIN_BYTES or self._used + num_bytes > self._block.numel():
            return None
        part = self._block[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory for a layer that will arrive: a blank one, and a block for the rest.

    Without `memory`, the optimizer's state gets its memory as it arrives.
    """

    layer: HeldLayer
    memory: Memory | None = None


class LayerAllocator:
    """Allocates layers, ahead of their arrival if possible.

    Args:
        ahead: Allocate host memory before it is needed. An accelerator's costs nothing to touch.
        is_divided: Owners of slices have the masters of parameters.
    """

    def __init__(self, job: Job, *, seed: int, device: torch.device, ahead: bool, is_divided: bool = False) -> None:
        self._job = job
        self._seed = seed
        self._device = device
        self._is_divided = is_divided
        self._ahead = ahead and is_host_memory(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="preallocation")
        self._pending: dict[int, Future[Allocation]] = {}
        # Held to change `_pending`: a generation is prepared during training.
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def preallocate(self, state_bytes: Mapping[int, int], *, then: Callable[[], object] = lambda: None) -> None:
        """Begin to allocate these layers, in this order, and release any other.

        `state_bytes` has the bytes of each layer's state, the optimizer's included. `then` is called at the end,
        perhaps by another thread.
        """
        if not self._ahead:
            then()
            return
        with self._lock:
            self._release(lambda layer: layer not in state_bytes)
            self._stop.clear()
            for layer, num_bytes in state_bytes.items():
                if layer not in self._pending:
                    self._pending[layer] = self._thread.submit(self._allocate, layer, num_bytes)
            self._thread.submit(then)

    def take(self, layer: int) -> Allocation:
        """Return the memory for a layer; blocks until it is allocated. Raises as the layer's factory does."""
        if not self._ahead:
            return Allocation(self._blank(layer))
        with self._lock:
            pending = self._pending.pop(layer, None) or self._thread.submit(self._allocate, layer, 0)
        return pending.result()

    def stop_touching(self) -> None:
        """Touch no more memory until the next `preallocate`. Called from any thread."""
        self._stop.set()

    def drop(self) -> None:
        """Release all that was not taken; when this returns, no allocation is in progress."""
        with self._lock:
            self._release(lambda layer: True)

    def _release(self, unwanted: Callable[[int], bool]) -> None:
        """Release unwanted layers, and layers that are not begun, so that they can begin in another order."""
        gone = [layer for layer, pending in self._pending.items() if pending.cancel() or unwanted(layer)]
        running = [self._pending.pop(layer) for layer in gone]
        if any(not pending.done() for pending in running):
            self._stop.set()
            wait(running)

    def _blank(self, layer: int) -> HeldLayer:
        return HeldLayer.blank(self._job, layer, seed=self._seed, device=self._device, is_divided=self._is_divided)

    def _allocate(self, layer: int, num_bytes: int) -> Allocation:
        blank = self._blank(layer)
        rest = num_bytes - sum(value.nbytes for value in blank.targets.values() if isinstance(value, Tensor))
        if rest <= 0:
            return Allocation(blank)
        # Each tensor may begin a little after the end of the one before.
        rest += _TENSORS * _ALIGNMENT * sum(1 for _ in blank.module.parameters())
        try:
            memory = Memory(rest)
        except RuntimeError:
            # Memory does not hold all of it at once; piece by piece, as it arrives, the layer may fit.
            return Allocation(blank)
        memory.touch(unless=self._stop.is_set)
        return Allocation(blank, memory)


# A piece is checked while the next one arrives.
_PIECE_BYTES: Final = 1 << 22
# Of a layer that gives way to other messages.
_PIECES_IN_FLIGHT: Final = 2
_COLUMNS: Final = 4096
_ROW_BYTES: Final = 8 * _COLUMNS
# Enough to amortize a launch.
_ROWS_AT_ONCE: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class OutgoingLayer:
    """A layer to send.

    Attributes:
        state: The state that `HeldLayers.state_of` gives.
        num_bytes: The layer's bytes in the profile, for emulated links.
        checksums: Returns `layer_checksums` of the state, and is called once the tensors are on their way.
    """

    state: Mapping[str, Any]
    num_bytes: int
    checksums: Callable[[], list[int]]


class OutgoingLayers:
    """Layers sent to one worker in order, after a description of all layers.

    Args:
        device: Tensors are sent from it; tensors elsewhere, such as an optimizer's counter, are copied to it first.
        gives_way: Other messages to the receiver wait for few pieces at most.

    Raises:
        CommunicationError: the peer is gone. The methods raise it too.
        ConfigError: a state has a value that cannot be sent; see `encode_description`.
    """

    def __init__(
        self,
        layers: Sequence[OutgoingLayer],
        communicators: Communicators,
        *,
        peer: int,
        tag: int,
        device: torch.device,
        gives_way: bool = False,
    ) -> None:
        self._gives_way = gives_way
        self._waiting = deque(layers)
        self._in_flight: deque[list[tuple[InFlight, Tensor]]] = deque()
        self._communicators = communicators
        self._peer = peer
        self._tag = tag
        self._device = device
        encoded = encode_description([layer.state for layer in layers])
        description = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        size = torch.tensor([description.numel(), checksum(description)], dtype=torch.int64, device=device)
        self._description = [self._send(size), self._send(description.to(device))]

    def start_next(self) -> None:
        """Start sending the next layer, if there is one. Its tensors must not change until it has arrived."""
        if not self._waiting:
            return
        layer = self._waiting.popleft()
        total = max(1, tensor_bytes(layer.state))
        pieces = _pieces_of(layer.state, self._device)
        sent, self._description = self._description, []
        for piece in pieces:
            if self._gives_way and len(sent) >= _PIECES_IN_FLIGHT:
                sent[-_PIECES_IN_FLIGHT][0].wait()
            sent.append(self._send(piece, layer.num_bytes * piece.numel() // total))
        if checksums := layer.checksums():
            sent.append(self._send(torch.tensor(checksums, dtype=torch.int64, device=self._device)))
        self._in_flight.append(sent)

    def finish_next(self) -> None:
        """Block until the earliest layer in flight has arrived."""
        sent = self._in_flight.popleft()
        if sent:
            # Messages arrive in the order of sending.
            sent[-1][0].wait()

    def _send(self, tensor: Tensor, stands_for_bytes: int = 0) -> tuple[InFlight, Tensor]:
        sending = self._communicators.send(tensor, peer=self._peer, tag=self._tag, stands_for_bytes=stands_for_bytes)
        return sending, tensor


class IncomingLayers:
    """Layers received from one worker in order, with their tensors on `device`.

    All methods raise CommunicationError if the peer is gone, a checksum differs from the sender's or the description is
    not one.
    """

    def __init__(self, communicators: Communicators, *, peer: int, tag: int, device: torch.device) -> None:
        self._communicators = communicators
        self._peer = peer
        self._tag = tag
        self._device = device
        self._described: deque[dict[str, Any]] = deque()
        self._in_flight: deque[tuple[LayerState, list[tuple[InFlight, Tensor]]]] = deque()

    def describe(self) -> None:
        """Receive the description of the layers. Call this once, before the other methods."""
        size, expected = map(int, self._arrived(torch.empty(2, dtype=torch.int64, device=self._device)))
        description = self._arrived(torch.empty(size, dtype=torch.uint8, device=self._device))
        self._require([checksum(description)], [expected])
        try:
            self._described = deque(decode_description(description.numpy().tobytes()))
        except ControlError as error:
            raise CommunicationError(self._peer, str(error)) from None

    def start_next(self, targets: Mapping[str, Tensor], memory: Memory | None = None) -> None:
        """Start receiving the next layer.

        Args:
            targets: tensors to receive into, by the keys of the state; ignored if type, shape or device differ, or if
                not contiguous.
            memory: for tensors without a target, as long as it lasts.
        """
        state = {key: self._target(entry, targets.get(key), memory) for key, entry in self._described.popleft().items()}
        pieces = [piece for value in state.values() if isinstance(value, Tensor) for piece in _pieces(value)]
        in_flight = [self._receive(piece) for piece in pieces]
        if pieces:
            in_flight.append(self._receive(torch.empty(len(pieces), dtype=torch.int64, device=self._device)))
        self._in_flight.append((state, in_flight))

    def finish_next(self) -> LayerState:
        """Wait for the earliest layer in flight, and check it."""
        state, in_flight = self._in_flight.popleft()
        if in_flight:
            *pieces, (last, expected) = in_flight
            found = []
            for receive, piece in pieces:
                receive.wait()
                found.append(checksum(piece))
            last.wait()
            self._require(found, expected.tolist())
        return state

    def _receive(self, tensor: Tensor) -> tuple[InFlight, Tensor]:
        return self._communicators.receive(tensor, peer=self._peer, tag=self._tag), tensor

    def _arrived(self, tensor: Tensor) -> Tensor:
        receive, _ = self._receive(tensor)
        receive.wait()
        return tensor.cpu()

    def _target(self, entry: Any, target: Tensor | None, memory: Memory | None) -> Any:
        """Return the value of an entry of the description, or the tensor to receive into."""
        if not isinstance(entry, Tensor):
            return entry
        dtype, shape = entry.dtype, entry.shape
        if (
            target is not None
            and (target.dtype, target.shape, target.device) == (dtype, shape, self._device)
            and target.is_contiguous()
        ):
            return target.detach()
        if memory is not None and (part := memory.part(shape, dtype)) is not None:
            return part
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _require(self, found: list[int], expected: list[int]) -> None:
        if found != expected:
            raise CommunicationError(
                self._peer, "the state of a layer has arrived with another checksum than it was sent with"
            )


def send_state(
    state: Mapping[str, Any],
    communicators: Communicators,
    *,
    peer: int,
    tag: int,
    device: torch.device,
    num_bytes: int,
    gives_way: bool = False,
) -> OutgoingLayers:
    """Start sending a single state; `finish_next` waits until it has arrived."""
    layer = OutgoingLayer(state, num_bytes, partial(layer_checksums, state, device))
    outgoing = OutgoingLayers([layer], communicators, peer=peer, tag=tag, device=device, gives_way=gives_way)
    outgoing.start_next()
    return outgoing


def receive_state(
    communicators: Communicators,
    *,
    peer: int,
    tag: int,
    device: torch.device,
    targets: Mapping[str, Tensor],
    memory: Memory | None = None,
) -> LayerState:
    """Receive what `send_state` sends; see `IncomingLayers`. Raises CommunicationError."""
    incoming = IncomingLayers(communicators, peer=peer, tag=tag, device=device)
    incoming.describe()
    incoming.start_next(targets, memory)
    return incoming.finish_next()


def layer_checksums(state: Mapping[str, Any], device: torch.device) -> list[int]:
    """Return the checksums of all pieces of a layer that is sent from `device`, in order."""
    return [checksum(piece) for piece in _pieces_of(state, device)]


def checksum(data: Tensor) -> int:
    """Return a checksum, below 2^63, of contiguous bytes: XXH3 on a CPU, `checksum_of_sums` on an accelerator.

    Both are several times faster than a link.
    """
    if not data.is_cpu:
        return checksum_of_sums(data)
    return xxhash.xxh3_64_intdigest(data.numpy().data) >> 1


def checksum_of_sums(data: Tensor) -> int:
    """Return a checksum, below 2^32, of contiguous bytes, computed on their device.

    The bytes form a table of 64-bit words. The checksum is the CRC-32 of its row and column sums, modulo 2^64. A change
    goes undetected if it preserves every sum, which takes at least four words, at the corners of a rectangle and
    changed by one amount; or if the CRC of the new sums equals the old one, as in one change of 2^32.
    """
    whole = data.numel() - data.numel() % _ROW_BYTES
    rest = zlib.crc32(data[whole:].cpu().numpy().data)
    if not whole:
        return rest
    table = data[:whole]
    if table.storage_offset() % 8:
        # Torch requires aligned words.
        table = table.clone()
    words = table.view(torch.int64).view(-1, _COLUMNS)
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=data.device)
    rows = []
    for part in words.split(_ROWS_AT_ONCE):
        rows.append(part.sum(1))
        columns += part.sum(0)
    return zlib.crc32(torch.cat([*rows, columns]).cpu().numpy().data, rest)


def _pieces_of(state: Mapping[str, Any], device: torch.device) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, Tensor):
            yield from _pieces(value.detach().to(device).contiguous())


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a contiguous tensor, in place and in pieces of bounded size."""
    flat = tensor.view(-1).view(torch.uint8)
    if flat.numel():
        yield from flat.split(_PIECE_BYTES)
