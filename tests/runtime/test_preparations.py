"""Generations prepared beside training, by a thread whose orders come from a coordinator that the test plays."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from chameleon_ft.control.wire.messages import Discard, Message, Prepare, Prepared, StartGeneration
from chameleon_ft.control.wire.parts import Migration
from chameleon_ft.runtime.communicators import Communicators, Membership
from chameleon_ft.runtime.control_client import ControlClient
from chameleon_ft.runtime.execution.layers import GradientBuffers
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.generation import Preparations
from chameleon_ft.runtime.state_transfer.preallocation import LayerAllocator
from tests.runtime.toy import toy_job

LAYERS = 4
MIGRATION = Migration(moves=((1, 0, 2, 100), (1, 0, 3, 100)))
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

    def enter(self, generation: int, interrupt: Callable[[], None]) -> bool:
        self.entered.add(generation)
        return generation not in self.over

    def leave(self, generation: int) -> None:
        self.entered.discard(generation)

    def prepare(self, generation: int, migration: Migration | None = None) -> None:
        order = StartGeneration(
            generation=generation,
            members=(0, 1),
            store_port=1,
            first_step=5,
            operations="",
            segments=((0, 2, (0, 1), ()), (2, LAYERS, (0, 1), ())),
            migration=migration,
        )
        self.preparations.put(Prepare(order=order))

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

    def close(self) -> None:
        pass

    def interrupt(self) -> None:
        pass


class Reserved:
    """The gradients of a rank that trains: notes the layers that it reserves."""

    def __init__(self) -> None:
        self.layers: set[int] = set()
        self.release = self.layers.clear

    def reserve(self, layer: int, module: nn.Module) -> None:
        self.layers.add(layer)


@pytest.fixture
def client() -> Client:
    return Client()


def preparations(
    client: Client, *, failing: set[int] | None = None, buffers: Reserved | None = None, **job: Any
) -> Preparations:
    return Preparations(
        0,
        client=cast("ControlClient", client),
        store_host="localhost",
        new_communicators=lambda: cast("Communicators", Unconnected(failing or set())),
        faults=cast("FaultInjector", SimpleNamespace(at=lambda phase, step: None)),
        allocator=LayerAllocator(
            dataclasses.replace(toy_job(LAYERS), **job), seed=1, device=torch.device("cpu"), ahead=True
        ),
        buffers=lambda: cast("GradientBuffers | None", buffers),
    )


def test_what_follows_a_migration_is_prepared_once_the_layers_have_arrived_however_often_it_is_tried(
    client: Client,
) -> None:
    prepared = preparations(client)
    client.prepare(2, MIGRATION)
    assert client.answer() == Prepared(generation=2)
    migrating = prepared.take(2)
    assert migrating is not None
    for generation in (3, 4):
        client.prepare(generation)
        client.assert_no_answer()
        if generation == 3:
            client.discard(3)
    migrating.migrated.set_result(None)
    assert Prepared(generation=4) in (client.answer(), client.answer())  # late answers about 3 are ignored
    client.prepare(5)
    assert client.answer() == Prepared(generation=5)


def test_a_generation_that_cannot_be_prepared_is_reported_and_the_next_one_is_prepared(client: Client) -> None:
    def missing() -> nn.Module:
        raise ValueError("the factory needs a file that is gone")

    preparations(client, failing={3}, layers=[*toy_job(LAYERS).layers[:2], missing, missing])
    client.prepare(2, MIGRATION)
    assert client.answer() == Prepared(generation=2, error="ValueError: the factory needs a file that is gone")
    client.prepare(3)
    assert client.answer() == Prepared(generation=3, error="OSError: too many open files")
    client.prepare(4)
    assert client.answer() == Prepared(generation=4)
    assert client.entered == {4}


def test_a_generation_is_taken_by_its_number_while_a_later_one_is_prepared(client: Client) -> None:
    prepared = preparations(client)
    client.prepare(3)
    assert client.answer() == Prepared(generation=3)
    assert prepared.take(2) is None
    generation = prepared.take(3)
    assert generation is not None
    assert generation.number == 3
    assert prepared.take(3) is None


def test_the_memory_of_a_discarded_generation_is_released(client: Client) -> None:
    buffers = Reserved()
    prepared = preparations(client, buffers=buffers)
    client.prepare(2, MIGRATION)
    client.answer()
    assert buffers.layers == {2, 3}
    client.over.add(2)
    prepared.drop_over()
    assert not buffers.layers
    assert prepared.take(2) is None
    assert not client.entered
