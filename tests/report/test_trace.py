"""Traces: files that Chrome and Perfetto read."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.report.picture import Lane, WorkerReduction
from chameleon_ft.report.trace import write_trace
from chameleon_ft.schedule import OperationKind
from tests.golden import refused
from tests.report.schedules import Scheduled, predicted, scheduled, slowed
from tests.strategies import Planned, Shape, planned

Event = dict[str, Any]

LOST = scheduled(Shape(dp=3, pp=3, share=4), lost=(4,))


def traced(plan: Plan, pipelines: tuple[tuple[int, ...], ...], *lanes: Lane) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, plan=plan, pipelines=pipelines, lanes=lanes)
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def slices(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def operations(events: list[Event]) -> list[Event]:
    return [event for event in slices(events) if "micro_batch" in event["args"]]


def thread_names(events: list[Event]) -> dict[tuple[int, int], str]:
    named = [event for event in events if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def bound(events: list[Event]) -> list[tuple[Event, Event]]:
    """Return the slices that each flow connects by Perfetto's rule: the latest ones on its threads, ordered by time."""
    last: dict[int, Event] = {}
    begun: dict[int, Event] = {}
    found = []
    for event in sorted((event for event in events if event["ph"] in "Xsf"), key=lambda event: event["ts"]):
        if event["ph"] == "X":
            last[event["tid"]] = event
        elif event["ph"] == "s":
            assert event["id"] not in begun
            begun[event["id"]] = last[event["tid"]]
        else:
            assert event["bp"] == "e"
            found.append((begun.pop(event["id"]), last[event["tid"]]))
    assert not begun
    return found


@given(planned())
def test_every_operation_is_there_once_and_in_microseconds(case: Planned) -> None:
    lane = predicted(case.plan, case.costs)
    events = traced(case.plan, (), lane)

    names = thread_names(events)
    found = [
        (
            names[event["pid"], event["tid"]],
            event["name"],
            event["args"]["hop"],
            event["ts"],
            event["ts"] + event["dur"],
        )
        for event in operations(events)
    ]
    expected = [
        (
            f"worker {timed.worker}",
            f"{timed.operation.kind}{timed.operation.micro_batch}",
            timed.operation.hop,
            pytest.approx(1e6 * timed.start_s, abs=1e-3),
            pytest.approx(1e6 * timed.end_s, abs=1e-3),
        )
        for timed in lane.timeline.operations
    ]
    assert found == expected


@given(planned())
def test_nothing_overlaps_in_a_thread(case: Planned) -> None:
    lane = predicted(case.plan, case.costs)
    by_thread: dict[int, list[Event]] = defaultdict(list)
    for event in slices(traced(case.plan, (), lane, slowed(lane, by=1 / 3))):
        by_thread[event["tid"]].append(event)

    for events in by_thread.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


@given(planned())
def test_flows_connect_the_operations_between_which_messages_cross(case: Planned) -> None:
    lane = predicted(case.plan, case.costs)
    split = case.plan.split_backward
    back = OperationKind.INPUT_GRAD if split else OperationKind.BACKWARD
    expected: Counter[tuple[str, int, int, str, int, int]] = Counter()
    for route in case.plan.routes:
        for hop in range(1, len(route.hops)):
            workers = route.hops[hop - 1].worker, route.hops[hop].worker
            if workers[0] != workers[1]:
                expected[f"F{route.micro_batch}", hop - 1, workers[0], f"F{route.micro_batch}", hop, workers[1]] += 1
                expected[
                    f"{back}{route.micro_batch}", hop, workers[1], f"{back}{route.micro_batch}", hop - 1, workers[0]
                ] += 1

    found = Counter(
        (
            *(sender["name"], sender["args"]["hop"], sender["args"]["worker"]),
            *(receiver["name"], receiver["args"]["hop"], receiver["args"]["worker"]),
        )
        for sender, receiver in bound(traced(case.plan, (), lane))
    )
    assert found == expected


