"""A part of the training state as one block of bytes in host memory, so that blocks can be sent, and joined to parity.

A block has a header, a description of the state, and the content of its tensors, each at an aligned place. The header
has the length and a checksum of all that follows, so a block is recognised with zeros after it, as parity leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from chameleon_ft.errors import ControlError, DamagedCheckpointError
from chameleon_ft.runtime.execution.held_layer import LayerState
from chameleon_ft.runtime.state_transfer.description import decode_description, encode_description
from chameleon_ft.runtime.state_transfer.layer_messages import checksum

_HEADER_BYTES: Final = 64
_HEADER: Final = 3  # int64: bytes of the description, bytes of all that follows the header, their checksum
_ALIGNMENT: Final = 64


class PackedState:
    """A block for a state, whose tensors are copied into it later.

    Args:
        state: constant until `copy` returns.

    Attributes:
        num_bytes: of the block.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._description = torch.frombuffer(bytearray(encode_description([state])), dtype=torch.uint8)
        self._places, self.num_bytes = _places(state, self._description.numel())

    def copy(self, block: Tensor) -> None:
        """Copy the state into a block of `num_bytes`; `seal` is still to be called."""
        for key, (start, stop) in self._places.items():
            block[start:stop].copy_(self._state[key].detach().contiguous().view(-1).view(torch.uint8))
        self._state = {}

    def seal(self, block: Tensor) -> None:
        """Write the header and the description. The state need not be there any more."""
        size = self._description.numel()
        block[_HEADER_BYTES : _HEADER_BYTES + size] = self._description
        end = _HEADER_BYTES + size
        for start, stop in self._places.values():
            block[end:start].zero_()
            end = stop
        block[:_HEADER_BYTES].zero_()
        content = block[_HEADER_BYTES : self.num_bytes]
        header = torch.tensor([size, content.numel(), checksum(content)], dtype=torch.int64)
        block[: 8 * _HEADER].view(torch.int64).copy_(header)


def unpack(block: Tensor) -> LayerState:
    """Return the state that a block was packed from, with tensors that share its memory.

    Raises:
        DamagedCheckpointError: the block is not as it was packed.
    """
    size, length, expected = block[: 8 * _HEADER].view(torch.int64).tolist()
    if not (0 <= size <= length <= block.numel() - _HEADER_BYTES):
        raise DamagedCheckpointError("a block of a snapshot has a damaged header")
    content = block[_HEADER_BYTES : _HEADER_BYTES + length]
    if checksum(content) != expected:
        raise DamagedCheckpointError("a block of a snapshot has another checksum than it was taken with")
    try:
        (described,) = decode_description(content[:size].numpy().tobytes())
    except ControlError as error:
        raise DamagedCheckpointError(f"a block of a snapshot: {error}") from None
    places, _ = _places(described, size)
    return {
        key: block[slice(*places[key])].view(value.dtype).view(value.shape) if key in places else value
        for key, value in described.items()
    }


def join(block: Tensor | None, other: Tensor) -> Tensor:
    """Return the exclusive or of two blocks, the shorter of which counts as filled up with zeros; `block` may change.

    If there is no block yet, this is `other` itself.
    """
    if block is None:
        return other
    if other.numel() > block.numel():
        block, other = other.clone(), block
    part = block[: other.numel()]
    torch.bitwise_xor(part, other, out=part)
    return block


def _places(state: Mapping[str, Any], description_bytes: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Return where the tensors of a state are in its block, and the length of the block."""
    places, end = {}, _HEADER_BYTES + description_bytes
    for key, value in state.items():
        if isinstance(value, Tensor):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + value.nbytes
            places[key] = (start, end)
    return places, end
