"""A layer's state on its way from one worker to another: what describes it, its tensors, and their checksums.

Under one tag are sent, in this order: size and CRC-32 of the description; the description, which tells type and shape
of every tensor, and the value of what is none; the tensors, large ones in pieces; and the CRC-32 of each piece. So a
receiver needs to know nothing of the optimizer that the sender's state is from, and tensors are sent from where they
are and received where they stay.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from chameleon_ft.runtime.communicators import CommunicationError, Communicators, InFlight
from chameleon_ft.runtime.layers import LayerState

__all__ = ["LayerInFlight", "receive_layer", "send_layer", "tensor_bytes"]

# Checking goes on beside the link as long as there is another piece to wait for.
_PIECE_BYTES: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class LayerInFlight:
    """A layer that is being sent. Its tensors must not change until it has been waited for."""

    parts: list[tuple[InFlight, Tensor]]

    def wait(self) -> None:
        """Block until all of it has been taken over. Raises CommunicationError."""
        for part, _ in self.parts:
            part.wait()


def tensor_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors of a state."""
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def send_layer(
    state: Mapping[str, Any],
    communicators: Communicators,
    *,
    peer: int,
    tag: int,
    num_bytes: int,
    device: torch.device,
) -> LayerInFlight:
    """Start sending a layer's state.

    Args:
        num_bytes: what the layer has in the profile, for links that are emulated.
        device: where tensors are sent from; what is elsewhere, such as a counter of an optimizer, is copied.

    Raises:
        CommunicationError: the peer is gone.
    """
    entries = {key: _described(value) for key, value in state.items()}
    description = torch.frombuffer(bytearray(pickle.dumps(entries)), dtype=torch.uint8)
    total = max(1, tensor_bytes(state))
    parts: list[tuple[InFlight, Tensor]] = []

    def send(tensor: Tensor, stands_for_bytes: int = 0) -> None:
        parts.append((communicators.send(tensor, peer=peer, tag=tag, stands_for_bytes=stands_for_bytes), tensor))

    send(torch.tensor([description.numel(), _checksum(description)], dtype=torch.int64, device=device))
    send(description.to(device))
    checksums = []
    for value in state.values():
        if isinstance(value, Tensor):
            for piece in _pieces(value.detach().to(device).contiguous()):
                send(piece, num_bytes * piece.numel() // total)
                checksums.append(_checksum(piece))
    if checksums:
        send(torch.tensor(checksums, dtype=torch.int64, device=device))
    return LayerInFlight(parts)


def receive_layer(communicators: Communicators, *, peer: int, tag: int, device: torch.device) -> LayerState:
    """Receive a layer's state, and see that it is what was sent. Its tensors are on `device`.

    Raises:
        CommunicationError: the peer is gone, or what has arrived is not what was sent.
    """

    damaged = CommunicationError(peer, "the state of a layer has arrived with another checksum than it was sent with")

    def start(tensor: Tensor) -> tuple[InFlight, Tensor]:
        return communicators.receive(tensor, peer=peer, tag=tag), tensor

    def arrived(tensor: Tensor) -> Tensor:
        receive, _ = start(tensor)
        receive.wait()
        return tensor.cpu()

    size, checksum = map(int, arrived(torch.empty(2, dtype=torch.int64, device=device)))
    description = arrived(torch.empty(size, dtype=torch.uint8, device=device))
    if _checksum(description) != checksum:
        raise damaged
    entries = pickle.loads(description.numpy().data)
    state = {key: _allocated(entry, device) for key, entry in entries.items()}
    pieces = [piece for value in state.values() if isinstance(value, Tensor) for piece in _pieces(value)]
    under_way = [start(piece) for piece in pieces]
    if not pieces:
        return state
    last, checksums = start(torch.empty(len(pieces), dtype=torch.int64, device=device))
    found = []
    for receive, piece in under_way:
        receive.wait()
        found.append(_checksum(piece))
    last.wait()
    if checksums.tolist() != found:
        raise damaged
    return state


def _described(value: Any) -> tuple[Any, ...]:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (value,)


def _allocated(entry: tuple[Any, ...], device: torch.device) -> Any:
    if len(entry) == 1:
        return entry[0]
    dtype, shape = entry
    return torch.empty(shape, dtype=dtype, device=device)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor, in place and in pieces of bounded size."""
    flat = tensor.view(-1).view(torch.uint8)
    return iter(flat.split(_PIECE_BYTES)) if flat.numel() else iter(())


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.cpu().numpy().data)
