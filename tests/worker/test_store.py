"""The rank's end of the rendezvous store, and members of a generation that recognize each other."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.peers import RendezvousStore
from chameleon_ft.protocol.messages import LookUp, Message, Publish
from chameleon_ft.worker.communicators.base import CommunicationError, Membership, Rendezvous
from chameleon_ft.worker.communicators.gloo import GlooCommunicators, gloo_group
from chameleon_ft.worker.communicators.store import GenerationStore
from tests.golden import refused
from tests.worker.ranks import Ranks, opened


class Coordinator:
    """Serves a store to threads."""

    def __init__(self) -> None:
        self.store = RendezvousStore()
        self.ranks: dict[int, GenerationStore] = {}
        self.lock = threading.Lock()
        self.looked_up = threading.Event()
        self.published = threading.Event()
        self.look_ups = 0

    def rank(self, worker: int) -> GenerationStore:
        made = self.ranks[worker] = GenerationStore(4, partial(self.receive, worker))
        return made

    def receive(self, worker: int, message: Message) -> None:
        assert isinstance(message, Publish | LookUp)
        with self.lock:
            if isinstance(message, Publish):
                answers = list(self.store.publish(worker, message))
                self.published.set()
            else:
                answers = list(self.store.look_up(worker, message))
                self.look_ups += 1
        for to, answer in answers:
            self.ranks[to].take_in(answer.values)
        self.looked_up.set()


def test_torch_finds_what_others_have_published() -> None:
    coordinator = Coordinator()
    one, other = (PrefixStore("group/0", coordinator.rank(worker)) for worker in range(2))
    values = {str(key): bytes([key, 0, 255]) for key in range(20)}
    with ThreadPoolExecutor() as pool:
        found = pool.map(one.get, values)
        for key, value in values.items():
            other.set(key, value)  # type: ignore[arg-type] # the stub has str
        assert list(found) == list(values.values())
    assert one.check(["3"])
    other.wait([*values])
    assert coordinator.look_ups <= len(values) + 1, "one answer has the values of all that is beside a key"


def test_the_members_of_a_group_are_told_of_each_other_without_asking() -> None:
    """Gloo publishes once for each member, and what it looks up has come by itself."""
    coordinator = Coordinator()
    stores = [coordinator.rank(rank) for rank in range(4)]
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    with ThreadPoolExecutor() as pool:
        forming = [
            pool.submit(gloo_group, store, "generation-4/group-0", rank, 4, device=device, timeout_s=30.0, key=b"k")
            for rank, store in enumerate(stores)
        ]
        for formed_group in forming:
            formed_group.result()
    assert coordinator.look_ups == 0


def test_the_connections_of_a_group_are_told_from_others_by_what_its_members_publish() -> None:
    """An interruption ends a receive, and no connection that the job has made while the group was formed."""
    coordinator = Coordinator()
    stores = [coordinator.rank(rank) for rank in range(2)]
    members = [GlooCommunicators(timeouts=Timeouts(), address="127.0.0.1") for _ in stores]

    def form(rank: int) -> None:
        rendezvous = Rendezvous(stores[rank].opened, b"key")
        membership = Membership(
            generation=4, worker=rank, members=(0, 1), groups=((0, 1),), channels=(), rendezvous=rendezvous
        )
        members[rank].open(membership)
        members[rank].settle()

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(form, 0)
        coordinator.published.wait()
        with socket.create_connection(server.getsockname()) as own, server.accept()[0] as other:
            pool.submit(form, 1).result()
            first.result()
            receiving = members[0].receive(torch.empty(1), peer=1, tag=0)
            waiting = pool.submit(receiving.wait)
            for each in members:
                each.interrupt()
            with pytest.raises(CommunicationError):
                waiting.result()
            for each in members:
                each.close()
            own.sendall(b"x")
            assert other.recv(1) == b"x"


def test_a_member_that_was_not_told_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_ft.worker.communicators.store._ASK_AFTER_S", 0.01)
    coordinator = Coordinator()
    one, other = coordinator.rank(0), coordinator.rank(1)
    for store in (one, other):
        store.expect("group", 2)
    PrefixStore("group", one).set("0", b"x")  # type: ignore[arg-type] # the stub has str
    told = coordinator.ranks.pop(0)
    coordinator.ranks[0] = coordinator.rank(7)  # the connection is lost just then, and made again
    PrefixStore("group", other).set("1", b"y")  # type: ignore[arg-type] # the stub has str
    coordinator.ranks[0] = told
    assert PrefixStore("group", one).get("1") == b"y"
    assert coordinator.look_ups == 1


def test_a_wait_ends_with_the_generation() -> None:
    coordinator = Coordinator()
    store = coordinator.rank(0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(PrefixStore("group", store).get, "0")
        coordinator.looked_up.wait()
        store.end()
        with refused(RuntimeError):
            waiting.result()


def test_a_wait_ends_after_its_timeout_and_names_the_key() -> None:
    store = Coordinator().rank(0).opened(timeout_s=0.01)
    with refused(RuntimeError):
        PrefixStore("group", store).get("0")
    with refused(RuntimeError):
        store.wait(["a"], timedelta(seconds=0.01))


def formed(membership: Membership) -> str:
    try:
        with opened(membership):
            return ""
    except CommunicationError as error:
        return f"{error.peer}: {error}"


@pytest.mark.multiprocess
def test_a_member_with_another_secret_is_named_by_all_and_trusted_by_none() -> None:
    with Ranks(3) as ranks:
        memberships = ranks.memberships([(0, 1)])
        assert ranks.run(formed, [(membership,) for membership in memberships]) == [""] * 3

        memberships = ranks.memberships([(0, 1)])
        stranger = Rendezvous(ranks.rendezvous.open_store, b"another secret")
        memberships[1] = replace(memberships[1], rendezvous=stranger)
        zero, one, two = ranks.run(formed, [(membership,) for membership in memberships])
        assert all(error.startswith("None: ") for error in (zero, one, two)), "no worker is to be dropped for it"
        assert "the connections to members [1] of" in zero
        assert "the connections to members [0, 2] of" in one
        assert "the connections to members [1] of" in two
