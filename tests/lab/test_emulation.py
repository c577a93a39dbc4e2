"""Emulated devices: what lasts how long, and that the run behind them is a real one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.lab import emulation
from chameleon_ft.lab.emulation import EmulatedLinks, EmulatedPace
from chameleon_ft.plan import LayerRange, RecomputedLayers, data_pipeline_plan
from chameleon_ft.schedule import CostModel, Operation, OperationKind
from chameleon_ft.worker.communicators.base import CommunicationError, Membership, Rendezvous
from chameleon_ft.workload import LayerCost, Workload


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Sleeper(threading.Event):
    """An event that advances the clock while it is awaited."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self._clock.now += timeout
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(emulation, "time", found)
    monkeypatch.setattr("chameleon_ft.lab.emulation.threading.Event", lambda: Sleeper(found))
    return found


def cluster(hosts: Sequence[str] = ("a", "a", "b")) -> Cluster:
    workers = tuple(Worker(number, host) for number, host in enumerate(hosts))
    return Cluster(workers, Link(1.0, 1000.0), Link(5.0, 100.0))


class Wire:
    """Communicators that deliver at once, what is sent by one worker to whoever receives next."""

    def __init__(self) -> None:
        self.sent: deque[tuple[int, int, Tensor]] = deque()
        self.calls: list[str] = []

    def open(self, membership: Membership) -> None:
        self.calls.append("open")

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> Any:
        self.sent.append((peer, tag, tensor.clone()))
        return _Done()

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> Any:
        return _Done(lambda: tensor.copy_(self.sent.popleft()[2]))

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Any:
        self.calls.append(f"all_reduce {group}")
        return _Done(lambda: tensor.mul_(len(group)))

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> Any:
        self.calls.append(f"vote {group}")
        return _Done()

    def unreached(self) -> dict[int, float]:
        return {}

    def interrupt(self) -> None:
        self.calls.append("interrupt")

    def settle(self) -> None: ...

    def close(self) -> None:
        self.calls.append("close")


class _Done:
    def __init__(self, then: Any = lambda: None) -> None:
        self._then = then

    def wait(self) -> None:
        self._then()


NOWHERE = Rendezvous(lambda timeout_s: HashStore())


def linked(wire: Wire, worker: int, *, scale: int = 1) -> EmulatedLinks:
    found = EmulatedLinks(wire, lambda members: cluster(), scale=scale)
    members = (0, 1, 2)
    found.open(Membership(generation=1, worker=worker, members=members, groups=(), channels=(), rendezvous=NOWHERE))
    return found


@pytest.mark.parametrize(("peer", "seconds"), [(1, 1.0 + 24 * 10 / 1000), (2, 5.0 + 24 * 10 / 100)])
def test_a_message_takes_the_time_of_its_link(clock: Clock, peer: int, seconds: float) -> None:
    wire = Wire()
    sender, receiver = linked(wire, 0, scale=10), linked(wire, peer, scale=10)
    message = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    arrived = torch.empty(2, 3)

    sender.send(message, peer=peer, tag=4)
    assert clock.now == 100.0, "a send holds up nobody"
    receiver.receive(arrived, peer=0, tag=4).wait()

    assert torch.equal(arrived, message)
    assert clock.now == pytest.approx(100.0 + seconds)


def test_a_late_receive_finds_its_message(clock: Clock) -> None:
    wire = Wire()
    linked(wire, 0).send(torch.ones(3), peer=1, tag=0)
    clock.now += 50
    linked(wire, 1).receive(torch.empty(3), peer=0, tag=0).wait()
    assert clock.now == 150.0


def test_states_go_out_one_after_the_other(clock: Clock) -> None:
    wire = Wire()
    sender, receiver = linked(wire, 0, scale=10**9), linked(wire, 1, scale=10**9)
    for number in range(3):
        sender.send(torch.full((2,), float(number)), peer=1, tag=0, stands_for_bytes=2000)
    assert clock.now == 100.0, "a send holds up nobody"
    arrived = torch.empty(2)
    for number in range(3):
        receiver.receive(arrived, peer=0, tag=0).wait()
        assert float(arrived[0]) == number
        assert clock.now == pytest.approx(101.0 + 2 * (number + 1)), "the latency once, then the bytes of each"


