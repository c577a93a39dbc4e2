"""Communicators over gloo between real processes: messages arrive, and an interrupt ends every blocked call."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from chameleon_ft.worker.communicators.base import CommunicationError, Membership
from chameleon_ft.worker.communicators.gloo import GlooCommunicators, gloo_group
from tests.worker.ranks import TIMEOUTS, RankLostError, Ranks, interrupted_in, open_descriptors, opened

pytestmark = pytest.mark.multiprocess

ENDLESS = TIMEOUTS.model_copy(update={"collective_timeout_s": 1000.0, "rendezvous_s": 2000.0})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


# --- what arrives ----------------------------------------------------------------------------------------------------


def pass_around(membership: Membership, count: int) -> list[float]:
    """Send numbers to the next rank, two tags in turn, and receive those of the one before, one tag after the other."""
    members, worker = membership.members, membership.worker
    after = members[(members.index(worker) + 1) % len(members)]
    before = members[members.index(worker) - 1]
    with opened(membership) as communicators:
        sent = [torch.full((3,), worker + i / 1000) for i in range(count)]
        under_way = [communicators.send(tensor, peer=after, tag=i % 2) for i, tensor in enumerate(sent)]
        received = []
        for tag in (0, 1):
            for _ in range(tag, count, 2):
                tensor = torch.empty(3)
                communicators.receive(tensor, peer=before, tag=tag).wait()
                received.append(float(tensor[0]))
        done = torch.ones(1)
        communicators.all_reduce(done, members).wait()
        assert len(under_way) == count
        return received


def test_messages_of_a_tag_arrive_in_the_order_they_were_sent(ranks: Ranks) -> None:
    members = (0, 1, 3)
    memberships = ranks.memberships(members=members)
    arguments = [(memberships[members.index(w)], 20) if w in members else () for w in range(4)]
    results = ranks.run(pass_around_or_not, arguments)
    for worker, before in [(0, 3), (1, 0), (3, 1)]:
        expected = [before + i / 1000 for i in [*range(0, 20, 2), *range(1, 20, 2)]]
        assert results[worker] == pytest.approx(expected)


def pass_around_or_not(*arguments: object) -> list[float]:
    return pass_around(*arguments) if arguments else []  # type: ignore[arg-type]


def receive_ahead(membership: Membership) -> float:
    """Both ends post their receives first, and large messages cross."""
    peer = 1 - membership.worker
    with opened(membership) as communicators:
        arriving = torch.empty(2_000_000)
        receive = communicators.receive(arriving, peer=peer, tag=7)
        sent = torch.full((2_000_000,), float(membership.worker))
        message = communicators.send(sent, peer=peer, tag=7)
        receive.wait()
        message.wait()
        message.wait()  # a second time is nothing
        return float(arriving.sum())


def test_large_messages_cross(ranks: Ranks) -> None:
    results = ranks.run(receive_ahead, [(membership,) for membership in ranks.memberships(members=(0, 1))])
    assert results == [2_000_000.0, 0.0]


def reduce_in_groups(membership: Membership) -> dict[tuple[int, ...], float]:
    sums = {}
    with opened(membership) as communicators:
        groups = [group for group in membership.groups if membership.worker in group]
        tensors = {group: torch.full((100,), 10.0**membership.worker) for group in groups}
        reductions = [communicators.all_reduce(tensors[group], group) for group in groups]
        for reduction in reductions:
            reduction.wait()
        for group in groups:
            sums[group] = float(tensors[group][-1])
        everyone = torch.full((1,), 10.0**membership.worker, dtype=torch.float64)
        communicators.all_reduce(everyone, membership.members).wait()
        sums[membership.members] = float(everyone)
    return sums


def test_groups_that_overlap_reduce_apart(ranks: Ranks) -> None:
    groups = [(0, 1), (1, 2, 3), (0, 3), (0, 1, 2, 3)]
    for worker, sums in enumerate(ranks.run(reduce_in_groups, [(m,) for m in ranks.memberships(groups)])):
        expected = {group: float(sum(10**w for w in group)) for group in groups if worker in group}
        assert sums == expected


def many_generations(memberships: list[Membership]) -> int:
    """Open and close generations, and count the descriptors that this leaves."""

    def once(membership: Membership) -> None:
        with opened(membership) as communicators:
            communicators.all_reduce(torch.ones(10), membership.members).wait()

    once(memberships[0])
    before = open_descriptors()
    for membership in memberships[1:]:
        once(membership)
    return open_descriptors() - before


def test_generations_follow_each_other_and_leak_nothing(ranks: Ranks) -> None:
    generations = [ranks.memberships() for _ in range(15)]
    leaked = ranks.run(many_generations, [([g[rank] for g in generations],) for rank in range(4)])
    assert max(leaked) <= 2  # of the last ones, a thread may not have ended yet


# --- an interrupt ends every blocked call ----------------------------------------------------------------------------


def blocked_receive(membership: Membership, waits: bool) -> str:
    with opened(membership) as communicators:
        if waits:
            return told(communicators, lambda: communicators.receive(torch.empty(4), peer=1, tag=0).wait(), "wait")
        return sleep_through(communicators)


def blocked_reduction(membership: Membership, waits: bool) -> str:
    with opened(membership) as communicators:
        if waits:
            return told(communicators, lambda: communicators.all_reduce(torch.ones(4), (0, 1, 2)).wait(), "wait")
        return sleep_through(communicators)


def blocked_send(membership: Membership, waits: bool) -> str:
    with opened(membership) as communicators:
        if waits:
            large = torch.empty(20_000_000)  # more than the sockets' buffers hold
            return told(communicators, lambda: communicators.send(large, peer=1, tag=0).wait(), "wait")
        return sleep_through(communicators)


def told(communicators: GlooCommunicators, call: object, inside: str) -> str:
    """Make a call that no peer answers, and return the message of its interruption."""
    assert callable(call)
    with interrupted_in(inside, communicators), pytest.raises(CommunicationError) as caught:
        call()
    with pytest.raises(CommunicationError):
        communicators.receive(torch.empty(1), peer=1, tag=3).wait()  # and so does every later one
    return str(caught.value)


def sleep_through(communicators: GlooCommunicators) -> str:
    """Do nothing until the others' end of the connections is shut down."""
    with pytest.raises(CommunicationError):
        communicators.receive(torch.empty(4), peer=0, tag=9).wait()
    return "woken by a peer"


