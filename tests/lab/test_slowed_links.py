"""Links that are made slow: every message arrives, in order and later; and a generation that ends is left at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import pytest
import torch

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.lab.emulation import SlowedLinks
from chameleon_ft.worker.communicators.base import CommunicationError, Membership, Rendezvous, Tag
from tests.worker.switchboard import Line, Switchboard

LINK = Link(latency_s=0.0, bytes_per_s=40_000.0)  # ten numbers of 4 bytes take a millisecond
CLUSTER = Cluster((Worker(0, ""), Worker(1, "")), LINK, LINK)


@contextmanager
def links(switchboard: Switchboard, worker: int, share: list[float]) -> Iterator[SlowedLinks]:
    made = SlowedLinks(Line(worker, switchboard), lambda workers: CLUSTER, lambda: share[0])
    made.open(
        Membership(
            generation=1,
            worker=worker,
            members=(0, 1),
            groups=((0, 1),),
            channels=(),
            rendezvous=Rendezvous(open_store=lambda timeout_s: None),  # type: ignore[arg-type, return-value]
        )
    )
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("slow", [0, 1], ids=["the sender", "the receiver"])
def test_messages_take_the_rest_of_their_time_and_keep_their_order(slow: int) -> None:
    switchboard, shares = Switchboard(), [[1.0], [1.0]]
    with links(switchboard, 0, shares[0]) as sender, links(switchboard, 1, shares[1]) as receiver:
        arrived: list[float] = []

        def exchange(first: int) -> float:
            begun = perf_counter()
            tensors = [torch.full((10,), float(first + index)) for index in range(4)]
            into = [torch.empty(10) for _ in tensors]
            receiving = [receiver.receive(each, peer=0, tag=2) for each in into]
            sending = [sender.send(each, peer=1, tag=2) for each in tensors]
            for message, each in zip(receiving, into, strict=True):
                message.wait()
                arrived.append(float(each[0]))
            for message in sending:
                message.wait()
            return perf_counter() - begun

        exchange(0)
        shares[slow][0] = 0.1  # nine milliseconds more each, one after the other
        assert exchange(4) >= 0.035
        shares[slow][0] = 1.0
        exchange(8)
    assert arrived == [float(each) for each in range(12)]


def test_messages_of_other_threads_are_not_waited_for() -> None:
    """A worker that trains may wait all the time for a request of another worker, which trains as well."""
    switchboard = Switchboard()
    with links(switchboard, 0, [1.0]) as sender, links(switchboard, 1, [0.5]) as receiver:
        requested, request = torch.empty(10), torch.ones(10)
        later = receiver.receive(requested, peer=0, tag=Tag.PULL_REQUEST)
        threads = threading.active_count()
        for number in range(4):
            sender.send(torch.full((10,), float(number)), peer=1, tag=2 * number)
            into = torch.empty(10)
            receiver.receive(into, peer=0, tag=2 * number).wait()
            assert float(into[0]) == number
        assert threading.active_count() <= threads + 1, "results of operations share a thread"
        sender.send(request, peer=1, tag=Tag.PULL_REQUEST)
        later.wait()
        assert torch.equal(requested, request)


def test_a_worker_that_waits_for_a_slow_message_leaves_it_when_the_generation_is_over() -> None:
    switchboard = Switchboard()
    with links(switchboard, 0, [1.0]) as sender, links(switchboard, 1, [1e-6]) as receiver:
        sender.send(torch.ones(10), peer=1, tag=2)
        message = receiver.receive(torch.empty(10), peer=0, tag=2)
        threading.Thread(target=receiver.interrupt).start()
        with pytest.raises(CommunicationError):
            message.wait()
