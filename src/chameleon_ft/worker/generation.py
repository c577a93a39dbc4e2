"""Generations that a rank takes part in, or prepares during training: their orders and communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from chameleon_ft.protocol.messages import DevicesConnected, Discard, Migrate, Prepare, Prepared
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.worker.communicators.base import Communicators, Membership
from chameleon_ft.worker.control_client import ControlClient
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.state_transfer.layer_messages import Allocation, LayerAllocator
from chameleon_ft.worker.state_transfer.migration import LayerMigration


@dataclass(slots=True, kw_only=True)
class Generation:
    """A generation that this rank takes part in, or prepares: its orders, and communicators for them.

    Attributes:
        is_open: whether its communicators are connected.
    """

    order: WorkerOrders
    communicators: Communicators
    is_open: bool = False

    @property
    def number(self) -> int:
        return self.order.generation

    def begin_at(self, first_step: int, *, evaluate: bool) -> None:
        """Note the first step, and whether an evaluation comes before it, which is not known before the switch."""
        self.order = replace(self.order.at(first_step), first_step=first_step, evaluate=evaluate)

    def enter_step(self, step: int) -> WorkerOrders:
        """Continue with the program for the micro-batches of a step; return the orders, which have it."""
        self.order = self.order.at(step)
        return self.order

    def open(self, client: ControlClient) -> None:
        """Connect with all participants. Raises CommunicationError."""
        self.communicators.open(self._membership(client))
        self.is_open = True

    def interrupt(self, allocator: LayerAllocator) -> None:
        """Break the communicators, and let the rank's allocations end early. Called from any thread."""
        allocator.stop_touching()
        self.communicators.interrupt()

    def _membership(self, client: ControlClient) -> Membership:
        order = self.order

        def connected(kept: int, formed: int, seconds: float) -> None:
            client.send(DevicesConnected(generation=order.generation, kept=kept, formed=formed, seconds=seconds))

        return Membership(
            generation=order.generation,
            worker=order.worker,
            members=order.participants,
            groups=order.groups,
            channels=tuple(sorted(order.channels)),
            rendezvous=client.rendezvous(order.generation),
            connected=connected,
        )


@dataclass(frozen=True, slots=True)
class _TrainingGeneration:
    """A generation that trains."""

    generation: int
    migration: LayerMigration


@dataclass(slots=True)
class _OrderedMigration:
    """Layers that are to move in a generation, which may not have begun yet.

    Attributes:
        arriving: the layers that will arrive at this rank, with their bytes.
        slices: (layer, first unit, unit after the last) of slices of the optimizer's state that will arrive.
        allocations: layer that will arrive at this rank -> memory for it; None unless all are allocated and the layers
            do not move yet.
        migrated: is done once all have arrived, slices too, or with the error if they cannot.
    """

    order: Migrate
    arriving: dict[int, int]
    slices: tuple[tuple[int, int, int], ...] = ()
    allocations: dict[int, Allocation] | None = None
    migrated: Future[None] = field(default_factory=Future)

    def is_used_in(self, order: WorkerOrders) -> bool:
        """Return whether a generation needs something of what arrives at the rank."""
        owned = {} if order.sharding is None else order.sharding.owned_by(order.worker)
        return not order.layers.isdisjoint(self.arriving) or any(
            first <= start < last for layer, start, _ in self.slices for first, last in owned.get(layer, ())
        )


