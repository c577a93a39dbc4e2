"""Members and hosts, job numbers, and the records of an outage."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Worker as ClusterWorker
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.control.job_info import OperationRate
from chameleon_ft.control.state.incident import Loss, Outage, describe_exit
from chameleon_ft.control.state.members import Members
from chameleon_ft.control.wire.address import join_address, local_address_towards, split_address, websocket_url
from chameleon_ft.control.wire.messages import BoundaryMessage, Exit, Hello, HostHello, Kill, Spawn
from chameleon_ft.control.wire.server import Peer
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.estimate import StallModel
from tests.control.stage import JOB, Puppet


def peer(name: str = "peer") -> Peer:
    return cast(Peer, Puppet(name))


def puppet(peer: Peer | None) -> Puppet:
    return cast(Puppet, peer)


def hello(worker: int, incarnation: int = 0) -> Hello:
    return Hello(worker=worker, host=f"10.0.0.{worker}", pid=worker, incarnation=incarnation)


def joined(members: Members, worker: int, incarnation: int = 0) -> Peer:
    """Have a rank join and take part; return its connection."""
    rank = peer(f"worker {worker} in incarnation {incarnation}")
    members.join(rank, hello(worker, incarnation)).takes_part = True
    return rank


# --- members ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), max_size=6))
def test_hosts_get_all_workers_and_each_but_once(slots: list[int]) -> None:
    members = Members(8)
    given: list[int] = []
    for index, count in enumerate(slots):
        host = peer()
        try:
            members.add_host(host, HostHello(host=f"h{index}", slots=count, pid=1))
        except ControlError:
            assert len(given) == 8
        else:
            workers = puppet(host).last(Spawn).workers
            assert len(workers) == min(count, 8 - len(given))
            given += workers
    assert given == list(range(min(8, sum(slots))))


def test_a_fenced_worker_is_killed_and_cut_off() -> None:
    members = Members(2)
    host = peer()
    members.add_host(host, HostHello(host="h", slots=2, pid=1))
    rank = joined(members, 1, incarnation=1)
    assert members.live() == [1]
    assert members.worker_of(rank) is members[1]
    members.fence(members[1])
    assert puppet(host).last(Kill).worker == 1
    assert puppet(rank).dropped
    assert members.is_fenced(rank)
    assert members.worker_of(rank) is None
    assert members.live() == []
    for incarnation in (0, 1):
        with pytest.raises(ControlError, match="worker 1 is lost"):
            members.join(peer(), hello(1, incarnation))


def test_a_lost_host_cannot_be_told_to_kill() -> None:
    members = Members(1)
    host = peer()
    members.add_host(host, HostHello(host="h", slots=1, pid=1))
    rank = joined(members, 0, incarnation=1)
    assert members.remove_agent(host) == "h"
    assert members.remove_agent(host) is None
    assert not members.agents
    members.fence(members[0])
    assert puppet(host).count(Kill) == 0
    assert puppet(rank).dropped


def test_only_live_workers_are_told() -> None:
    members = Members(3)
    ranks = [joined(members, worker) for worker in range(3)]
    members.fence(members[1])
    members.tell(Exit(reason="over"))
    assert [puppet(rank).count(Exit) for rank in ranks] == [1, 0, 1]
    assert members.hosts() == {0: "10.0.0.0", 1: "10.0.0.1", 2: "10.0.0.2"}, "also of those that are lost"
    assert 2 in members
    assert 3 not in members


# --- incarnations ----------------------------------------------------------------------------------------------------


def host_of(members: Members, *, slots: int = 2) -> Peer:
    host = peer("host")
    members.add_host(host, HostHello(host="h", slots=slots, pid=1))
    return host


def test_a_worker_that_is_started_again_is_another_one() -> None:
    members = Members(2)
    host = host_of(members)
    first = joined(members, 1, incarnation=1)
    before = members[1]
    members.fence(before)
    before.exit_code = -9
    members.respawn(before)
    assert puppet(host).last(Spawn) == Spawn(workers=(1,), incarnations=(2,))
    assert (members[1].incarnation, members[1].lost, members[1].exit_code) == (2, False, None)
    assert members.live() == [], "it has not joined"
    assert members.are_coming()
    second = joined(members, 1, incarnation=2)
    assert members.live() == [1]
    assert members.is_fenced(first)
    assert not members.is_fenced(second)
    assert members.worker_of(first) is None
    assert members.in_life(1, 1) is members.started_by(host, 1, 1) is before
    assert members.in_life(1, 2) is members.started_by(host, 1, 2) is members[1]
    for incarnation in (0, 3):
        with pytest.raises(ControlError, match="worker 1 was not started by this agent"):
            members.started_by(host, 1, incarnation)


def test_nobody_joins_in_the_name_of_a_life_that_is_over_or_of_another_process() -> None:
    members = Members(2)
    host_of(members)
    members.fence(members[1])
    members.respawn(members[1])
    for incarnation in (0, 1, 3):
        with pytest.raises(ControlError, match="worker 1 is started by its host's agent"):
            members.join(peer(), hello(1, incarnation))
    members.join(peer(), hello(1, 2))
    with pytest.raises(ControlError, match="worker 1 has joined already"):
        members.join(peer(), hello(1, 2))


def test_nobody_joins_in_a_life_that_was_given_to_nobody() -> None:
    with pytest.raises(ControlError, match="worker 1 was started by nobody"):
        Members(2).join(peer(), hello(1, 1))


def test_a_launcher_may_start_a_lost_worker_again() -> None:
    members = Members(2)
    joined(members, 0)
    joined(members, 1)
    members.fence(members[1])
    again = joined(members, 1)
    assert members[1].incarnation == 2
    assert members.worker_of(again) is members[1]
    with pytest.raises(ControlError, match="worker 1 has joined already"):
        members.join(peer(), hello(1))


def test_a_late_host_gets_what_nobody_has_any_more_and_then_new_workers() -> None:
    members = Members(4)
    gone, host = peer("gone"), peer("late")
    members.add_host(gone, HostHello(host="a", slots=3, pid=1))
    joined(members, 0, incarnation=1)
    joined(members, 3)
    for worker in (0, 3):
        members.fence(members[worker])
    members.remove_agent(gone)
    assert members[1].lost, "it will never come"
    assert members.add_late_host(host, HostHello(host="b", slots=5, pid=2), banned=[2]) == (0, 1, 3, 4, 5)
    assert puppet(host).last(Spawn) == Spawn(workers=(0, 1, 3, 4, 5), incarnations=(2, 2, 2, 1, 1))
    joined(members, 5, incarnation=1)
    assert members.live() == [5]
    with pytest.raises(ControlError, match="worker 6 does not exist"):
        members.join(peer(), hello(6))


def test_a_late_host_leaves_alone_whom_another_one_may_start_again() -> None:
    members = Members(2)
    host_of(members)
    joined(members, 0, incarnation=1)
    members.fence(members[1])
    assert members.add_late_host(peer(), HostHello(host="b", slots=1, pid=2), banned=[]) == (2,)


def test_whoever_is_loading_hears_only_that_the_run_is_over() -> None:
    members = Members(2)
    host = host_of(members)
    joined(members, 0, incarnation=1)
    loading = peer()
    members.join(loading, hello(1, 1))
    members.tell(Exit(reason="to those that take part"))
    assert puppet(loading).sent == []
    members.tell_everyone(Exit(reason="over"))
    assert puppet(loading).count(Exit) == puppet(host).count(Exit) == 1


# --- the outage ------------------------------------------------------------------------------------------------------


def loss(**changes: object) -> Loss:
    values = Loss(worker=1, step=4, noticed_by="child", cause="SIGKILL", noticed_at=10.0, failed_at=9.5)
    return dataclasses.replace(values, **changes)  # type: ignore[arg-type]


def test_an_outage_is_timed_phase_by_phase() -> None:
    outage = Outage([loss(), loss(worker=2, noticed_at=10.5, failed_at=None)], stopped_at=11.0, decided_at=11.25)
    first, second = outage.records(None, generation=3, resumed_at=12.0, cause_of=lambda loss: loss.cause, stop="why")
    assert (first.detect_s, first.stop_s, first.decide_s, first.regroup_s) == (0.5, 1.0, 0.25, 0.75)
    assert first.stall_s == 2.5
    assert (second.detect_s, second.stop_s, second.stall_s) == (None, 0.5, 1.5)
    assert (first.policy, first.action, first.resume_step, first.lost_layers) == ("stop", "why", 4, ())


EXPECTED = StallModel(detect_s=2.0, stop_s=3.0, decide_s=0.5, regroup_s=0.25)


def test_what_is_over_of_a_stall_is_known_when_it_is_decided() -> None:
    outage = Outage([loss(), loss(worker=2, noticed_at=10.5, failed_at=None)], stopped_at=11.0)
    phases, repeat_s = outage.stall_so_far(9.0, EXPECTED)
    assert phases == StallModel(detect_s=0.5, stop_s=1.0, decide_s=0.5, regroup_s=0.25)
    assert repeat_s == 0.5
    # After another decision, only what has come since.
    phases, repeat_s = outage.stall_so_far(10.25, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (0.25, 0.5, 0.0)


def test_the_moment_of_a_failure_that_is_not_known_is_guessed() -> None:
    outage = Outage([loss(failed_at=None)], stopped_at=11.0)
    phases, repeat_s = outage.stall_so_far(7.0, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (2.0, 1.0, 1.0)
    phases, repeat_s = outage.stall_so_far(None, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (0.0, 0.0, 0.0)


@given(*[st.floats(0, 100) for _ in range(4)], st.booleans())
def test_what_is_over_adds_up_to_the_time_that_has_passed(
    since: float, failed: float, noticed: float, stopped: float, known: bool
) -> None:
    outage = Outage([loss(noticed_at=noticed, failed_at=failed if known else None)], stopped_at=stopped)
    phases, repeat_s = outage.stall_so_far(since, EXPECTED)
    assert min(phases.detect_s, phases.stop_s, repeat_s) >= 0
    if since <= noticed <= stopped:
        assert phases.detect_s + phases.stop_s + repeat_s == pytest.approx(stopped - since)


@given(*[st.floats(0, 100) for _ in range(4)])
def test_times_are_never_negative(noticed: float, stopped: float, decided: float, resumed: float) -> None:
    # Clocks of different hosts differ, and a loss may be noticed after all others had quiesced.
    outage = Outage([loss(noticed_at=noticed)], stopped_at=stopped, decided_at=decided)
    (record,) = outage.records(None, generation=1, resumed_at=resumed, cause_of=lambda loss: "", stop="")
    assert record.detect_s is not None
    assert min(record.detect_s, record.stop_s, record.decide_s, record.regroup_s) >= 0


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-63, "signal 63")]
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"crash": "ValueError: x", "exit_code": 1}, "ValueError: x"),
        ({"exit_code": -9}, "SIGKILL"),
        ({}, "connection closed"),
        ({"exit_code": -9, "fault": {"kind": "disconnect"}}, "connection closed"),
        ({"exit_code": -9, "fault": {"kind": "kill"}}, "SIGKILL"),
    ],
)
def test_the_best_known_cause(known: dict[str, object], words: str) -> None:
    found = loss(noticed_by="connection", cause="connection closed")
    arguments = {"crash": None, "exit_code": None, "fault": None, **known}
    assert found.describe_cause(**arguments) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["watchdog", "heartbeat", "peer"])
def test_who_was_given_up_was_not_killed_by_somebody_else(path: str) -> None:
    found = loss(noticed_by=path, cause="hung")
    assert found.describe_cause(crash=None, exit_code=-9, fault=None) == "hung"


# --- numbers of a job ------------------------------------------------------------------------------------------------


def test_the_costs_of_a_job_follow_its_layers() -> None:
    config = RunConfig(
        job="a.job", workers=2, parallel=Parallel(dp=1, pp=2), batch=Batch(micro_batches=4, micro_batch_size=3)
    )
    job = dataclasses.replace(JOB, relative_costs=(1.0, 2.0, 4.0, 1.0))
    costs = job.costs(config, {1: "b", 0: "a"}, OperationRate(forward_s=8.0, backward_s=16.0))
    assert [layer.forward_s for layer in costs.workload.layers] == [1.0, 2.0, 4.0, 1.0]
    assert [layer.backward_s for layer in costs.workload.layers] == [2.0, 4.0, 8.0, 2.0]
    assert (costs.workload.micro_batches, costs.workload.micro_batch_size) == (4, 3)
    assert costs.cluster.workers == (ClusterWorker(0, "a"), ClusterWorker(1, "b"))


def test_a_fingerprint_tells_models_apart() -> None:
    assert JOB.fingerprint == dataclasses.replace(JOB, model="other words").fingerprint
    others = [
        dataclasses.replace(JOB, param_bytes=(256, 256, 256, 260)),
        dataclasses.replace(JOB, boundaries=(BoundaryMessage(shape=(2, 8), dtype="float64"), *JOB.boundaries[1:])),
        dataclasses.replace(JOB, boundaries=(BoundaryMessage(shape=(8, 2), dtype="float32"), *JOB.boundaries[1:])),
    ]
    assert len({JOB.fingerprint, *(other.fingerprint for other in others)}) == 4


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "parts"), [("a.b:1", ("a.b", 1)), ("[::1]:29400", ("::1", 29400))])
def test_addresses_come_apart_and_together(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address
    assert websocket_url(address) == f"ws://{address}/"


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port", "host:65536", "host:-1", "host:1 "])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="write it as HOST:PORT"):
        split_address(address)


def test_the_way_to_loopback_is_loopback() -> None:
    assert local_address_towards("127.0.0.1:9") == "127.0.0.1"
    with pytest.raises(ConfigError, match="there is no way to it from here"):
        local_address_towards("no.such.host.invalid:9")