def test_states_are_received_one_after_the_other_from_any_peer(clock: Clock) -> None:
    wire = Wire()
    for sender in (0, 1):
        linked(wire, sender).send(torch.ones(2), peer=2, tag=0, stands_for_bytes=1000)
    receiver = linked(wire, 2)
    for number, sender in enumerate((0, 1), start=1):
        receiver.receive(torch.empty(2), peer=sender, tag=0).wait()
        assert clock.now == pytest.approx(105.0 + 10 * number)


def test_reductions_are_rings_one_after_the_other(clock: Clock) -> None:
    wire = Wire()
    emulated = linked(wire, 0, scale=100)
    first, second = torch.ones(4), torch.ones(8)
    reductions = [emulated.all_reduce(first, (0, 1)), emulated.all_reduce(second, (0, 1, 2))]
    assert wire.calls == ["open"], "a ring turns when all have come to it"

    reductions[0].wait()
    near = cluster().ring_all_reduce_s((0, 1), 1600)
    assert clock.now == pytest.approx(100 + near)
    reductions[1].wait()

    assert clock.now == pytest.approx(100 + near + cluster().ring_all_reduce_s((0, 1, 2), 3200))
    assert (float(first[0]), float(second[0])) == (2.0, 3.0)
    assert wire.calls == ["open", "all_reduce (0, 1)", "all_reduce (0, 1, 2)"]


def test_a_vote_takes_its_own_time_only(clock: Clock) -> None:
    wire = Wire()
    linked(wire, 0, scale=10**9).vote(torch.ones(6), (0, 1)).wait()
    assert clock.now == 100.0
    assert wire.calls == ["open", "vote (0, 1)"]


def test_a_wait_for_a_link_ends_with_the_generation(clock: Clock) -> None:
    wire = Wire()
    receiver = linked(wire, 1)
    linked(wire, 0).send(torch.ones(3), peer=1, tag=0)
    receiver.interrupt()
    with pytest.raises(CommunicationError, match="the generation is over"):
        receiver.receive(torch.empty(3), peer=0, tag=0).wait()
    receiver.close()
    assert wire.calls[-2:] == ["interrupt", "close"]


def test_an_operation_takes_the_time_of_its_layers(clock: Clock) -> None:
    layers = (LayerCost("a", 1.0, 2.0, 3.0), LayerCost("b", 4.0, 5.0, 6.0, fused_backward_s=9.0))
    costs = CostModel(Workload(layers, 1, 1, operation_overhead_s=0.5), cluster())
    route = data_pipeline_plan(layer_costs=[1, 1], dp=1, pp=2, micro_batches=1).routes[0]
    paced = EmulatedPace(costs, 1)
    expected = {OperationKind.FORWARD: 4.5, OperationKind.BACKWARD: 9.5, OperationKind.WEIGHT_GRAD: 6.5}
    for kind, seconds in expected.items():
        since = clock.now
        clock.now += 0.25  # what the real computing took
        paced(Operation.of(kind, route, 1), since)
        assert clock.now == pytest.approx(since + seconds)


def test_a_forward_that_is_run_again_takes_its_time(clock: Clock) -> None:
    layers = (LayerCost("a", 1.0, 2.0, 3.0), LayerCost("b", 4.0, 5.0, 6.0), LayerCost("c", 1.0, 1.0, 1.0))
    route = data_pipeline_plan(layer_costs=[1, 1, 1], dp=1, pp=3, micro_batches=1).routes[0]
    paced = EmulatedPace(CostModel(Workload(layers, 1, 1), cluster()), 1)
    for recompute, seconds in (({}, 11.0), ({1: RecomputedLayers(1, 2)}, 15.0), ({}, 11.0)):
        since = clock.now
        paced(Operation.of(OperationKind.BACKWARD, route, 1, recompute), since)
        assert clock.now == pytest.approx(since + seconds)


def test_an_operation_that_is_late_already_is_not_held_up(clock: Clock) -> None:
    costs = CostModel(Workload((LayerCost("a", 1.0, 1.0, 1.0),), 1, 1), cluster())
    operation = Operation(OperationKind.FORWARD, 0, 0, LayerRange(0, 1), None, None, True, True)
    EmulatedPace(costs, 0)(operation, clock.now - 7)
    assert clock.now == 100.0