class Preparations:
    """Prepares the next generation, and begins migrations, in a thread of its own while the present one trains.

    Args:
        new_communicators: makes communicators that are not open yet.
        is_training: returns whether the rank has layers, with their gradients.
    """

    def __init__(
        self,
        worker: int,
        *,
        client: ControlClient,
        new_communicators: Callable[[], Communicators],
        faults: FaultInjector,
        allocator: LayerAllocator,
        is_training: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._client = client
        self._new_communicators = new_communicators
        self._faults = faults
        self._allocator = allocator
        self._is_training = is_training
        self._working = threading.Lock()
        self._prepared: dict[int, Generation] = {}
        self._training: _TrainingGeneration | None = None  # the newest generation that trains
        self._ordered: _OrderedMigration | None = None  # the newest migration
        self._beginning = threading.Lock()  # of it
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
            if self._ordered is not None and self._client.is_over(self._ordered.order.generation):
                self._ordered.allocations = None

    def training(self, generation: int, migration: LayerMigration) -> None:
        """Note that a generation trains: layers can move in it, and do so from now on if they are allocated."""
        with self._beginning:
            self._training = _TrainingGeneration(generation, migration)
            self._begin_migration()

    def trained(self) -> None:
        """Note that no generation trains any more, and release what the last one held."""
        with self._beginning:
            self._training = None

    def _work(self) -> None:
        while True:
            match message := self._client.preparations.get():
                case Migrate():
                    with self._working:
                        self._prepare_migration(message)
                case Prepare(orders=order):
                    with self._working:
                        error = self._prepare(order)
                    if error is not None:
                        self._client.send(Prepared(generation=order.generation, error=error))
                case Discard():
                    self.drop_over()

    def _prepare(self, order: WorkerOrders) -> str | None:
        """Prepare a generation; return the error if that fails."""
        generation = None
        try:
            generation = Generation(order=order, communicators=self._new_communicators())
            interrupt = partial(generation.interrupt, self._allocator)
            if not self._client.enter(order.generation, generation.communicators, interrupt):
                return None
            self._faults.at("preparation", order.first_step)
            generation.open(self._client)
            generation.communicators.settle()
            self._allocate(generation)
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            if generation is not None:
                self._close(generation)
            return None if self._client.is_over(order.generation) else f"{type(error).__name__}: {error}"
        self._prepared[order.generation] = generation
        ordered = self._ordered
        if ordered is None or self._client.is_over(ordered.order.generation):
            self._client.send(Prepared(generation=order.generation))
        elif ordered.order.generation < order.generation and not ordered.is_used_in(order):
            # It drops the layers that move, if any do: the migration is cancelled.
            self._client.send(Prepared(generation=order.generation))
        elif ordered.order.generation < order.generation:
            ordered.migrated.add_done_callback(lambda done: self._migrated(order.generation, done.exception()))
        else:
            self._migrated(order.generation, ordered.migrated.exception() if ordered.migrated.done() else None)
        return None

    def _migrated(self, generation: int, error: BaseException | None) -> None:
        """Answer that a generation is prepared, unless layers cannot move in it or in the one before."""
        why = None if error is None else f"layers cannot be received: {type(error).__name__}: {error}"
        self._client.send(Prepared(generation=generation, error=why, cannot_migrate=error is not None))

    def _allocate(self, generation: Generation) -> None:
        """Allocate the layers that will arrive before the generation trains."""
        if not self._is_training():
            # A rank that trains has no memory for more layers beside its gradients.
            is_done = threading.Event()
            self._allocator.preallocate(generation.order.arriving, then=is_done.set)
            is_done.wait()

    def _prepare_migration(self, order: Migrate) -> None:
        """Allocate the layers that will arrive at this rank, and have them move if their generation trains."""
        arriving = {move.layer: move.num_bytes for move in order.moves if move.destination == self._worker}
        slices = tuple(move[2:5] for move in order.slices if move[1] == self._worker)
        ordered = self._ordered = _OrderedMigration(order, arriving, slices)
        allocations = {}
        try:
            self._allocator.preallocate(arriving)
            for layer in arriving:
                if self._client.is_over(order.generation):
                    return
                allocations[layer] = self._allocator.take(layer)
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            ordered.migrated.set_exception(error)
            self._allocator.drop()
            allocations = {}
        with self._beginning:
            ordered.allocations = allocations
            self._begin_migration()

    def _begin_migration(self) -> None:
        ordered, training = self._ordered, self._training
        if training is None or ordered is None or ordered.allocations is None:
            return
        if training.generation != ordered.order.generation or self._client.is_over(training.generation):
            return
        allocations, ordered.allocations = ordered.allocations, None
        # Even a rank that can receive no layer serves others.
        receives = not ordered.migrated.done()
        training.migration.begin(
            ordered.order, allocations=allocations, migrated=ordered.migrated if receives else None
        )

    def _close(self, generation: Generation) -> None:
        """Close a generation that does not begin, and release the memory for what would have arrived in it."""
        generation.communicators.close()
        self._client.leave(generation.number)
        self._allocator.drop()
