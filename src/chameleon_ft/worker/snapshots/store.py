"""The snapshots that a rank keeps, until the coordinator says which are not needed any more.

A part of the training state as one block of bytes in host memory, so that blocks can be sent, and joined to parity.

A block has a header, a description of the state, and the content of its tensors, each at an aligned place. The header
has the length and a checksum of all that follows, so a block is recognised with zeros after it, as parity leaves them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from chameleon_ft.errors import ControlError, DamagedCheckpointError
from chameleon_ft.plan.snapshots import Part
from chameleon_ft.worker.execution.layers import LayerState
from chameleon_ft.worker.state_transfer.description import decode_description, encode_description
from chameleon_ft.worker.state_transfer.layer_messages import checksum

_Blocks = Mapping[tuple[Part, ...], Tensor]
"""Blocks of single parts, and parity of several."""


class SnapshotStore:
    """Two snapshots at most: one that is complete on all workers, and the next one, until it is complete as well.

    Args:
        pins_memory: whether blocks are copied from an accelerator, which is faster to pinned memory.

    Attributes:
        answered: the newest request of the coordinator for which a snapshot was begun; see `BeginSnapshot`.
    """

    def __init__(self, *, pins_memory: bool) -> None:
        self._pins_memory = pins_memory
        self.answered = 0
        self._lock = threading.Lock()
        self._kept: dict[int, _Blocks] = {}  # by step
        self._resolved: int | None = None
        self._spare: dict[int, list[Tensor]] = defaultdict(list)  # by their bytes

    @property
    def newest(self) -> int | None:
        """The step of the newest snapshot."""
        return max(self._kept, default=None)

    @property
    def is_settled(self) -> bool:
        """Whether all snapshots but one are known to be superseded or given up."""
        return len(self._kept) <= 1 and (self._resolved in self._kept or not self._kept)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory for a block, with any content."""
        with self._lock:
            if spare := self._spare.get(num_bytes):
                return spare.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins_memory)

    def release(self, block: Tensor) -> None:
        """Take memory back that `allocate` gave."""
        with self._lock:
            self._spare[block.numel()].append(block)

    def add(self, step: int, blocks: _Blocks) -> None:
        """Keep what this rank has of a snapshot, which is not known to be complete yet."""
        with self._lock:
            self._kept[step] = blocks

    def blocks(self, step: int) -> _Blocks:
        """Return what this rank has of a snapshot."""
        return self._kept.get(step, {})

    def resolve(self, step: int, *, is_complete: bool) -> None:
        """Note that a snapshot is complete, which makes those before it superfluous; or that it is given up."""
        with self._lock:
            if step not in self._kept:
                return
            self._drop([each for each in self._kept if each < step] if is_complete else [step])
            if is_complete:
                self._resolved = step

    def keep_only(self, step: int | None) -> None:
        """Drop all snapshots but one, which is complete; and memory that another generation may not use."""
        with self._lock:
            self._drop([each for each in self._kept if each != step])
            self._spare.clear()
            self._resolved = step

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            for block in self._kept.pop(step).values():
                self._spare[block.numel()].append(block)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._kept))


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
