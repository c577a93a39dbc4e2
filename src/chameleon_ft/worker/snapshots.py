"""The snapshots that a rank takes as it trains and keeps in memory, and the way back to one.

A part of the training state is one block of bytes in host memory, so that blocks can be sent, and joined to parity. A
block has a header, a description of the state, and the content of its tensors, each at an aligned place. The header has
the length and a checksum of all that follows, so a block is recognised with zeros after it, as parity leaves them.

A rank copies its state, and sends and receives backups, as it trains. It keeps snapshots until the coordinator says
which are not needed any more. On the way back, parts without a keeper are made again from their backups, and layers are
restored.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from chameleon_ft.errors import ControlError, DamagedCheckpointError
from chameleon_ft.plan.snapshots import Part, Rebuilding, Sending, SnapshotShare
from chameleon_ft.worker.communicators.base import Communicators, Tag
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.execution.layers import HeldLayers, LayerState
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.state_transfer.description import decode_description, encode_description
from chameleon_ft.worker.state_transfer.layer_messages import OutgoingLayers, checksum, receive_state, send_state

_Blocks = Mapping[tuple[Part, ...], Tensor]
"""Blocks of single parts, and parity of several."""


class SnapshotStore:
    """Two snapshots at most: one that is complete on all workers, and the next one, until it is complete as well.

    Copies from an accelerator are faster to pinned memory. `answered` is the newest request of the coordinator for
    which a snapshot was begun; see `BeginSnapshot`.
    """

    def __init__(self, *, pins_memory: bool) -> None:
        self._pins_memory = pins_memory
        self.answered = 0
        self._lock = threading.Lock()
        self._kept_of_step: dict[int, _Blocks] = {}
        self._resolved: int | None = None
        self._spare_of_size: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def newest(self) -> int | None:
        """The step of the newest snapshot."""
        return max(self._kept_of_step, default=None)

    @property
    def is_settled(self) -> bool:
        """Whether all snapshots but one are known to be superseded or given up."""
        return len(self._kept_of_step) <= 1 and (self._resolved in self._kept_of_step or not self._kept_of_step)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory for a block, with any content."""
        with self._lock:
            if spare := self._spare_of_size.get(num_bytes):
                return spare.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins_memory)

    def release(self, block: Tensor) -> None:
        """Take memory back that `allocate` gave."""
        with self._lock:
            self._spare_of_size[block.numel()].append(block)

    def add(self, step: int, blocks: _Blocks) -> None:
        """Keep what this rank has of a snapshot, which is not known to be complete yet."""
        with self._lock:
            self._kept_of_step[step] = blocks

    def blocks(self, step: int) -> _Blocks:
        """Return what this rank has of a snapshot."""
        return self._kept_of_step.get(step, {})

    def resolve(self, step: int, *, is_complete: bool) -> None:
        """Note that a snapshot is complete, which makes those before it superfluous; or that it is given up."""
        with self._lock:
            if step not in self._kept_of_step:
                return
            self._drop([each for each in self._kept_of_step if each < step] if is_complete else [step])
            if is_complete:
                self._resolved = step

    def keep_only(self, step: int | None) -> None:
        """Drop all snapshots but one, which is complete; and memory that another generation may not use."""
        with self._lock:
            self._drop([each for each in self._kept_of_step if each != step])
            self._spare_of_size.clear()
            self._resolved = step

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            for block in self._kept_of_step.pop(step).values():
                self._spare_of_size[block.numel()].append(block)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._kept_of_step))


_HEADER_BYTES: Final = 64
# Numbers of int64: bytes of the description, bytes of all that follows the header, their checksum.
_HEADER: Final = 3
_ALIGNMENT: Final = 64


class PackedState:
    """A block of `num_bytes` for a state, which must be constant until `copy` has copied its tensors into the block."""

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


_POLL_S: Final = 0.001
# The longest wait for the coordinator; without it, workers train on.
_RESOLVED_S: Final = 0.25
_BLOCK: Final = "block"
_CPU: Final = torch.device("cpu")


