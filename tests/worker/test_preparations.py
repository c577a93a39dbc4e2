"""Generations prepared during training, by a thread whose orders come from a coordinator that the test plays."""

from __future__ import annotations

import dataclasses
import gc
import queue
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from chameleon_ft.plan import LayerRange
from chameleon_ft.protocol.messages import Discard, Message, Migrate, Prepare, Prepared
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.recovery.transition import LayerMove
from chameleon_ft.schedule import Program
from chameleon_ft.sync import Segment
from chameleon_ft.worker.communicators.base import Communicators, Membership
from chameleon_ft.worker.control_client import ControlClient
from chameleon_ft.worker.execution.layers import HeldLayer
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.generation import Preparations
from chameleon_ft.worker.state_transfer.layer_messages import Allocation, LayerAllocator
from chameleon_ft.worker.state_transfer.migration import LayerMigration
from tests.worker.toy import SEED, toy_job

CPU = torch.device("cpu")
LAYERS = 4
MOVES = (LayerMove(1, 0, 2, 100), LayerMove(1, 0, 3, 100))
"""Layers 2 and 3 move from worker 1 to worker 0."""


class Client:
    """The rank's end of a control connection."""

    def __init__(self) -> None:
        self.preparations: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.send = self.sent.put
        self.over: set[int] = set()
        self.entered: set[int] = set()

    def is_over(self, generation: int) -> bool:
        return generation in self.over

    def enter(self, generation: int, communicators: Communicators, interrupt: Callable[[], None]) -> bool:
        self.entered.add(generation)
        return generation not in self.over

    def leave(self, generation: int) -> None:
        self.entered.discard(generation)

    def rendezvous(self, generation: int) -> None: ...

    def migrate(self, generation: int) -> None:
        self.preparations.put(Migrate(generation=generation, moves=MOVES))

    def prepare(self, generation: int, *, drops: bool = False) -> None:
        orders = WorkerOrders(
            generation=generation,
            worker=0,
            members=(0, 1),
            first_step=5,
            program=Program({0: ()}),
            segments=(Segment(LayerRange(0, 2), (0, 1)), Segment(LayerRange(2, LAYERS), (1,) if drops else (0, 1))),
        )
        self.preparations.put(Prepare(orders=orders))

    def discard(self, generation: int) -> None:
        self.over.add(generation)
        self.preparations.put(Discard(generation=generation))

    def answer(self) -> Message:
        return self.sent.get(timeout=10.0)

    def assert_no_answer(self) -> None:
        with pytest.raises(queue.Empty):
            self.sent.get(timeout=0.2)


class Unconnected:
    """Communicators that need no other rank, and fail to open in the generations `failing`."""

    def __init__(self, failing: set[int]) -> None:
        self._failing = failing

    def open(self, membership: Membership) -> None:
        if membership.generation in self._failing:
            raise OSError("too many open files")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def interrupt(self) -> None:
        pass


