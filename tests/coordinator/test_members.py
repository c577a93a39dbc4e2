"""Members and hosts, job numbers, and the records of an incident."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.coordinator.state.members import Members, Worker
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Hello, HostHello, Spawn
from chameleon_ft.protocol.parts import Member
from tests.golden import refused

HOST, LATE_HOST = 100, 101  # connections of agents
NOW = 1e9


def connection(worker: int, incarnation: int = 0) -> int:
    return 10 * worker + incarnation


def hello(worker: int, incarnation: int = 0) -> Hello:
    return Hello(member=Member(worker, incarnation), host=f"10.0.0.{worker}")


def joined(members: Members, worker: int, incarnation: int = 0) -> Members:
    """Have a rank join and take part."""
    members = members.joined(connection(worker, incarnation), hello(worker, incarnation), now=NOW)
    return members.changed(members[worker], takes_part=True)


def with_host(members: Members, agent: int = HOST, *, slots: int = 2) -> Members:
    return members.with_host(agent, HostHello(host="h", slots=slots), now=NOW)[0]


def refuses(members: Members, worker: int, incarnation: int, match: str) -> None:
    with pytest.raises(ControlError, match=match):
        members.joined(99, hello(worker, incarnation), now=NOW)


# --- members ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30), st.sets(st.integers(0, 29)))
def test_what_is_known_of_members_is_what_a_look_at_all_of_them_shows(
    changes: list[tuple[int, int]], looks: set[int]
) -> None:
    members = with_host(Members(count=4), slots=4)
    connections = itertools.count(1)
    for number, (worker, change) in enumerate(changes):
        if number in looks:
            known_of(members)
        now = members[worker]
        fields: list[dict[str, Any]] = [
            {"takes_part": not now.takes_part},
            {"connection": None},
            {"connection": next(connections)},
            {"lost": not now.lost},
            {"draining": not now.draining},
            {"has_stepped": not now.has_stepped},
        ]
        members = members.changed(now, **fields[change])
        assert known_of(members) == known_of(dataclasses.replace(members))


def known_of(members: Members) -> object:
    by_connection = {worker.connection: members.worker_of(worker.connection) for worker in members if worker.connection}
    return members.live(), members.unsettled, members.departing, members.in_first_step, by_connection


def test_a_message_of_a_worker_takes_no_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def looked(worker: Worker) -> bool:
        looks.append(worker.id)
        return worker.takes_part and worker.connection is not None and not worker.lost

    monkeypatch.setattr(Worker, "is_live", property(looked))
    count = 100
    members = with_host(Members(count=count), slots=count)
    members.live()
    members.worker_of(1)
    looks.clear()
    for worker in range(count):
        members = joined(members, worker, 1)
        assert members.live()[-1] == worker
        assert members.worker_of(connection(worker, 1)) == members[worker]
        members = members.changed(members[worker], has_stepped=True)
    assert members.live() == tuple(range(count))
    assert len(looks) <= 10 * count


def test_a_peer_that_reconnects_changes_no_other_worker() -> None:
    members = with_host(with_host(Members(count=4)), LATE_HOST)
    for worker in range(4):
        members = joined(members, worker, 1)
    members = members.with_drain_request(connection(1, 1), "SIGTERM").with_drain_request(HOST, "SIGINT")
    after = members.reconnected(connection(1, 1), 201).reconnected(HOST, 202)
    assert after[0] == dataclasses.replace(members[0], agent=202)
    assert after[1] == dataclasses.replace(members[1], agent=202, connection=201)
    assert after[2] is members[2]
    assert after[3] is members[3]
    assert after.worker_of(201) is after[1]
    assert after.worker_of(connection(1, 1)) is None
    assert after.agents == {202: "h", LATE_HOST: "h"}
    assert after.drain_requests == {201: "SIGTERM", 202: "SIGINT"}
    assert known_of(after) == known_of(dataclasses.replace(after))


@given(st.lists(st.integers(1, 5), max_size=6))
def test_hosts_get_all_workers_and_each_but_once(slots: list[int]) -> None:
    members = Members(count=8)
    given: list[int] = []
    for index, count in enumerate(slots):
        try:
            members, _, spawn = members.with_host(index, HostHello(host=f"h{index}", slots=count), now=NOW)
        except ControlError:
            assert len(given) == 8
        else:
            assert len(spawn.workers) == min(count, 8 - len(given))
            given += spawn.workers
    assert given == list(range(min(8, sum(slots))))


def test_a_fenced_worker_is_cut_off() -> None:
    members = joined(with_host(Members(count=2)), 1, 1)
    assert members.live() == (1,)
    assert members.worker_of(connection(1, 1)) is members[1]
    members = members.fence(1)
    assert connection(1, 1) in members.fenced
    assert members.worker_of(connection(1, 1)) is None
    assert members.live() == ()
    for incarnation in (0, 1):
        refuses(members, 1, incarnation, "worker 1 is lost")


def test_a_lost_host_has_no_workers_to_be_killed() -> None:
    members = joined(with_host(Members(count=1), slots=1), 0, 1)
    assert members.agents == {HOST: "h"}
    members = members.without_agent(HOST)
    assert members.without_agent(HOST) == members
    assert not members.agents
    assert members[0].agent is None
    assert members.live() == (0,), "it may live on"


def test_hosts_are_known_also_of_workers_that_are_lost() -> None:
    members = Members(count=3)
    for worker in range(3):
        members = joined(members, worker)
    members = members.fence(1)
    assert members.live() == (0, 2)
    assert members.hosts() == {0: "10.0.0.0", 1: "10.0.0.1", 2: "10.0.0.2"}
    assert 2 in members
    assert 3 not in members


# --- incarnations ----------------------------------------------------------------------------------------------------


def respawned(members: Members, worker: int) -> Members:
    return members.respawned(members[worker], now=NOW)[0]


def test_a_worker_that_is_started_again_is_another_one() -> None:
    members = joined(with_host(Members(count=2)), 1, 1).fence(1)
    members = members.changed(members[1], exit_code=-9)
    before = members[1]
    members, spawn = members.respawned(before, now=NOW)
    assert spawn == Spawn(members=(Member(1, 2),))
    assert (members[1].incarnation, members[1].lost, members[1].exit_code) == (2, False, None)
    assert members.live() == (), "it has not joined"
    assert members.is_loading()
    members = joined(members, 1, 2)
    assert members.live() == (1,)
    assert connection(1, 1) in members.fenced
    assert connection(1, 2) not in members.fenced
    assert members.worker_of(connection(1, 1)) is None
    assert members.find(Member(1, 1)) is members.started_by(HOST, Member(1, 1)) is before
    assert members.find(Member(1, 2)) is members.started_by(HOST, Member(1, 2)) is members[1]
    for incarnation in (0, 3):
        with refused(ControlError):
            members.started_by(HOST, Member(1, incarnation))


def test_what_comes_late_of_an_earlier_incarnation_does_not_change_a_later_one() -> None:
    members = joined(with_host(Members(count=2)), 1, 1).fence(1)
    before = members[1]
    members = respawned(members, 1)
    members = members.changed(before, exit_code=-6)
    assert members[1].exit_code is None
    found = members.find(Member(1, 1))
    assert found is not None
    assert found.exit_code == -6


def test_no_process_joins_in_the_name_of_an_incarnation_that_is_over_or_of_another_process() -> None:
    members = respawned(with_host(Members(count=2)).fence(1), 1)
    for incarnation in (0, 1, 3):
        refuses(members, 1, incarnation, "worker 1 is started by its host's agent")
    members = joined(members, 1, 2)
    refuses(members, 1, 2, "worker 1 has joined already")


def test_no_process_joins_as_an_incarnation_that_was_never_started() -> None:
    refuses(Members(count=2), 1, 1, "worker 1 was started by no agent")


def test_a_launcher_may_start_a_lost_worker_again() -> None:
    members = joined(joined(Members(count=2), 0), 1).fence(1)
    members = members.joined(77, hello(1), now=NOW)
    assert members[1].incarnation == 2
    assert members.worker_of(77) is members[1]
    refuses(members, 1, 0, "worker 1 has joined already")


def test_a_late_host_gets_what_no_process_has_any_more_and_then_new_workers() -> None:
    members = joined(joined(with_host(Members(count=4), slots=3), 0, 1), 3)
    members = members.fence(0).fence(3).without_agent(HOST)
    assert members[1].lost, "it will never come"
    members, _, spawn = members.with_host(LATE_HOST, HostHello(host="b", slots=5), is_late=True, blocklist=[2], now=NOW)
    assert spawn == Spawn(members=(Member(0, 2), Member(1, 2), Member(3, 2), Member(4, 1), Member(5, 1)))
    members = joined(members, 5, 1)
    assert members.live() == (5,)
    refuses(members, 6, 0, "worker 6 does not exist")


def test_a_late_host_leaves_alone_what_another_one_may_start_again() -> None:
    members = joined(with_host(Members(count=2)), 0, 1).fence(1)
    _, _, spawn = members.with_host(LATE_HOST, HostHello(host="b", slots=1), is_late=True, blocklist=[], now=NOW)
    assert spawn.workers == (2,)
