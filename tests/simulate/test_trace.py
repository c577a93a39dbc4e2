"""Traces against the definition: at each time, each worker by itself."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.trace import Event, Fault, Trace
from tests.golden import refused
from tests.simulate.live import live_at
from tests.simulate.traces import DURATION_S, GRID, GRID_S, Case, cases, speeds, trace_of


@given(case=cases())
def test_a_worker_is_as_slow_as_the_worst_fault_that_holds_it(case: Case) -> None:
    for time_s in GRID:
        by_definition = [case.speed(worker, time_s) for worker in range(case.trace.workers)]
        assert speeds(case.trace, time_s) == by_definition
        assert live_at(case.trace, time_s) == {worker for worker, speed in enumerate(by_definition) if speed > 0}


@given(case=cases())
def test_the_groups_are_the_events_by_time(case: Case) -> None:
    groups = list(case.trace.groups())
    assert [event for _, events in groups for event in events] == list(case.trace.events)
    assert [time_s for time_s, _ in groups] == sorted({event.time_s for event in case.trace.events})


@given(case=cases())
def test_worker_hours_add_up(case: Case) -> None:
    down_s = sum(GRID_S for time_s in GRID[:-1] for speed in speeds(case.trace, time_s) if speed == 0)
    assert case.trace.down_worker_hours == pytest.approx(down_s / 3600)
    total_s = case.trace.workers * DURATION_S
    assert case.trace.up_worker_hours == pytest.approx((total_s - down_s) / 3600)


@given(case=cases())
def test_the_faults_of_a_trace_make_the_same_trace(case: Case) -> None:
    again = trace_of(case.trace.faults(), workers=case.trace.workers, workers_per_host=case.trace.workers_per_host)
    assert [speeds(again, time_s) for time_s in GRID] == [speeds(case.trace, time_s) for time_s in GRID]


@given(case=cases(), steps=st.integers(1, len(GRID) + 5))
def test_the_beginning_of_a_trace_is_as_in_the_whole(case: Case, steps: int) -> None:
    limited = case.trace.limited(steps * GRID_S)
    assert limited.duration_s == min(steps * GRID_S, DURATION_S)
    for time_s in GRID[: steps + 1]:
        assert speeds(limited, time_s) == speeds(case.trace, time_s)


@given(case=cases(), rate_factor=st.sampled_from([0.25, 0.5, 1, 2, 8]))
def test_compressing_divides_every_time(case: Case, rate_factor: float) -> None:
    compressed = case.trace.compressed(rate_factor)
    for time_s in GRID:
        assert speeds(compressed, time_s / rate_factor) == speeds(case.trace, time_s)
    share = case.trace.up_worker_hours / case.trace.duration_s
    assert compressed.up_worker_hours / compressed.duration_s == pytest.approx(share)


@given(case=cases(), rate_factor=st.floats(0.1, 12), seed=st.integers(0, 3))
def test_scaling_keeps_the_cluster_the_duration_and_the_seed(case: Case, rate_factor: float, seed: int) -> None:
    scaled = case.trace.scaled(rate_factor, seed=seed)
    assert scaled == case.trace.scaled(rate_factor, seed=seed)
    assert (scaled.workers, scaled.duration_s) == (case.trace.workers, case.trace.duration_s)
    lost_first = {w for event in case.trace.events if event.time_s == 0 and event.kind == "lost" for w in event.workers}
    assert not live_at(scaled, 0) & lost_first


def far_apart(count: int) -> Trace:
    """Faults of 100 s, one every 1000 s, each on a host of its own with two workers."""
    faults = [Fault((2 * host, 2 * host + 1), 500 + 1000 * host, 600 + 1000 * host) for host in range(count)]
    return trace_of(faults, workers=2 * count, workers_per_host=2, duration_s=1000 * count)


@pytest.mark.parametrize("rate_factor", [2.0, 2.5, 5.0])
def test_above_one_there_are_more_faults_just_as_long(rate_factor: float) -> None:
    scaled = far_apart(40).scaled(rate_factor, seed=1)
    assert len(scaled.faults()) == 40 * rate_factor
    assert {round(fault.end_s - fault.start_s) for fault in scaled.faults() if fault.end_s < math.inf} == {100}
    assert all(len(fault.workers) == 2 and fault.workers[0] % 2 == 0 for fault in scaled.faults())
    starts = [fault.start_s for fault in scaled.faults()]
    assert {round(after - before) for before, after in itertools.pairwise(starts)} == {1000 / rate_factor}


def test_a_fault_that_would_hit_a_host_that_is_down_hits_another() -> None:
    faults = [Fault((host % 2,), 10 + 20 * host, 25 + 20 * host) for host in range(20)]
    trace = trace_of(faults, workers=8, duration_s=410)
    scaled = trace.scaled(4, seed=1)
    assert len(scaled.faults()) == 80
    assert {round(fault.end_s - fault.start_s) for fault in scaled.faults() if fault.end_s <= 410} == {15}
    crowded = trace.scaled(40, seed=1)
    assert min(len(live_at(crowded, time_s)) for time_s, _ in crowded.groups()) == 0
    assert len(crowded.faults()) < 800


def test_the_hosts_of_further_rounds_depend_on_the_seed() -> None:
    first, second = (far_apart(40).scaled(2, seed=seed).faults() for seed in (1, 2))
    assert [fault.workers for fault in first[:40]] == [fault.workers for fault in second[:40]]
    assert [fault.workers for fault in first[40:]] != [fault.workers for fault in second[40:]]


def test_below_one_some_incidents_are_kept_and_each_of_them_whole() -> None:
    faults = [Fault((worker,), 1000 * (worker // 2) + 200 * (worker % 2) + 1, 50_000) for worker in range(40)]
    trace = trace_of(faults, workers=40, duration_s=60_000)
    kept = trace.scaled(0.25, seed=3).faults()
    assert len(kept) == 10
    assert {fault.workers[0] // 2 for fault in kept} == {fault.workers[0] // 2 for fault in kept[::2]}
    assert set(kept) < set(trace.faults())
    assert kept != trace.scaled(0.25, seed=4).faults()


def test_scaling_by_one_changes_nothing() -> None:
    assert far_apart(3).scaled(1) == far_apart(3)


@given(case=cases(), data=st.data(), copies=st.integers(1, 3))
def test_events_of_a_node_apply_to_all_workers_of_the_host(case: Case, data: st.DataObject, copies: int) -> None:
    nodes = trace_of(case.faults, workers=case.trace.workers)
    hosts = data.draw(st.integers(1, nodes.hosts))
    mapped = nodes.on_hosts(hosts, workers_per_host=copies)
    assert (mapped.workers, mapped.hosts) == (hosts * copies, hosts)
    for time_s in GRID:
        assert speeds(mapped, time_s) == [speeds(nodes, time_s)[worker // copies] for worker in range(mapped.workers)]


def test_a_trace_of_workers_can_be_cut_to_fewer_hosts() -> None:
    cut = far_apart(3).on_hosts(2, workers_per_host=2)
    assert (cut.workers, cut.hosts, len(cut.events)) == (4, 2, 4)


def test_a_loss_that_begins_as_another_ends_is_no_event() -> None:
    trace = trace_of([Fault((0,), 1, 2), Fault((0,), 2, 3, cause="second")], workers=1)
    assert [(event.time_s, event.kind) for event in trace.events] == [(1, "lost"), (3, "back")]


def test_a_worker_that_comes_back_to_a_slow_host_is_slow_again() -> None:
    trace = trace_of([Fault((0,), 1, 4, cause="loss"), Fault((0,), 0.5, 9, 0.5, "heat")], workers=1)
    assert [(event.time_s, event.kind, event.speed, event.cause) for event in trace.events] == [
        (0.5, "slow", 0.5, "heat"),
        (1, "lost", 1, "loss"),
        (4, "back", 1, "loss"),
        (4, "slow", 0.5, "heat"),
        (9, "slow", 1, "heat"),
    ]


def lost(time_s: float, *workers: int) -> Event:
    return Event(time_s, workers, "lost")


def back(time_s: float, *workers: int) -> Event:
    return Event(time_s, workers, "back")


@pytest.mark.parametrize(
    "events",
    [
        [lost(1, 0), lost(2, 0)],
        [back(1, 0)],
        [lost(1, 0), Event(2, (0,), "slow", 0.5)],
        [Event(1, (0,), "slow", 0.5), Event(2, (0,), "slow", 0.5)],
        [Event(1, (0,), "slow", 0.5), Event(1, (0,), "slow", 1.0)],
        [lost(1, 0), back(1, 0)],
        [lost(2, 0), lost(1, 1)],
        [lost(1, 0), back(2, 0), lost(2, 1)],
        [lost(1, 4)],
        [lost(11, 0)],
    ],
)
def test_events_that_cannot_follow_one_another(events: list[Event]) -> None:
    with refused(ConfigError):
        Trace(4, 10, tuple(events))


@pytest.mark.parametrize(
    "arguments",
    [{"workers": 0}, {"duration_s": 0}, {"duration_s": math.nan}, {"workers_per_host": 3}, {"workers_per_host": 0}],
)
def test_a_trace_of_nothing(arguments: dict[str, Any]) -> None:
    with refused(ConfigError):
        Trace(**{"workers": 4, "duration_s": 10, "events": (), **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"time_s": -1},
        {"time_s": math.nan},
        {"time_s": math.inf},
        {"workers": ()},
        {"workers": (1, 0)},
        {"workers": (0, 0)},
        {"workers": (-1,)},
        {"kind": "gone"},
        {"kind": "slow", "speed": 0},
        {"kind": "slow", "speed": 1.5},
        {"kind": "back", "speed": 0.5},
    ],
)
def test_an_event_that_cannot_be(arguments: dict[str, Any]) -> None:
    with refused(ConfigError):
        Event(**{"time_s": 1.0, "workers": (0,), "kind": "lost", **arguments})


@pytest.mark.parametrize(
    "arguments", [{"start_s": -1}, {"end_s": 1}, {"end_s": math.nan}, {"speed": 1}, {"workers": ()}]
)
def test_a_fault_that_cannot_be(arguments: dict[str, Any]) -> None:
    with refused(ConfigError):
        Fault(**{"workers": (0,), "start_s": 1, "end_s": 2, **arguments})


def test_transformations_that_are_refused() -> None:
    trace = far_apart(3)
    for hosts in (0, 4):
        with refused(ConfigError):
            trace.on_hosts(hosts, workers_per_host=2)
    with refused(ConfigError):
        trace.on_hosts(3, workers_per_host=3)
    for rate_factor in (0, -1, math.nan, math.inf):
        with refused(ConfigError):
            trace.scaled(rate_factor)
        with refused(ConfigError):
            trace.compressed(rate_factor)
    with refused(ConfigError):
        trace_of([Fault((0,), 11)], workers=1, duration_s=10)