class Begun:
    """Layers that migrate in a generation: notes the order, and says that all have arrived when the test does."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[tuple[Migrate, Future[None] | None]] = queue.SimpleQueue()
        self.layers: dict[int, HeldLayer] = {}

    def begin(self, order: Migrate, *, allocations: dict[int, Allocation], migrated: Future[None] | None) -> None:
        assert allocations.keys() == (set() if migrated is None else {2, 3})
        self.layers.update({layer: allocation.layer for layer, allocation in allocations.items()})
        self.begun.put((order, migrated))


@pytest.fixture
def client() -> Client:
    return Client()


def preparations(client: Client, *, failing: set[int] | None = None, **job: Any) -> Preparations:
    return Preparations(
        0,
        client=cast("ControlClient", client),
        new_communicators=lambda: cast("Communicators", Unconnected(failing or set())),
        faults=cast("FaultInjector", SimpleNamespace(at=lambda phase, step: None)),
        allocator=LayerAllocator(
            dataclasses.replace(toy_job(LAYERS), built_in_full=(), **job), seed=SEED, device=CPU, ahead=True
        ),
        is_training=lambda: True,
    )


def train(prepared: Preparations, generation: int) -> Begun:
    """Begin to train in a generation."""
    migration = Begun()
    prepared.training(generation, cast("LayerMigration", migration))
    return migration


@pytest.mark.parametrize("ordered_first", [True, False])
def test_what_follows_a_migration_is_prepared_once_the_layers_have_arrived_however_often_it_is_tried(
    client: Client, ordered_first: bool
) -> None:
    prepared = preparations(client)
    if not ordered_first:
        migration = train(prepared, 2)
    client.migrate(2)
    client.prepare(3)
    if ordered_first:
        client.assert_no_answer()
        migration = train(prepared, 2)
    order, migrated = migration.begun.get(timeout=10.0)
    assert migrated is not None
    assert order.moves == MOVES
    assert migration.layers.keys() == {2, 3}
    client.assert_no_answer()
    client.discard(3)
    client.prepare(4)
    client.assert_no_answer()
    migrated.set_result(None)
    assert Prepared(generation=4) in (client.answer(), client.answer())  # late answers about 3 are ignored
    client.prepare(5)
    assert client.answer() == Prepared(generation=5)


def test_a_migration_of_a_generation_that_is_over_does_not_begin(client: Client) -> None:
    prepared = preparations(client)
    client.migrate(2)
    client.over.add(2)
    migration = train(prepared, 2)
    client.prepare(4)
    assert client.answer() == Prepared(generation=4)
    assert migration.begun.empty()


def test_a_generation_that_cannot_be_prepared_is_reported_and_the_next_one_is_prepared(client: Client) -> None:
    preparations(client, failing={3})
    client.prepare(3)
    assert client.answer() == Prepared(generation=3, error="OSError: too many open files")
    client.prepare(4)
    assert client.answer() == Prepared(generation=4)
    assert client.entered == {4}


def test_layers_that_cannot_be_built_are_reported_by_what_follows_their_migration(client: Client) -> None:
    def missing() -> nn.Module:
        raise ValueError("the factory needs a file that is gone")

    prepared = preparations(client, layers=[*toy_job(LAYERS).layers[:2], missing, missing])
    migration = train(prepared, 2)
    client.migrate(2)
    client.prepare(3)
    error = "layers cannot be received: ValueError: the factory needs a file that is gone"
    assert client.answer() == Prepared(generation=3, error=error, cannot_migrate=True)
    client.prepare(4, drops=True)
    assert client.answer() == Prepared(generation=4), "it needs none of them"
    assert migration.begun.get(timeout=10.0)[1] is None, "it serves others"


def test_a_generation_in_which_layers_are_to_move_is_not_prepared_without_memory_for_them(client: Client) -> None:
    def missing() -> nn.Module:
        raise MemoryError("no memory")

    preparations(client, layers=[*toy_job(LAYERS).layers[:3], missing])
    client.migrate(2)
    client.prepare(2)
    error = "layers cannot be received: MemoryError: no memory"
    assert client.answer() == Prepared(generation=2, error=error, cannot_migrate=True)


def test_layers_move_in_a_generation_from_its_beginning(client: Client) -> None:
    prepared = preparations(client)
    client.migrate(3)
    client.prepare(3)
    assert client.answer() == Prepared(generation=3)
    client.prepare(4)
    client.assert_no_answer()
    migration = train(prepared, 3)
    _, migrated = migration.begun.get(timeout=10.0)
    assert migrated is not None
    migrated.set_result(None)
    assert client.answer() == Prepared(generation=4)


def allocations() -> list[Allocation]:
    return [each for each in gc.get_objects() if type(each) is Allocation]


def test_nothing_is_kept_of_a_generation_that_is_over(client: Client) -> None:
    before = len(allocations())  # of other tests, whose threads do not end
    prepared = preparations(client)
    migration = train(prepared, 2)
    client.migrate(2)
    migration.begun.get(timeout=10.0)
    client.migrate(3)
    client.prepare(3)
    assert client.answer() == Prepared(generation=3), "its layers are allocated"
    module = weakref.ref(migration.layers[2].module)
    kept = weakref.ref(migration)
    prepared.trained()
    client.over |= {2, 3}
    prepared.drop_over()
    del migration
    gc.collect()
    assert kept() is None
    assert module() is None
    assert len(allocations()) == before


def test_a_generation_is_taken_by_its_number_while_a_later_one_is_prepared(client: Client) -> None:
    prepared = preparations(client)
    client.prepare(3)
    assert client.answer() == Prepared(generation=3)
    assert prepared.take(2) is None
    generation = prepared.take(3)
    assert generation is not None
    assert generation.number == 3
    assert prepared.take(3) is None


def test_a_discarded_generation_is_left(client: Client) -> None:
    prepared = preparations(client)
    client.prepare(2)
    client.answer()
    client.over.add(2)
    prepared.drop_over()
    assert prepared.take(2) is None
    assert not client.entered
