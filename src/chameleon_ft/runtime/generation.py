"""Generations that a rank takes part in, or prepares beside training: orders, unpacked, and communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from chameleon_ft.control.wire.address import join_address
from chameleon_ft.control.wire.messages import Discard, Prepare, Prepared, StartGeneration
from chameleon_ft.runtime.communicators import Communicators, Membership
from chameleon_ft.runtime.control_client import ControlClient
from chameleon_ft.runtime.execution.executor import channels_of
from chameleon_ft.runtime.execution.layers import GradientBuffers
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.state_transfer.migration import channels_of_migration
from chameleon_ft.runtime.state_transfer.preallocation import Allocation, LayerAllocator
from chameleon_ft.runtime.state_transfer.transfer import channels_of_transition
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment

__all__ = ["Generation", "Preparations"]


@dataclass(slots=True, kw_only=True)
class Generation:
    """A generation that this rank takes part in, or prepares.

    Attributes:
        order: what the rank has to do in it; see `begin_at` for its first step.
        segments: of the gradients of the whole model.
        operations: the rank's program.
        allocations: layer that migrates to this rank -> memory for it.
        is_open: whether its communicators are connected.
        migrated: is done once all layers that migrate to this rank in the generation have arrived.
    """

    worker: int
    order: StartGeneration
    communicators: Communicators
    segments: tuple[Segment, ...] = field(init=False)
    operations: tuple[Operation, ...] = field(init=False)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    is_open: bool = False
    migrated: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.segments = self.order.unpack_segments()
        self.operations = self.order.unpack_operations()

    @property
    def number(self) -> int:
        return self.order.generation

    @property
    def arriving(self) -> dict[int, int]:
        """The layers that move to this rank, while the generation trains or before: layer -> bytes, by arrival."""
        order = self.order
        moves = [move[-3:] for each in (order.migration, order.transition) if each is not None for move in each.moves]
        return {layer: num_bytes for destination, layer, num_bytes in moves if destination == self.worker}

    @property
    def layers(self) -> set[int]:
        """The layers of which this rank is a holder, those that are arriving included."""
        own = (s for s in self.segments if self.worker in s.holders and not s.tied)
        return {layer for segment in own for layer in segment.layers}

    def written_layers(self) -> list[int]:
        """Return the layers that this rank writes into a checkpoint: each layer is written by one of its holders.

        Shadow holders write none, because they may not have received it yet.
        """
        migration = self.order.migration
        shadows = {(move[1], move[2]) for move in migration.moves} if migration else set()
        written = []
        for segment in self.segments:
            for layer in () if segment.tied else segment.layers:
                holders = [worker for worker in segment.holders if (worker, layer) not in shadows]
                if holders[layer % len(holders)] == self.worker:
                    written.append(layer)
        return written

    def begin_at(self, first_step: int) -> None:
        """Note the first step, which is not known before the switch."""
        self.order = self.order.model_copy(update={"first_step": first_step})

    def open(self, store_host: str) -> None:
        """Connect with all participants. Raises CommunicationError."""
        self.communicators.open(self._membership(store_host))
        self.is_open = True

    def interrupt(self, allocator: LayerAllocator) -> None:
        """Break the communicators, and let the rank's allocations end early. Called from any thread."""
        allocator.hurry()
        self.communicators.interrupt()

    def _membership(self, store_host: str) -> Membership:
        order, worker = self.order, self.worker
        groups = dict.fromkeys(segment.holders for segment in self.segments if len(segment.holders) > 1)
        channels = {*channels_of(worker, self.operations)}
        if (rest := order.rest) is not None:
            channels.update(channels_of(worker, rest.unpack_operations(), rest.resends))
        if order.transition is not None:
            channels.update(channels_of_transition(order.transition))
        if order.migration is not None:
            channels.update(channels_of_migration(worker, order.migration))
        return Membership(
            generation=order.generation,
            worker=worker,
            members=order.participants,
            groups=tuple(dict.fromkeys((order.members, *groups))),
            channels=tuple(sorted(channels)),
            store=join_address(store_host, order.store_port),
        )