@pytest.mark.parametrize("call", [blocked_receive, blocked_reduction, blocked_send])
def test_a_blocked_call_comes_back_when_it_is_interrupted(ranks: Ranks, call: object) -> None:
    memberships = ranks.memberships([(0, 1, 2)], members=(0, 1, 2))
    assert callable(call)
    results = ranks.run(call, [(memberships[worker], worker == 0) for worker in range(3)])
    assert "failed" in results[0]
    # And the next generation is not disturbed.
    ranks.run(reduce_in_groups, [(m,) for m in ranks.memberships()])


def open_without_the_others(membership: Membership) -> str:
    communicators = GlooCommunicators(timeouts=TIMEOUTS, address="127.0.0.1")
    try:
        with interrupted_in("wait", communicators), pytest.raises(CommunicationError) as caught:
            communicators.open(membership)
    finally:
        communicators.close()
    return str(caught.value)


def test_waiting_for_a_member_that_never_comes_can_be_interrupted(ranks: Ranks) -> None:
    memberships = ranks.memberships(members=(0, 1, 2))
    for result in ranks.run(open_without_the_others, [(memberships[0],), (memberships[1],)]):
        # The interruption may also be noticed between two groups.
        assert "the communicators cannot be formed" in result or "the generation is over" in result
    ranks.run(reduce_in_groups, [(m,) for m in ranks.memberships()])