def test_flows_of_two_timelines_are_kept_apart() -> None:
    pairs = bound(traced(LOST.plan, LOST.pipelines, LOST.lane, slowed(LOST.lane, by=1.1)))
    assert {(sender["pid"], receiver["pid"]) for sender, receiver in pairs} == {(1, 1), (2, 2)}


def test_an_operation_has_its_arguments() -> None:
    events = operations(traced(LOST.plan, LOST.pipelines, LOST.lane))
    first = next(event for event in events if event["name"] == "F0" and event["args"]["hop"] == 1)
    assert first["args"] == {
        "kind": "forward",
        "worker": 1,
        "micro_batch": 0,
        "hop": 1,
        "layers": "1-1",
        "receive_from": 0,
        "send_to": 2,
        "detour": False,
    }


def test_detours_are_a_category() -> None:
    events = operations(traced(LOST.plan, LOST.pipelines, LOST.lane))
    detours = [event for event in events if "detour" in event["cat"].split(",")]
    # Worker 4 was the second stage of the pipeline that has micro-batches 4 to 7.
    assert {event["args"]["micro_batch"] for event in detours} == {4, 5, 6, 7}
    assert {event["args"]["hop"] for event in detours} == {1}
    assert {event["cat"] for event in detours} == {"forward,detour", "backward,detour"}
    assert len(detours) == 8
    assert all(event["args"]["detour"] == (event in detours) for event in events)


def test_timelines_are_processes_and_workers_threads() -> None:
    events = traced(LOST.plan, LOST.pipelines, LOST.lane, slowed(LOST.lane, by=1.1))
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {1: "predicted", 2: "measured"}
    names = thread_names(events)
    workers = [f"worker {worker}" for worker in LOST.plan.workers]
    assert [name for (pid, _), name in names.items() if pid == 2] == workers
    assert len({tid for _, tid in names}) == len(names)


def test_gradient_reductions_are_events_of_their_own() -> None:
    events = traced(LOST.plan, LOST.pipelines, LOST.lane)
    names = thread_names(events)
    found = [event for event in slices(events) if event["cat"] == "gradient all-reduce"]
    assert len(found) == len(LOST.lane.reductions) == 8
    for event, reduction in zip(found, sorted(LOST.lane.reductions, key=lambda each: each.worker), strict=True):
        assert names[event["pid"], event["tid"]] == f"worker {reduction.worker}, gradient all-reduce"
        assert event["name"] == f"all-reduce {reduction.layers.start}-{reduction.layers.stop - 1}"
        assert event["ts"] == pytest.approx(1e6 * reduction.start_s)
        assert event["dur"] == pytest.approx(1e6 * (reduction.end_s - reduction.start_s))
        assert event["args"]["holders"] == list(LOST.plan.placement.holders(reduction.layers.start))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=8))
def test_reductions_that_run_at_once_get_threads_of_their_own(spans: list[list[int]]) -> None:
    reductions = tuple(WorkerReduction(0, LayerRange(0, 1), start, end) for start, end in spans)
    events = traced(LOST.plan, LOST.pipelines, Lane("measured", LOST.lane.timeline, reductions))

    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in slices(events):
        if event["cat"] == "gradient all-reduce":
            rows[event["tid"]].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    assert sorted(span for row in rows.values() for span in row) == sorted((start, end) for start, end in spans)
    for row in rows.values():
        assert all(before[1] <= after[0] for before, after in pairwise(row))


def test_the_same_schedule_gives_the_same_file(tmp_path: Path) -> None:
    again: Scheduled = scheduled(Shape(dp=3, pp=3, share=4), lost=(4,))
    for name, case in (("one", LOST), ("two", again)):
        write_trace(tmp_path / name, plan=case.plan, pipelines=case.pipelines, lanes=[case.lane])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "trace.json"
    with refused(ConfigError):
        write_trace(path, plan=LOST.plan, pipelines=LOST.pipelines, lanes=[LOST.lane])
