"""Members and hosts, job numbers, and the records of an incident."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Worker as ClusterWorker
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.control.detectors.process_exit import describe_exit
from chameleon_ft.control.job_info import OperationRate
from chameleon_ft.control.state.incident import Fault, Incident, Loss
from chameleon_ft.control.state.members import Members, Worker
from chameleon_ft.control.wire.address import (
    address_of_host,
    join_address,
    local_address_towards,
    require_worker_ports,
    split_address,
    websocket_url,
)
from chameleon_ft.control.wire.messages import Hello, HostHello, Spawn
from chameleon_ft.control.wire.parts import BoundaryMessage
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.estimate import StallModel
from tests.control.stage import JOB

HOST, LATE_HOST = 100, 101  # connections of agents
NOW = 1e9


def connection(worker: int, incarnation: int = 0) -> int:
    return 10 * worker + incarnation


def hello(worker: int, incarnation: int = 0) -> Hello:
    return Hello(worker=worker, host=f"10.0.0.{worker}", incarnation=incarnation)


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
    assert spawn == Spawn(workers=(1,), incarnations=(2,))
    assert (members[1].incarnation, members[1].lost, members[1].exit_code) == (2, False, None)
    assert members.live() == (), "it has not joined"
    assert members.is_loading()
    members = joined(members, 1, 2)
    assert members.live() == (1,)
    assert connection(1, 1) in members.fenced
    assert connection(1, 2) not in members.fenced
    assert members.worker_of(connection(1, 1)) is None
    assert members.incarnation_of(1, 1) is members.started_by(HOST, 1, 1) is before
    assert members.incarnation_of(1, 2) is members.started_by(HOST, 1, 2) is members[1]
    for incarnation in (0, 3):
        with pytest.raises(ControlError, match="worker 1 was not started by this agent"):
            members.started_by(HOST, 1, incarnation)


def test_what_comes_late_of_an_earlier_incarnation_does_not_change_a_later_one() -> None:
    members = joined(with_host(Members(count=2)), 1, 1).fence(1)
    before = members[1]
    members = respawned(members, 1)
    members = members.changed(before, exit_code=-6)
    assert members[1].exit_code is None
    found = members.incarnation_of(1, 1)
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
    assert spawn == Spawn(workers=(0, 1, 3, 4, 5), incarnations=(2, 2, 2, 1, 1))
    members = joined(members, 5, 1)
    assert members.live() == (5,)
    refuses(members, 6, 0, "worker 6 does not exist")


def test_a_late_host_leaves_alone_what_another_one_may_start_again() -> None:
    members = joined(with_host(Members(count=2)), 0, 1).fence(1)
    _, _, spawn = members.with_host(LATE_HOST, HostHello(host="b", slots=1), is_late=True, blocklist=[], now=NOW)
    assert spawn.workers == (2,)


# --- the incident ----------------------------------------------------------------------------------------------------


def loss(**changes: object) -> Loss:
    values = Loss(worker=1, step=4, noticed_by="child", cause="SIGKILL", noticed_at=10.0, failed_at=9.5)
    return dataclasses.replace(values, **changes)  # type: ignore[arg-type]


def test_an_incident_is_timed_phase_by_phase() -> None:
    incident = Incident(
        (
            loss(),
            loss(worker=2, noticed_at=10.5, failed_at=None),
        ),
        stopped_at=11.0,
        decided_at=11.25,
    )
    first, second = incident.records(None, generation=3, resumed_at=12.0, cause_of=lambda loss: loss.cause, stop="why")
    assert (first.detect_s, first.stop_s, first.decide_s, first.regroup_s) == (0.5, 1.0, 0.25, 0.75)
    assert first.stall_s == 2.5
    assert (second.detect_s, second.stop_s, second.stall_s) == (None, 0.5, 1.5)
    assert (first.policy, first.action, first.resume_step, first.lost_layers) == ("stop", "why", 4, ())


EXPECTED = StallModel(detect_s=2.0, stop_s=3.0, decide_s=0.5, regroup_s=0.25)


def test_a_decision_knows_the_completed_part_of_a_stall() -> None:
    incident = Incident(
        (
            loss(),
            loss(worker=2, noticed_at=10.5, failed_at=None),
        ),
        stopped_at=11.0,
    )
    phases, repeat_s = incident.stall_so_far(9.0, EXPECTED)
    assert phases == StallModel(detect_s=0.5, stop_s=1.0, decide_s=0.5, regroup_s=0.25)
    assert repeat_s == 0.5
    # After another decision, only what has come since.
    phases, repeat_s = incident.stall_so_far(10.25, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (0.25, 0.5, 0.0)


def test_an_unknown_failure_time_is_estimated() -> None:
    incident = Incident((loss(failed_at=None),), stopped_at=11.0)
    phases, repeat_s = incident.stall_so_far(7.0, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (2.0, 1.0, 1.0)
    phases, repeat_s = incident.stall_so_far(None, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (0.0, 0.0, 0.0)


@given(*[st.floats(0, 100) for _ in range(4)], st.booleans())
def test_what_is_over_adds_up_to_the_time_that_has_passed(
    since: float, failed: float, noticed: float, stopped: float, known: bool
) -> None:
    incident = Incident((loss(noticed_at=noticed, failed_at=failed if known else None),), stopped_at=stopped)
    phases, repeat_s = incident.stall_so_far(since, EXPECTED)
    assert min(phases.detect_s, phases.stop_s, repeat_s) >= 0
    if since <= noticed <= stopped:
        assert phases.detect_s + phases.stop_s + repeat_s == pytest.approx(stopped - since)


@given(*[st.floats(0, 100) for _ in range(4)])
def test_times_are_never_negative(noticed: float, stopped: float, decided: float, resumed: float) -> None:
    # Clocks of different hosts differ, and a loss may be noticed after all others had quiesced.
    incident = Incident((loss(noticed_at=noticed),), stopped_at=stopped, decided_at=decided)
    (record,) = incident.records(None, generation=1, resumed_at=resumed, cause_of=lambda loss: "", stop="")
    assert record.detect_s is not None
    assert min(record.detect_s, record.stop_s, record.decide_s, record.regroup_s) >= 0


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-63, "signal 63")]
)
def test_how_a_process_ended(code: int, text: str) -> None:
    assert describe_exit(code) == text


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"crash": "ValueError: x", "exit_code": 1}, "ValueError: x"),
        ({"exit_code": -9}, "SIGKILL"),
        ({}, "connection closed"),
        ({"exit_code": -9, "fault": Fault(1, "disconnect", 9.5)}, "connection closed"),
        ({"exit_code": -9, "fault": Fault(1, "kill", 9.5)}, "SIGKILL"),
    ],
)
def test_the_best_known_cause(known: dict[str, object], text: str) -> None:
    found = loss(noticed_by="connection", cause="connection closed")
    arguments = {"crash": None, "exit_code": None, "fault": None, **known}
    assert found.describe_cause(**arguments) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["watchdog", "heartbeat", "peer"])
def test_a_worker_that_was_given_up_did_not_die_of_the_kill(path: str) -> None:
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
    assert JOB.fingerprint == dataclasses.replace(JOB, model="another description").fingerprint
    others = [
        dataclasses.replace(JOB, param_bytes=(256, 256, 256, 260)),
        dataclasses.replace(JOB, boundaries=(BoundaryMessage(shape=(2, 8), dtype="float64"), *JOB.boundaries[1:])),
        dataclasses.replace(JOB, boundaries=(BoundaryMessage(shape=(8, 2), dtype="float32"), *JOB.boundaries[1:])),
    ]
    assert len({JOB.fingerprint, *(other.fingerprint for other in others)}) == 4


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a.b:1", ("a.b", 1)), ("[::1]:29400", ("::1", 29400)), ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1))],
)
def test_addresses_come_apart_and_together(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address
    assert websocket_url(address) == f"ws://{address}/"
    assert websocket_url(address, tls=True) == f"wss://{address}/"


def test_a_host_that_uses_other_ports_than_the_firewall_leaves_open_is_told_what_to_run(tmp_path: Path) -> None:
    kernel_range = tmp_path / "ip_local_port_range"
    kernel_range.write_text("32768\t60999\n")
    for allowed in ("", "32768-60999", "1-65535"):
        require_worker_ports(allowed, kernel_range=kernel_range)
    for allowed in ("32769-60999", "32768-60998", "40000-49999"):
        low, high = allowed.split("-")
        with pytest.raises(ConfigError, match=rf'32768 to 60999; run `sysctl .*ip_local_port_range="{low} {high}"`'):
            require_worker_ports(allowed, kernel_range=kernel_range)


def test_an_ipv6_address_may_lack_its_brackets() -> None:
    """As in the manifests of Kubernetes, which have the address of a pod of either kind."""
    assert split_address("fd00::7:8790") == ("fd00::7", 8790)


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":1", "host:port", "host:65536", "host:-1", "host:1 ", "host:" + "9" * 5000),
        *("::1", "[::1]", "[host:1", "host]:1", "[]:1", "a:b:1"),
        *("a..b:1", "a" * 64 + ":1", "http://host:1", "user@host:1", "host/path:1", "a b:1", "a\0b:1"),
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="write it as HOST:PORT"):
        split_address(address)


def test_the_way_to_loopback_is_loopback() -> None:
    assert local_address_towards("127.0.0.1:9") == "127.0.0.1"
    with pytest.raises(ConfigError, match="there is no route to it from here"):
        local_address_towards("no.such.host.invalid:9")


def test_a_host_is_named_by_its_interface_or_as_it_is() -> None:
    assert address_of_host("lo") == "127.0.0.1"
    assert address_of_host("node7.example") == "node7.example"
    assert address_of_host("10.0.0.7") == "10.0.0.7"


def route_missing(address: str) -> str:
    raise ConfigError("there is no route")


def the_interfaces_are(monkeypatch: pytest.MonkeyPatch, **addresses: str | None) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr("chameleon_ft.control.wire.address._interface_address", addresses.get)
    monkeypatch.setattr("chameleon_ft.control.wire.address.local_address_towards", route_missing)


def test_the_only_interface_is_found_without_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1", ib0=None)
    assert address_of_host("auto") == "10.0.0.1"
    with pytest.raises(ConfigError, match="interface 'ib0': has no IPv4 address"):
        address_of_host("ib0")


def test_of_several_interfaces_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1", ib0="10.1.0.1")
    with pytest.raises(ConfigError, match=r"eth0 \(10\.0\.0\.1\), ib0 \(10\.1\.0\.1\); name one"):
        address_of_host("auto")
    assert address_of_host("ib0") == "10.1.0.1"


def test_a_machine_that_has_ipv6_alone_is_reached_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0=None)

    def routed(address: str) -> str:
        return "fd00::7" if address.startswith("[2001:db8:") else route_missing(address)

    monkeypatch.setattr("chameleon_ft.control.wire.address.local_address_towards", routed)
    assert address_of_host("auto") == "fd00::7"


def test_auto_is_the_source_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1", ib0="10.1.0.1")
    monkeypatch.setattr("chameleon_ft.control.wire.address.local_address_towards", lambda address: "10.1.0.1")
    assert address_of_host("auto") == "10.1.0.1"
