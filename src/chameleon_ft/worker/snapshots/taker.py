"""A rank's part in the snapshots of a generation: it copies its state, and sends and receives backups, as it trains.

The way back to a snapshot: parts without a keeper are made again from their backups, and layers restored.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, Self

import torch
from torch import Tensor

from chameleon_ft.errors import DamagedCheckpointError
from chameleon_ft.plan.snapshots import Part, Rebuilding, Sending, SnapshotShare
from chameleon_ft.worker.communicators import CommunicationError, Communicators
from chameleon_ft.worker.communicators.base import Tag
from chameleon_ft.worker.execution.layers import HeldLayers, LayerState
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.snapshots.store import PackedState, SnapshotStore, join, unpack
from chameleon_ft.worker.state_transfer.layer_messages import (
    IncomingLayers,
    OutgoingLayer,
    OutgoingLayers,
    layer_checksums,
)

_POLL_S: Final = 0.01
_RESOLVED_S: Final = 0.25  # longest wait for the coordinator, without which workers train on
_BLOCK: Final = "block"
_CPU: Final = torch.device("cpu")


class SnapshotTaker:
    """Takes one snapshot after the other, each after a step for which all workers have voted.

    Between two updates the state is constant, so a thread copies it to host memory during the next step. Then that
    thread sends the copies to the workers with backups, and another one receives those that this rank is to keep,
    during training. Call `settle` before each vote: it waits for the copies, and does not let more than `every` steps
    follow a complete snapshot while the next one is under way.

    Args:
        held: the layers of the rank in this generation.
        every: most steps that are to be repeated; "auto": the coordinator requests snapshots.
        scale: how many bytes of the model a byte stands for; 1 unless the layers are stand-ins.
        await_parameters: waits until this rank has the parameters of the last update that others own.
        taken: called with the step and the seconds for which training has waited, once this rank's part is there.
    """

    def __init__(
        self,
        share: SnapshotShare,
        *,
        held: HeldLayers,
        store: SnapshotStore,
        communicators: Communicators,
        faults: FaultInjector,
        every: Literal["auto"] | int,
        scale: int,
        await_parameters: Callable[[], None],
        taken: Callable[[int, float], None],
    ) -> None:
        self._held = held
        self._store = store
        self._communicators = communicators
        self._faults = faults
        self._every = every
        self._scale = scale
        self._await_parameters = await_parameters
        self._taken = taken
        self._share = share
        self._sizes: dict[Sending, int] = {}  # bytes of the blocks that came last
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._step: int | None = None  # of the snapshot under way
        self._blocks: dict[tuple[Part, ...], Tensor] = {}
        self._working = 0  # threads
        self._is_copied = True
        self._error: BaseException | None = None
        self._waiting_since_s: float | None = None
        self._held_up_s = 0.0
        self._lasted = 1  # steps that the last one took

    def is_due(self, step: int, *, request: int) -> bool:
        """Return whether a snapshot of the state after `step` updates is to be taken.

        Args:
            request: the newest of the coordinator.
        """
        if self._step is not None:
            return False
        if self._every == "auto":
            return self._store.is_settled and request > self._store.answered
        newest = self._store.newest or 0
        until_s = time.monotonic() + (_RESOLVED_S if step + 1 > newest + self._every else 0.0)
        while not self._store.is_settled and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)  # every worker has its part: the coordinator is about to say that it is complete
        return self._store.is_settled and step - newest >= max(1, self._every - self._lasted)

    def begin(self, step: int, *, request: int) -> None:
        """Begin a snapshot of the state after `step` updates, which must not change before `settle` returns."""
        self._store.answered = request
        states = {part: self._state_of(part) for part in self._share.kept}
        self._step, self._blocks, self._working = step, {}, 2
        self._is_copied, self._held_up_s = False, 0.0
        for work in (partial(self._copy_and_send, states), self._receive):
            thread = threading.Thread(target=self._guarded, args=(work, step), name="snapshot", daemon=True)
            self._threads.append(thread)
            thread.start()

    def settle(self, step: int) -> None:
        """Wait as long as the state after `step` updates must not change yet.

        Raises:
            CommunicationError: a backup could not be sent or received.
        """
        begun = self._step
        with self._condition, self._holding_up():
            self._condition.wait_for(lambda: self._is_copied or self._error is not None)
            if begun is not None and self._every != "auto":
                last = max((each for each in self._store if each < begun), default=0)
                if step + 1 > last + self._every:
                    self._condition.wait_for(lambda: not self._working or self._error is not None)
            if self._error is not None:
                raise self._error
            if begun is not None and not self._working:
                self._lasted, self._step = step + 1 - begun, None
                self._threads.clear()

    def abandon(self) -> None:
        """Give up a snapshot that is under way; its messages may continue until `close`."""
        with self._condition:
            self._error = self._error or CommunicationError(None, "the generation is over")
            self._condition.notify_all()

    def close(self) -> None:
        """Give up a snapshot that is under way, and interrupt the communicators until its threads have ended."""
        self.abandon()
        for thread in self._threads:
            while thread.is_alive():
                self._communicators.interrupt()
                thread.join(_POLL_S)

    @contextmanager
    def _holding_up(self) -> Iterator[None]:
        self._waiting_since_s = time.perf_counter()
        try:
            yield
        finally:
            self._held_up_s += time.perf_counter() - self._waiting_since_s
            self._waiting_since_s = None

    def _state_of(self, part: Part) -> LayerState:
        if part.stop > part.start:
            return self._held.state_of_slice(part.layer, (part.start, part.stop))
        return self._held.constant_state_of(part.layer)

    def _guarded(self, work: Callable[[int], None], step: int) -> None:
        try:
            work(step)
            self._finish(step)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            with self._condition:
                self._error = self._error or error.with_traceback(None)
                self._condition.notify_all()
            if not isinstance(error, CommunicationError):
                self._communicators.interrupt()  # others wait for what this thread was to send

    def _finish(self, step: int) -> None:
        """Note that one of the threads has done its part; the last one reports it."""
        with self._condition:
            if self._error is not None:
                return
            if self._working > 1:
                self._working -= 1
                return
            self._store.add(step, self._blocks)
            since_s = self._waiting_since_s
            held_up_s = self._held_up_s + (0.0 if since_s is None else time.perf_counter() - since_s)
        self._taken(step, held_up_s)
        with self._condition:
            self._working = 0
            self._condition.notify_all()

    def _copy_and_send(self, states: Mapping[Part, LayerState], step: int) -> None:
        self._await_parameters()
        packed = {part: PackedState(state) for part, state in states.items()}
        blocks = {part: self._store.allocate(each.num_bytes) for part, each in packed.items()}
        for part, each in packed.items():
            each.copy(blocks[part])
        with self._condition:
            self._is_copied = True
            self._condition.notify_all()
        for part, each in packed.items():
            each.seal(blocks[part])
        with self._condition:
            self._blocks.update({(part,): block for part, block in blocks.items()})
        fault_at = len(self._share.outgoing) // 2
        for number, sending in enumerate(self._share.outgoing):
            if number == fault_at:
                self._faults.at("snapshot", step)
            send_block(
                blocks[sending.part], self._communicators, peer=sending.backup.worker, scale=self._scale, gives_way=True
            ).finish_next()
        if not self._share.outgoing:
            self._faults.at("snapshot", step)

    def _receive(self, step: int) -> None:
        del step
        parity: dict[tuple[Part, ...], Tensor] = {}
        for sending in self._share.incoming:
            known = self._sizes.get(sending)
            target = None if known is None else self._store.allocate(known)
            block = receive_block(self._communicators, peer=sending.source, target=target)
            self._sizes[sending] = block.numel()
            key = sending.backup.parts
            parity[key] = join(parity.get(key), block)
            if parity[key] is not block:
                self._store.release(block)
        with self._condition:
            self._blocks.update(parity)


def send_block(
    block: Tensor, communicators: Communicators, *, peer: int, scale: int, gives_way: bool
) -> OutgoingLayers:
    """Start sending a block of a snapshot, which must not change; `finish_next` waits until it has arrived."""
    checksums: Future[list[int]] = Future()
    checksums.set_result(layer_checksums({_BLOCK: block}, _CPU))
    layer = OutgoingLayer({_BLOCK: block}, block.numel() * scale, checksums)
    outgoing = OutgoingLayers([layer], communicators, peer=peer, tag=Tag.SNAPSHOT, device=_CPU, gives_way=gives_way)
    outgoing.start_next()
    return outgoing


def receive_block(communicators: Communicators, *, peer: int, target: Tensor | None = None) -> Tensor:
    """Receive a block, into `target` if it has its length. Raises CommunicationError."""
    incoming = IncomingLayers(communicators, peer=peer, tag=Tag.SNAPSHOT, device=_CPU)
    incoming.describe()
    incoming.start_next({} if target is None else {_BLOCK: target})
    block: Tensor = incoming.finish_next()[_BLOCK]
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
        rebuilt: of all workers, in an order that they share.
        scale: how many bytes of the model a byte stands for.

    Raises:
        CommunicationError: another worker is gone, or a block has arrived damaged.
        DamagedCheckpointError: this rank does not have a block that it is to have.
    """
    sending = [
        send_block(_own(blocks, key), communicators, peer=each.worker, scale=scale, gives_way=False)
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
                other = receive_block(communicators, peer=source)
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