class SnapshotTaker:
    """Takes one snapshot after the other, each after a step for which all workers have voted.

    Between two updates the state is constant, so a task of the mover copies it to host memory during the next step.
    Then it sends the copies to the workers with backups, and another task receives those that this rank is to keep,
    during training. Call `settle` before each vote: it waits for the copies, and does not let more than `every` steps
    follow a complete snapshot while the next one is under way.

    Args:
        held: The layers of the rank in this generation.
        every: The number of steps that are to be repeated at most; "auto": the coordinator requests snapshots.
        await_parameters: Waits until this rank has the parameters of the last update that others own.
        taken: It is called with the step and the seconds for which training has waited, once this rank's part is there.
    """

    def __init__(
        self,
        rank: RankContext,
        share: SnapshotShare,
        *,
        held: HeldLayers,
        store: SnapshotStore,
        mover: Mover,
        every: Literal["auto"] | int,
        await_parameters: Callable[[], None],
        taken: Callable[[int, float], None],
    ) -> None:
        self._rank = rank
        self._held = held
        self._store = store
        self._mover = mover
        self._every = every
        self._await_parameters = await_parameters
        self._taken = taken
        self._share = share
        self._last_sizes: dict[Sending, int] = {}
        self._begun_step: int | None = None
        self._lasted_steps = 1
        # Shared with tasks, under `Mover.changed`:
        self._is_copied = self._is_taken = True
        self._waiting_since_s: float | None = None
        self._held_up_s = 0.0

    def is_due(self, step: int, *, request: int) -> bool:
        """Return whether a snapshot of the state after `step` updates is to be taken, given the newest request."""
        if self._begun_step is not None:
            return False
        if self._every == "auto":
            return self._store.is_settled and request > self._store.answered
        newest = self._store.newest or 0
        until_s = time.monotonic() + (_RESOLVED_S if step + 1 > newest + self._every else 0.0)
        while not self._store.is_settled and time.monotonic() < until_s:
            # Every worker has its part: the coordinator is about to say that it is complete.
            time.sleep(_POLL_S)
        return self._store.is_settled and step - newest >= max(1, self._every - self._lasted_steps)

    def begin(self, step: int, *, request: int) -> None:
        """Begin a snapshot of the state after `step` updates, which must not change before `settle` returns."""
        self._store.answered = request
        states = {part: self._state_of(part) for part in self._share.kept}
        self._begun_step, self._is_copied, self._is_taken, self._held_up_s = step, False, False, 0.0
        backups = self._mover.start(self._receive)
        self._mover.start(self._take, step, states, backups)

    def settle(self, step: int) -> None:
        """Wait as long as the state after `step` updates must not change yet.

        Raises:
            CommunicationError: a backup could not be sent or received.
        """
        begun = self._begun_step
        with self._mover.changed:
            since_s = self._waiting_since_s = time.perf_counter()
            self._mover.wait_for(lambda: self._is_copied)
            if begun is not None and self._every != "auto":
                last = max((each for each in self._store if each < begun), default=0)
                if step + 1 > last + self._every:
                    self._mover.wait_for(lambda: self._is_taken)
            self._held_up_s += time.perf_counter() - since_s
            self._waiting_since_s = None
            if begun is not None and self._is_taken:
                self._lasted_steps, self._begun_step = step + 1 - begun, None

    def _state_of(self, part: Part) -> LayerState:
        if part.stop > part.start:
            return self._held.state_of_slice(part.layer, (part.start, part.stop))
        return self._held.kept_state_of(part.layer)

    def _take(
        self, step: int, states: Mapping[Part, LayerState], backups: Future[dict[tuple[Part, ...], Tensor]]
    ) -> None:
        """Copy this rank's state, send it to the workers with backups, and keep it, with the backups of others."""
        self._await_parameters()
        packed = {part: PackedState(state) for part, state in states.items()}
        blocks = {part: self._store.allocate(each.num_bytes) for part, each in packed.items()}
        for part, each in packed.items():
            each.copy(blocks[part])
        with self._mover.changed:
            self._is_copied = True
            self._mover.changed.notify_all()
        for part, each in packed.items():
            each.seal(blocks[part])
        fault_at = len(self._share.outgoing) // 2
        for number, sending in enumerate(self._share.outgoing):
            if number == fault_at:
                self._rank.faults.at("snapshot", step)
            block, peer = blocks[sending.part], sending.backup.worker
            scale = self._rank.stand_in_scale or 1
            _send_block(block, self._mover.communicators, peer=peer, scale=scale, gives_way=True).finish_next()
        if not self._share.outgoing:
            self._rank.faults.at("snapshot", step)
        received = backups.result()
        with self._mover.changed:
            if self._mover.is_over:
                return
            self._store.add(step, {**{(part,): block for part, block in blocks.items()}, **received})
            since_s = self._waiting_since_s
            held_up_s = self._held_up_s + (0.0 if since_s is None else time.perf_counter() - since_s)
        self._taken(step, held_up_s)
        with self._mover.changed:
            self._is_taken = True
            self._mover.changed.notify_all()

    def _receive(self) -> dict[tuple[Part, ...], Tensor]:
        """Receive the blocks of others, and join those that are kept as parity."""
        joined: dict[tuple[Part, ...], Tensor] = {}
        for sending in self._share.incoming:
            known = self._last_sizes.get(sending)
            target = None if known is None else self._store.allocate(known)
            block = _receive_block(self._mover.communicators, peer=sending.source, target=target)
            self._last_sizes[sending] = block.numel()
            key = sending.backup.parts
            joined[key] = join(joined.get(key), block)
            if joined[key] is not block:
                self._store.release(block)
        return joined