class AnsweringNothing(c10d.Store):
    """A store that lets its rank say where it listens, and then tells it nothing of the others."""

    def __init__(self, store: c10d.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        raise RuntimeError("the generation is over")


def open_beside_members_that_have_left(membership: Membership, leaves: bool) -> str:
    """One rank forms a generation; the others have said where they listen, and then they have left it."""
    rank, prefix = membership.worker, f"generation-{membership.generation}/group-0"
    store = membership.rendezvous.open_store(timeout_s=60.0)
    if leaves:
        device = c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        with pytest.raises(RuntimeError):
            gloo_group(AnsweringNothing(store), prefix, rank, len(membership.members), device=device, timeout_s=60.0)
        store.set(f"left-{prefix}-{rank}", "")
        return "left"
    store.wait([f"left-{prefix}-{other}" for other in membership.members if other != rank])
    communicators = GlooCommunicators(timeouts=ENDLESS, address="127.0.0.1")
    try:
        with interrupted_in("open", communicators, delay_s=0.3), suppress(CommunicationError):
            communicators.open(membership)
    finally:
        communicators.close()
    return "came back"


def test_waiting_for_members_that_have_left_already_can_be_interrupted(ranks: Ranks) -> None:
    # Only by chance, which is in the numbers of ports, is it the rank that connects to all others, and waits for none.
    for _ in range(4):
        results = ranks.run(open_beside_members_that_have_left, [(m, m.worker > 0) for m in ranks.memberships()])
        assert results == ["came back", "left", "left", "left"]
    ranks.run(reduce_in_groups, [(m,) for m in ranks.memberships()])


def interrupted_before_opening(membership: Membership) -> str:
    communicators = GlooCommunicators(timeouts=TIMEOUTS, address="127.0.0.1")
    communicators.interrupt()
    try:
        with pytest.raises(CommunicationError) as caught:
            communicators.open(membership)
    finally:
        communicators.close()
    return str(caught.value)


def test_a_generation_that_is_over_before_it_is_opened(ranks: Ranks) -> None:
    (membership, _) = ranks.memberships(members=(0, 1))
    assert "the generation is over" in ranks.run(interrupted_before_opening, [(membership,)])[0]


def closed_in_any_state(memberships: list[Membership]) -> None:
    GlooCommunicators(timeouts=TIMEOUTS, address="127.0.0.1").close()
    with opened(memberships[0]) as communicators:
        communicators.all_reduce(torch.ones(1), memberships[0].members).wait()
        with suppress(CommunicationError):  # the other rank may have closed already
            communicators.receive(torch.empty(4), peer=1 - memberships[0].worker, tag=0)
            communicators.all_reduce(torch.ones(4), memberships[0].members)
        communicators.close()
    with opened(memberships[1]) as communicators:
        communicators.all_reduce(torch.ones(1), memberships[1].members).wait()
        communicators.interrupt()
        communicators.close()
        communicators.interrupt()


def test_closing_is_possible_in_any_state(ranks: Ranks) -> None:
    generations = [ranks.memberships(members=(0, 1)) for _ in range(2)]
    ranks.run(closed_in_any_state, [([g[rank] for g in generations],) for rank in range(2)])


def use_before_all_groups_are_formed(membership: Membership) -> list[str]:
    """Rank 1 does not form the group that it reduces in with rank 0; all vote and exchange messages all the same."""
    communicators = GlooCommunicators(timeouts=ENDLESS, address="127.0.0.1")
    if membership.worker == 1:
        communicators._form_all = lambda form, groups: communicators._sockets.settle()  # type: ignore[method-assign]
    errors = []
    try:
        communicators.open(membership)
        votes = torch.ones(1)
        communicators.vote(votes, membership.members).wait()
        assert float(votes) == 3
        if membership.worker == 0:
            with interrupted_in("settle", communicators):
                for call in (lambda: communicators.all_reduce(torch.ones(1), (0, 1)), communicators.settle):
                    with pytest.raises(CommunicationError) as caught:
                        call()
                    errors.append(str(caught.value))
        else:
            with pytest.raises(CommunicationError):  # once rank 0 has left
                communicators.receive(torch.empty(1), peer=0, tag=0).wait()
    finally:
        communicators.close()
    return errors


def test_a_group_that_is_still_formed_delays_its_reductions_only_and_can_be_interrupted(ranks: Ranks) -> None:
    memberships = ranks.memberships([(0, 1)], members=(0, 1, 2))
    errors, *_ = ranks.run(use_before_all_groups_are_formed, [(membership,) for membership in memberships])
    assert len(errors) == 2
    ranks.run(reduce_in_groups, [(m,) for m in ranks.memberships()])


# --- a rank is killed ------------------------------------------------------------------------------------------------


def lose_one(membership: Membership, next_membership: Membership | None, moment: str, victim: int) -> float:
    """Worker 1, the process `victim`, dies in the middle of something; the others get out of it and go on."""
    communicators = GlooCommunicators(timeouts=TIMEOUTS, address="127.0.0.1")
    communicators.open(membership)
    communicators.all_reduce(torch.ones(1), membership.members).wait()
    with interrupted_in("wait", communicators, after=victim), pytest.raises(CommunicationError):
        exchange_with_the_victim(communicators, membership, moment)
    communicators.close()
    assert next_membership is not None
    with opened(next_membership) as survivors:
        total = torch.ones(1)
        survivors.all_reduce(total, next_membership.members).wait()
        return float(total)


def exchange_with_the_victim(communicators: GlooCommunicators, membership: Membership, moment: str) -> None:
    large = torch.ones(8_000_000)
    others = [worker for worker in membership.members if worker != 1]
    if moment == "reduction":
        under_way = [communicators.all_reduce(large, membership.members)]
    elif membership.worker == 1:
        under_way = [communicators.send(large, peer=peer, tag=0) for peer in others]
    else:
        # The second one is never sent: on a busy machine the first may have arrived whole before the victim is gone.
        under_way = [communicators.receive(torch.empty_like(large), peer=1, tag=0) for _ in range(2)]
    if membership.worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for message in under_way:
        message.wait()


@pytest.mark.parametrize("moment", ["message", "reduction"])
def test_a_kill_in_the_middle_wakes_the_others_and_they_continue(moment: str) -> None:
    with Ranks(4) as ranks:
        first = ranks.memberships()
        second = ranks.memberships(members=(0, 2, 3))
        nexts = {membership.worker: membership for membership in second}
        victim = ranks.pid(1)
        results = ranks.run(lose_one, [(m, nexts.get(m.worker), moment, victim) for m in first])
    assert isinstance(results[1], RankLostError)
    assert [results[0], *results[2:]] == [3.0, 3.0, 3.0]
