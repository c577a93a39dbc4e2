"""Workers that layers move between: threads take the part of ranks, and queues that of the network."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from chameleon_ft.job.job import Job
from chameleon_ft.plan import LayerRange
from chameleon_ft.recovery.transition import PlannedTransition, placement_of, plan_transition
from chameleon_ft.storage.files import FaultLog
from chameleon_ft.sync import Segment
from chameleon_ft.worker.communicators.base import CommunicationError, Membership
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers, LayerState
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.state_transfer.layer_messages import (
    IncomingLayers,
    LayerAllocator,
    Memory,
    OutgoingLayer,
    OutgoingLayers,
    layer_checksums,
)
from chameleon_ft.worker.state_transfer.transfer import StateTransfer
from chameleon_ft.workload import LayerCost
from tests.worker.toy import SEED, toy_job, toy_rank

LAYERS = 5
CPU = torch.device("cpu")
COSTS = tuple(LayerCost(f"layer {n}", 1.0, 1.0, 1.0, param_bytes=100 * (n + 1)) for n in range(LAYERS))
Holders = Mapping[int, Sequence[int]]


class Network:
    """Carries what is sent to whoever receives it, in order; `spoil` may change it on its way."""

    def __init__(self, spoil: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self.queues: dict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self.spoil = spoil
        self.lock = threading.Lock()
        self.ballots: list[Tensor] = []
        self.full = threading.Event()
        self.stood_for: list[int | None] = []

    def queue(self, sender: int, receiver: int, tag: int) -> SimpleQueue[Tensor]:
        with self.lock:
            return self.queues[sender, receiver, tag]


class Line:
    """One worker's communicators in a `Network`."""

    def __init__(self, network: Network, worker: int) -> None:
        self.network = network
        self.worker = worker

    def open(self, membership: Membership) -> None: ...

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> Any:
        self.network.stood_for.append(stands_for_bytes)
        self.network.queue(self.worker, peer, tag).put(self.network.spoil(tensor.clone()))
        return Now(lambda: None)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> Any:
        return Now(lambda: tensor.copy_(self.network.queue(peer, self.worker, tag).get(timeout=20)))

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Any:
        raise AssertionError("nothing but votes is reduced here")

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> Any:
        network = self.network
        with network.lock:
            network.ballots.append(ballot)
            if len(network.ballots) == len(group):
                total = torch.stack(network.ballots).sum(dim=0)
                for each in network.ballots:
                    each.copy_(total)
                network.full.set()

        def wait() -> None:
            if not network.full.wait(20):
                raise CommunicationError(None, "some workers have not confirmed")

        return Now(wait)

    def unreached(self) -> dict[int, float]:
        return {}

    def interrupt(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Now:
    """A message that is there when it is waited for."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def wait(self) -> None:
        self.then()


def trained(job: Job, layers: Sequence[int], *, steps: int = 3) -> HeldLayers:
    """Layers after some steps; each layer's gradients depend on nothing but layer and step."""
    held = HeldLayers(job, layers, seed=SEED, device=CPU)
    for step in range(steps):
        train(held, step)
    return held


def train(held: HeldLayers, step: int) -> None:
    segments = [Segment(LayerRange(layer, layer + 1), (0,)) for layer in sorted(held.layers)]
    GradientBuffers(held, segments)
    for segment in segments:
        random = torch.Generator().manual_seed(100 * step + segment.layers.start)
        for parameter in held.parameters(segment.layers):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=random))
    held.update(step)


def assert_equal(one: LayerState, other: LayerState) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[key]), key
            assert (value.dtype, value.shape) == (other[key].dtype, other[key].shape), key
        else:
            assert value == other[key], key


def transition_between(before: Holders, after: Holders) -> PlannedTransition:
    live = {**dict.fromkeys(after, ()), **before}
    planned = plan_transition(placement_of(before, LAYERS), placement_of(after, LAYERS), held=live, layers=COSTS)
    assert planned is not None
    return planned


def no_faults(worker: int, directory: Path) -> FaultInjector:
    return FaultInjector(worker, (), log=FaultLog(directory / "faults.jsonl"), disconnect=lambda: None)


def carry_out(
    planned: PlannedTransition,
    states: Mapping[int, HeldLayers],
    network: Network,
    directory: Path,
    *,
    ahead: bool = True,
) -> dict[int, Any]:
    """Have all workers do their part; return what each returned, or raised."""

    def one(worker: int) -> Any:
        allocator = LayerAllocator(toy_job(LAYERS), seed=SEED, device=CPU, ahead=ahead)
        rank = toy_rank(toy_job(LAYERS), worker=worker, faults=no_faults(worker, directory))
        transfer = StateTransfer(rank, allocator)
        part = planned.orders(COSTS)[worker]
        transfer.begin(part, states[worker])
        try:
            return transfer.carry_out(part, states[worker], Line(network, worker), step=3)
        except CommunicationError as error:
            return error
        finally:
            transfer.end()

    with ThreadPoolExecutor(len(planned.participants)) as pool:
        return dict(zip(planned.participants, pool.map(one, planned.participants), strict=True))


def send(states: Sequence[LayerState], network: Network, *, num_bytes: int = 7) -> None:
    """Have worker 0 send layers to worker 1."""
    layers = [OutgoingLayer(state, num_bytes, partial(layer_checksums, state, CPU)) for state in states]
    outgoing = OutgoingLayers(layers, Line(network, 0), peer=1, tag=2, device=CPU)
    for _ in layers:
        outgoing.start_next()
    for _ in layers:
        outgoing.finish_next()


def receive(
    network: Network,
    *,
    count: int = 1,
    room: Callable[[int], Mapping[str, Tensor]] = lambda number: {},
    memory: Memory | None = None,
) -> list[LayerState]:
    """Have worker 1 receive layers from worker 0, all of them under way at once."""
    incoming = IncomingLayers(Line(network, 1), peer=0, tag=2, device=CPU)
    incoming.describe()
    for number in range(count):
        incoming.start_next(room(number), memory)
    return [incoming.finish_next() for _ in range(count)]


def passed_on(state: LayerState) -> LayerState:
    """Send a state and return the received one."""
    network = Network()
    send([state], network)
    (arrived,) = receive(network)
    return arrived
