"""The rank's end of the rendezvous store, and members of a generation that recognize each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from torch._C._distributed_c10d import PrefixStore

from chameleon_ft.control.rendezvous import RendezvousStore
from chameleon_ft.control.wire.messages import LookUp, Message, Publish
from chameleon_ft.runtime.communicators import CommunicationError, Membership, Rendezvous
from chameleon_ft.runtime.communicators.store import GenerationStore
from tests.runtime.ranks import Ranks, opened


class Coordinator:
    """Serves a store to threads."""

    def __init__(self) -> None:
        self.store = RendezvousStore()
        self.ranks: dict[int, GenerationStore] = {}
        self.lock = threading.Lock()
        self.looked_up = threading.Event()
        self.look_ups = 0

    def rank(self, worker: int) -> GenerationStore:
        made = self.ranks[worker] = GenerationStore(4, partial(self.receive, worker))
        return made

    def receive(self, worker: int, message: Message) -> None:
        assert isinstance(message, Publish | LookUp)
        with self.lock:
            if isinstance(message, Publish):
                answers = list(self.store.publish(message))
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


def test_a_wait_ends_with_the_generation() -> None:
    coordinator = Coordinator()
    store = coordinator.rank(0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(PrefixStore("group", store).get, "0")
        coordinator.looked_up.wait()
        store.end()
        with pytest.raises(RuntimeError, match="the generation is over"):
            waiting.result()


def test_a_wait_ends_after_its_timeout_and_names_the_key() -> None:
    store = Coordinator().rank(0).opened(timeout_s=0.01)
    with pytest.raises(RuntimeError, match="no member has published group/0 in time"):
        PrefixStore("group", store).get("0")
    with pytest.raises(RuntimeError, match="no member has published a in time"):
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
