"""Messages are held until they are known to have arrived, and no longer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from chameleon_ft.cost.memory import MessageBuffers
from chameleon_ft.protocol.messages import Position
from chameleon_ft.worker.communicators.base import CommunicationError, InFlight, Membership
from chameleon_ft.worker.control_client import Activity
from chameleon_ft.worker.execution.executor import SentMessages
from chameleon_ft.worker.execution.steps import Result, StepState

AHEAD, KEPT = 2, 5
IN_FLIGHT = KEPT - AHEAD


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

    def unreached(self) -> dict[int, float]:
        return {}

    def interrupt(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


def activation(micro_batch: int) -> Result:
    return True, micro_batch, 1


def gradient(micro_batch: int) -> Result:
    return False, micro_batch, 1


def tag_of(forward: bool, micro_batch: int) -> int:
    """The tag of a result of layer 1 of two."""
    return 2 * (2 * micro_batch + 1) + (not forward)


ANSWERED = {activation(number) for number in range(20)}


def sending(network: Network, state: StepState | None = None, *, activity: Activity | None = None) -> SentMessages:
    buffers = MessageBuffers(receives_ahead=AHEAD, sends_kept=KEPT)
    return SentMessages(
        state or StepState(0),
        network,
        activity or Activity(),
        buffers=buffers,
        answered=ANSWERED,
        tag_of=lambda result: tag_of(*result[:2]),
    )


def test_an_activation_is_held_until_its_gradient_is_there_however_many_there_are() -> None:
    messages = sending(network := Network(), state := StepState(0))
    tensors = [torch.zeros(2) for _ in range(20)]
    for number, tensor in enumerate(tensors):
        messages.send(activation(number), [tensor], receiver=2)
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors, tensor

    messages.release(activation(7))

    gc.collect()
    assert [number for number, tensor in enumerate(alive) if tensor() is None] == [7]
    assert list(state.results) == list(state.in_flight) == [activation(n) for n in (*range(7), *range(8, 20))]
    assert network.sent == [(2, tag_of(True, number)) for number in range(20)]
    assert network.waited == []


@pytest.mark.parametrize("forward", [False, True])
def test_an_unanswered_message_is_held_until_it_has_certainly_been_used(forward: bool) -> None:
    messages = sending(network := Network(), state := StepState(0))
    for number in range(9):
        messages.send((forward, 100 + number, 1), [torch.zeros(2)], receiver=1)
        tags = [tag_of(forward, 100 + earlier) for earlier in range(number + 1 - IN_FLIGHT)]
        assert network.waited == [(1, tag) for tag in tags]
        held = [micro_batch - 100 for _, micro_batch, _ in state.results]
        assert held == list(range(max(0, number + 1 - KEPT), number + 1))


def test_gradients_to_different_workers_do_not_wait_for_each_other() -> None:
    messages = sending(network := Network(), state := StepState(0))
    for number in range(IN_FLIGHT):
        messages.send(gradient(number), [torch.zeros(2)], receiver=1)
        messages.send(gradient(10 + number), [torch.zeros(2)], receiver=3)
    assert network.waited == []

    messages.send(gradient(IN_FLIGHT), [torch.zeros(2)], receiver=1)

    assert network.waited == [(1, tag_of(False, 0))]
    assert len(state.results) == 2 * IN_FLIGHT + 1


def test_a_gradient_that_could_not_be_sent_is_held_with_those_before_it() -> None:
    messages = sending(network := Network(), state := StepState(0))
    for number in range(KEPT):
        messages.send(gradient(number), [torch.zeros(2)], receiver=1)
    network.gone.add(1)

    with pytest.raises(CommunicationError, match="worker 1 failed: it is gone"):
        messages.send(gradient(KEPT), [torch.zeros(2)], receiver=1)

    assert list(state.results) == [gradient(number) for number in range(KEPT + 1)]
    assert len(network.sent) == KEPT


def test_a_waiting_worker_names_its_peer() -> None:
    activity = Activity()
    seen: list[Position] = []

    class Watched(Network):
        def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
            return Looking()

    class Looking:
        def wait(self) -> None:
            seen.append(activity.position(1))

    messages = sending(Watched(), activity=activity)
    for number in range(IN_FLIGHT + 1):
        messages.send(gradient(4 + number), [torch.zeros(2)], receiver=1)

    (position,) = seen
    assert position.doing == "worker 1 to take the gradient of micro-batch 4"
    assert (position.waiting, position.for_message, position.peer) == (True, True, 1)


def test_nothing_waits_for_what_is_sent_again_and_it_is_held() -> None:
    """Its receiver may take it after everything that is sent later."""
    messages = sending(network := Network(), state := StepState(0))
    state.results[gradient(19)] = [torch.zeros(2)]
    messages.send_again(gradient(19), receiver=1)
    for number in range(12):
        messages.send(gradient(number), [torch.zeros(2)], receiver=1)
    assert (1, tag_of(False, 19)) in network.sent
    assert (1, tag_of(False, 19)) not in network.waited
    assert len(network.waited) == 12 - IN_FLIGHT
    assert gradient(19) in state.results