class Preparations:
    """Prepares the next generation in a thread of its own while the present one trains.

    Args:
        store_host: host of the rendezvous store.
        new_communicators: makes communicators that are not open yet.
        buffers: returns the rank's gradients; None if it does not train.
    """

    def __init__(
        self,
        worker: int,
        *,
        client: ControlClient,
        store_host: str,
        new_communicators: Callable[[], Communicators],
        faults: FaultInjector,
        allocator: LayerAllocator,
        buffers: Callable[[], GradientBuffers | None],
    ) -> None:
        self._worker = worker
        self._client = client
        self._store_host = store_host
        self._new_communicators = new_communicators
        self._faults = faults
        self._allocator = allocator
        self._buffers = buffers
        self._working = threading.Lock()
        self._prepared: dict[int, Generation] = {}
        self._migrating: Generation | None = None  # the newest generation with a migration
        threading.Thread(target=self._work, name="preparation", daemon=True).start()

    def take(self, number: int) -> Generation | None:
        """Return this generation; None if this rank is not in it, or it is over.

        Does not wait for a later one that is being prepared.
        """
        return None if self._client.is_over(number) else self._prepared.pop(number, None)

    def drop_over(self) -> None:
        """Close prepared generations that are over. When this returns, no connection is being made."""
        with self._working:
            for number in [number for number in tuple(self._prepared) if self._client.is_over(number)]:
                if (generation := self._prepared.pop(number, None)) is not None:
                    self._close(generation)

    def _work(self) -> None:
        while True:
            match self._client.preparations.get():
                case Prepare(order=order):
                    with self._working:
                        error = self._prepare(order)
                    if error is not None:
                        self._client.send(Prepared(generation=order.generation, error=error))
                case Discard():
                    self.drop_over()

    def _prepare(self, order: StartGeneration) -> str | None:
        """Prepare a generation; return the error if that fails."""
        generation = None
        try:
            generation = Generation(worker=self._worker, order=order, communicators=self._new_communicators())
            if not self._client.enter(order.generation, partial(generation.interrupt, self._allocator)):
                return None
            self._faults.at("preparation", order.first_step)
            generation.open(self._store_host)
            self._allocate(generation)
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            if generation is not None:
                self._close(generation)
            return None if self._client.is_over(order.generation) else f"{type(error).__name__}: {error}"
        self._prepared[order.generation] = generation
        before = self._migrating
        if order.migration is not None:
            self._migrating = generation
        if before is None or self._client.is_over(before.number):
            self._client.send(Prepared(generation=order.generation))
        else:
            before.migrated.add_done_callback(lambda _: self._client.send(Prepared(generation=order.generation)))
        return None

    def _allocate(self, generation: Generation) -> None:
        """Allocate the layers that will arrive, and what they need beside."""
        arriving, buffers = generation.arriving, self._buffers()
        if generation.order.migration is not None:
            self._allocator.preallocate(arriving)
            for layer in arriving:
                if self._client.is_over(generation.number):
                    return
                allocation = generation.allocations[layer] = self._allocator.take(layer)
                if buffers is not None:
                    buffers.reserve(layer, allocation.module)
        elif buffers is None:
            # A rank that trains has no memory for more layers beside its gradients.
            is_done = threading.Event()
            self._allocator.preallocate(arriving, then=is_done.set)
            is_done.wait()

    def _close(self, generation: Generation) -> None:
        """Close a generation that does not begin, and release the memory for what would have arrived in it."""
        generation.communicators.close()
        self._client.leave(generation.number)
        self._allocator.drop()
        generation.allocations.clear()
        if generation is self._migrating:
            self._migrating = None
        if (buffers := self._buffers()) is not None:
            buffers.release()
