"""The exchange of updated parameters between the owners of slices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from chameleon_ft.job.job import Job
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.worker.communicators.base import CommunicationError, InFlight
from chameleon_ft.worker.execution import gather
from chameleon_ft.worker.mover import Mover
from tests.worker.sliced import JOBS, LAYERS, block_job, held_layers, sharding
from tests.worker.switchboard import Line, Switchboard, Waiting


class HeldBack(Line):
    """A line on which only some messages go out at first."""

    def __init__(self, worker: int, board: Switchboard) -> None:
        super().__init__(worker, board)
        self.messages = 0
        self.all_may_go = threading.Event()

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        if self.messages == 0:
            assert self.all_may_go.wait(30)
        self.messages -= 1
        return super().send(tensor, peer=peer, tag=tag, stands_for_bytes=stands_for_bytes)


@pytest.mark.parametrize("job", [JOBS["block"], JOBS["block in bf16"]], ids=["fp32", "bf16"])
def test_a_forward_waits_for_its_layers_alone(job: Callable[[], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_MESSAGE_BYTES", 64)
    owned, board = sharding(2, 1), Switchboard()
    held = [held_layers(job(), owned, worker) for worker in range(2)]
    with torch.no_grad():
        for view in held[0].views_of_slice(4, (0, UNITS)):
            view += 1
    lines = [HeldBack(worker, board) for worker in range(2)]
    lines[1].all_may_go.set()
    shards = dict(enumerate(owned.layers))
    movers = [Mover(line) for line in lines]
    sender, receiver = (gather.ParameterExchange.of(w, held[w], shards, movers[w]) for w in range(2))
    first = [layer for layer in range(LAYERS) if receiver._rounds_of[layer] <= receiver._rounds_of[2]]
    lines[0].messages = receiver._rounds_of[2]
    assert 0 < lines[0].messages < receiver._rounds
    receiver.begin()
    sender.begin()
    receiver.wait(first)
    assert receiver.complete == set(first)
    assert not receiver.has([4])
    lines[0].all_may_go.set()
    receiver.wait()
    assert receiver.complete == set(range(LAYERS))
    for part in owned.layers[4].slices:
        if part.owners == (0,):
            one, other = (each.views_of_slice(4, (part.start, part.stop)) for each in held)
            assert all(map(torch.equal, one, other))


def test_the_end_of_a_generation_ends_an_exchange_that_lacks_messages() -> None:
    owned, board = sharding(2, 1), Switchboard()
    held = held_layers(block_job(), owned)
    mover = Mover(Line(0, board))
    exchange = gather.ParameterExchange.of(0, held, dict(enumerate(owned.layers)), mover)
    exchange.begin()
    mover.close()
    assert exchange.complete == frozenset()
    with pytest.raises(CommunicationError):
        exchange.wait()


class Watched(Line):
    """A line that is cut some time after it was asked for, and notes if two threads wait for one message."""

    def __init__(self, worker: int, board: Switchboard) -> None:
        super().__init__(worker, board)
        self.is_waited_for = threading.Event()
        self.is_shared = False
        self.interruptions = 0

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        message, one = super().receive(tensor, peer=peer, tag=tag), threading.Lock()

        def wait() -> None:
            self.is_shared = self.is_shared or one.locked()
            with one:
                self.is_waited_for.set()
                message.wait()

        return Waiting(wait)

    def interrupt(self) -> None:
        self.interruptions += 1
        if self.interruptions == 20:  # by then, a second thread would wait, too
            super().interrupt()


@pytest.mark.parametrize("message_bytes", [64, 4 << 20], ids=["with a thread of its own", "few messages"])
def test_the_end_of_a_generation_ends_an_exchange_for_which_a_thread_waits(
    message_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_MESSAGE_BYTES", message_bytes)
    owned, line = sharding(2, 1), Watched(0, Switchboard())
    mover, held = Mover(line), held_layers(block_job(), owned)
    exchange = gather.ParameterExchange.of(0, held, dict(enumerate(owned.layers)), mover)
    exchange.begin()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(exchange.wait)
        assert line.is_waited_for.wait(30)
        mover.close()
        line.board.cut.set()
        with pytest.raises(CommunicationError):
            waiting.result(timeout=30)
    assert not line.is_shared
    assert exchange.complete == frozenset()
