"""Messages are held until they are known to have arrived, and no longer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from chameleon_ft.plan import Hop, LayerRange, Route
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import CommunicationError, InFlight, Membership
from chameleon_ft.runtime.execution.executor import SentMessages
from chameleon_ft.schedule import Operation, OperationKind

KEPT = 3
ROUTE = (Hop(1, LayerRange(0, 1)), Hop(0, LayerRange(1, 2)), Hop(2, LayerRange(2, 3)))
OTHER = (Hop(3, LayerRange(0, 1)), *ROUTE[1:])


@dataclass
class Message:
    network: Network
    peer: int
    tag: int

    def wait(self) -> None:
        self.network.waited.append((self.peer, self.tag))
        if self.peer in self.network.gone:
            raise CommunicationError(self.peer, "it is gone")


@dataclass
class Network:
    """Communicators that only take down what is asked of them."""

    sent: list[tuple[int, int]] = field(default_factory=list)
    waited: list[tuple[int, int]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        self.sent.append((peer, tag))
        return Message(self, peer, tag)

    def open(self, membership: Membership) -> None: ...

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        raise NotImplementedError

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        raise NotImplementedError

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def forward(micro_batch: int) -> Operation:
    return Operation.of(OperationKind.FORWARD, Route(micro_batch, ROUTE), 1)


def backward(micro_batch: int, hops: tuple[Hop, ...] = ROUTE) -> Operation:
    return Operation.of(OperationKind.BACKWARD, Route(micro_batch, hops), 1)


def sending(network: Network) -> SentMessages:
    return SentMessages(network, Activity(), kept=KEPT)


def test_an_activation_is_held_until_its_gradient_is_there_however_many_there_are() -> None:
    messages = sending(network := Network())
    tensors = [torch.zeros(2) for _ in range(20)]
    for number, tensor in enumerate(tensors):
        messages.send(forward(number), tensor)
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors, tensor

    messages.answered(backward(7))

    gc.collect()
    assert [number for number, tensor in enumerate(alive) if tensor() is None] == [7]
    assert [message.operation.micro_batch for message in messages.in_flight()] == [*range(7), *range(8, 20)]
    assert network.sent == [(2, 2 * number) for number in range(20)]
    assert network.waited == []


def test_a_gradient_is_sent_only_after_an_earlier_one_has_arrived() -> None:
    messages = sending(network := Network())
    for number in range(6):
        messages.send(backward(number), torch.zeros(2))
        assert network.waited == [(1, 2 * earlier + 1) for earlier in range(number + 1 - KEPT)]
        held = [message.operation.micro_batch for message in messages.in_flight()]
        assert held == list(range(max(0, number + 1 - KEPT), number + 1))


def test_gradients_to_different_workers_do_not_wait_for_each_other() -> None:
    messages = sending(network := Network())
    for number in range(KEPT):
        messages.send(backward(number), torch.zeros(2))
        messages.send(backward(10 + number, OTHER), torch.zeros(2))
    assert network.waited == []

    messages.send(backward(KEPT), torch.zeros(2))

    assert network.waited == [(1, 1)]
    assert len(messages.in_flight()) == 2 * KEPT


def test_a_gradient_that_did_not_arrive_is_still_held() -> None:
    messages = sending(network := Network())
    for number in range(KEPT):
        messages.send(backward(number), torch.zeros(2))
    network.gone.add(1)

    with pytest.raises(CommunicationError, match="worker 1 failed: it is gone"):
        messages.send(backward(KEPT), torch.zeros(2))

    assert [message.operation.micro_batch for message in messages.in_flight()] == list(range(KEPT))
    assert len(network.sent) == KEPT


def test_a_waiting_worker_names_its_peer() -> None:
    activity = Activity()
    seen: list[tuple[str, bool]] = []

    class Watched(Network):
        def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
            return Looking()

    class Looking:
        def wait(self) -> None:
            seen.append(activity.read()[:2])

    messages = SentMessages(Watched(), activity, kept=1)
    messages.send(backward(4), torch.zeros(2))
    messages.send(backward(5), torch.zeros(2))

    assert seen == [("worker 1 to take the gradient of B4.1", True)]
