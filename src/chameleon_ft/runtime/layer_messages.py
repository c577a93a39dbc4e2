"""The layers of a message on their way from one worker to another: what describes them, their tensors, their checksums.

Under one tag are sent, in this order: size and checksum of the description; the description, which tells type and shape
of every tensor of every layer, and the value of what is none; and then for each layer its tensors, large ones in
pieces, and the checksum of each piece. So a receiver needs to know nothing of the optimizer that the sender's state is
from, and tensors are sent from where they are and received where they stay. Since it knows all layers from the
beginning, it can make room for the next one, and have it arrive, while it is still busy with the one before.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from chameleon_ft.runtime.checksums import checksum
from chameleon_ft.runtime.communicators import CommunicationError, Communicators, InFlight
from chameleon_ft.runtime.layers import LayerState
from chameleon_ft.runtime.preallocation import Memory

__all__ = ["IncomingLayers", "OutgoingLayer", "OutgoingLayers", "layer_checksums", "tensor_bytes"]

# Checking goes on beside the link as long as there is another piece to wait for.
_PIECE_BYTES: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class OutgoingLayer:
    """A layer to be sent.

    Attributes:
        state: as `HeldLayers.state_of` gives it.
        num_bytes: what the layer has in the profile, for links that are emulated.
        checksums: `layer_checksums` of the state, which may be under way.
    """

    state: Mapping[str, Any]
    num_bytes: int
    checksums: Future[list[int]]


def tensor_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors of a state."""
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def layer_checksums(state: Mapping[str, Any], device: torch.device) -> list[int]:
    """Checksums of all that is sent of a layer from `device`, in order."""
    return [checksum(piece) for piece in _pieces_of(state, device)]


class OutgoingLayers:
    """Layers that are sent to a worker one after the other, described at once.

    Args:
        layers: in the order in which they are sent.
        peer: who receives them.
        device: where tensors are sent from; what is elsewhere, such as a counter of an optimizer, is copied.

    Raises:
        CommunicationError: the peer is gone.
    """

    def __init__(
        self,
        layers: Sequence[OutgoingLayer],
        communicators: Communicators,
        *,
        peer: int,
        tag: int,
        device: torch.device,
    ) -> None:
        self._waiting = deque(layers)
        self._under_way: deque[list[tuple[InFlight, Tensor]]] = deque()
        self._communicators = communicators
        self._peer = peer
        self._tag = tag
        self._device = device
        entries = [{key: _described(value) for key, value in layer.state.items()} for layer in layers]
        description = torch.frombuffer(bytearray(pickle.dumps(entries)), dtype=torch.uint8)
        size = torch.tensor([description.numel(), checksum(description)], dtype=torch.int64, device=device)
        self._description = [self._send(size), self._send(description.to(device))]

    def start_next(self) -> None:
        """Start sending the next layer, if there is one. Its tensors must not change until it has been finished.

        Raises:
            CommunicationError: the peer is gone.
        """
        if not self._waiting:
            return
        layer = self._waiting.popleft()
        total = max(1, tensor_bytes(layer.state))
        pieces = _pieces_of(layer.state, self._device)
        sent, self._description = self._description, []
        sent += [self._send(piece, layer.num_bytes * piece.numel() // total) for piece in pieces]
        if checksums := layer.checksums.result():
            sums = torch.tensor(checksums, dtype=torch.int64, device=self._device)
            sent.append(self._send(sums))
        self._under_way.append(sent)

    def finish_next(self) -> None:
        """Block until all of the earliest layer under way has been taken over. Raises CommunicationError."""
        sent = self._under_way.popleft()
        if sent:
            sent[-1][0].wait()  # they arrive in the order in which they were sent

    def _send(self, tensor: Tensor, stands_for_bytes: int = 0) -> tuple[InFlight, Tensor]:
        sending = self._communicators.send(tensor, peer=self._peer, tag=self._tag, stands_for_bytes=stands_for_bytes)
        return sending, tensor


class IncomingLayers:
    """Layers that are received from a worker one after the other; their tensors are on `device`."""

    def __init__(self, communicators: Communicators, *, peer: int, tag: int, device: torch.device) -> None:
        self._communicators = communicators
        self._peer = peer
        self._tag = tag
        self._device = device
        self._described: deque[dict[str, tuple[Any, ...]]] = deque()
        self._under_way: deque[tuple[LayerState, list[tuple[InFlight, Tensor]]]] = deque()

    def describe(self) -> None:
        """Receive what describes the layers. To be called once, before all else.

        Raises:
            CommunicationError: the peer is gone, or what has arrived is not what was sent.
        """
        size, expected = map(int, self._arrived(torch.empty(2, dtype=torch.int64, device=self._device)))
        description = self._arrived(torch.empty(size, dtype=torch.uint8, device=self._device))
        if checksum(description) != expected:
            raise self._damaged()
        self._described = deque(pickle.loads(description.numpy().data))

    def start_next(self, room: Mapping[str, Tensor], memory: Memory | None = None) -> None:
        """Start receiving the next layer.

        Args:
            room: tensors to receive into, by the same keys as the state's; those of another type, shape or device, and
                those that are not contiguous, are left alone.
            memory: for what has no room there, as far as it goes.

        Raises:
            CommunicationError: the peer is gone.
        """
        state = {key: self._placed(entry, room.get(key), memory) for key, entry in self._described.popleft().items()}
        pieces = [piece for value in state.values() if isinstance(value, Tensor) for piece in _pieces(value)]
        under_way = [self._receive(piece) for piece in pieces]
        if pieces:
            under_way.append(self._receive(torch.empty(len(pieces), dtype=torch.int64, device=self._device)))
        self._under_way.append((state, under_way))

    def finish_next(self) -> LayerState:
        """Wait for the earliest layer under way, and see that it is what was sent.

        Raises:
            CommunicationError: the peer is gone, or what has arrived is not what was sent.
        """
        state, under_way = self._under_way.popleft()
        if not under_way:
            return state
        *pieces, (last, checksums) = under_way
        found = []
        for receive, piece in pieces:
            receive.wait()
            found.append(checksum(piece))
        last.wait()
        if checksums.tolist() != found:
            raise self._damaged()
        return state

    def _receive(self, tensor: Tensor) -> tuple[InFlight, Tensor]:
        return self._communicators.receive(tensor, peer=self._peer, tag=self._tag), tensor

    def _arrived(self, tensor: Tensor) -> Tensor:
        receive, _ = self._receive(tensor)
        receive.wait()
        return tensor.cpu()

    def _placed(self, entry: tuple[Any, ...], room: Tensor | None, memory: Memory | None) -> Any:
        if len(entry) == 1:
            return entry[0]
        dtype, shape = entry
        fits = room is not None and (room.dtype, room.shape, room.device) == (dtype, shape, self._device)
        if room is not None and fits and room.is_contiguous():
            return room.detach()
        if memory is not None and (part := memory.part(shape, dtype)) is not None:
            return part
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _damaged(self) -> CommunicationError:
        return CommunicationError(
            self._peer, "the state of a layer has arrived with another checksum than it was sent with"
        )


def _described(value: Any) -> tuple[Any, ...]:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (value,)


def _pieces_of(state: Mapping[str, Any], device: torch.device) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, Tensor):
            yield from _pieces(value.detach().to(device).contiguous())


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor, in place and in pieces of bounded size."""
    flat = tensor.view(-1).view(torch.uint8)
    return iter(flat.split(_PIECE_BYTES)) if flat.numel() else iter(())