def _send_block(
    block: Tensor, communicators: Communicators, *, peer: int, scale: int, gives_way: bool
) -> OutgoingLayers:
    """Start sending a block of a snapshot, which must not change; `finish_next` waits until it has arrived."""
    return send_state(
        {_BLOCK: block},
        communicators,
        peer=peer,
        tag=Tag.SNAPSHOT,
        device=_CPU,
        num_bytes=block.numel() * scale,
        gives_way=gives_way,
    )


def _receive_block(communicators: Communicators, *, peer: int, target: Tensor | None = None) -> Tensor:
    """Receive a block, into `target` if it has its length. Raises CommunicationError."""
    targets = {} if target is None else {_BLOCK: target}
    block: Tensor = receive_state(communicators, peer=peer, tag=Tag.SNAPSHOT, device=_CPU, targets=targets)[_BLOCK]
    return block


def rebuild(
    worker: int,
    rebuilt: Sequence[Rebuilding],
    blocks: Mapping[tuple[Part, ...], Tensor],
    communicators: Communicators,
    *,
    scale: int,
) -> dict[Part, Tensor]:
    """Send what others need of this rank's blocks, and return the blocks that are made here.

    Args:
        rebuilt: What all workers rebuild, in an order that they share.
        scale: How many bytes of the model a byte stands for.

    Raises:
        CommunicationError: another worker is gone, or a block has arrived damaged.
        DamagedCheckpointError: this rank does not have a block that it is to have.
    """
    sending = [
        _send_block(_own(blocks, key), communicators, peer=each.worker, scale=scale, gives_way=False)
        for each in rebuilt
        for source, key in each.inputs
        if source == worker != each.worker
    ]
    made: dict[Part, Tensor] = {}
    for each in rebuilt:
        if each.worker != worker:
            continue
        block: Tensor | None = None
        for source, key in each.inputs:
            if source == worker:
                own = _own(blocks, key)
                other = own.clone() if len(each.inputs) > 1 else own
            else:
                other = _receive_block(communicators, peer=source)
            block = join(block, other)
        assert block is not None
        made[each.part] = block
    for outgoing in sending:
        outgoing.finish_next()
    return made


@dataclass(slots=True)
class RestoredLayers:
    """The state of layers, and of slices of their optimizer's state, with copies of all tensors on a device."""

    layers: dict[int, LayerState] = field(default_factory=dict)
    slices: dict[int, LayerState] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def of(
        cls,
        layers: Iterable[int],
        blocks: Mapping[tuple[Part, ...], Tensor],
        made: Mapping[Part, Tensor],
        device: torch.device,
    ) -> Self:
        """Unpack the blocks of these layers, of which some were made again.

        Raises:
            DamagedCheckpointError: a block is not as it was taken, or is not there.
        """
        own, wanted = {key[0]: block for key, block in blocks.items() if len(key) == 1} | dict(made), set(layers)
        found = cls()
        for part in sorted(own):
            if part.layer not in wanted:
                continue
            state = {
                key: value.to(device, copy=True) if isinstance(value, Tensor) else value
                for key, value in unpack(own[part]).items()
            }
            if part.stop:
                found.slices[part.layer] |= state
            else:
                found.layers[part.layer] = state
        if missing := sorted(wanted - found.layers.keys()):
            raise DamagedCheckpointError(f"the snapshot of layers {missing} is not in the memory of this worker")
        return found


def _own(blocks: Mapping[tuple[Part, ...], Tensor], key: tuple[Part, ...]) -> Tensor:
    if key not in blocks:
        raise DamagedCheckpointError(f"the snapshot of {key} is not in the memory of this worker")
    return blocks[key]
