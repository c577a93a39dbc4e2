"""Damaged lines of the records of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.cli.commands.explain import describe_reason
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.base import Event
from chameleon_ft.events.kinds import BackgroundReplaced, NoCheckpoints, RecordsLost
from chameleon_ft.events.lines import EVENT_TYPES, parse_event, parse_step
from chameleon_ft.events.records import Started
from chameleon_ft.report.conditions import ROUTINE
from chameleon_ft.report.facts import facts_of
from chameleon_ft.report.page import content
from chameleon_ft.report.view import RunView
from chameleon_ft.storage.files import RunDirectory
from tests.golden import refused
from tests.report.live.lines import BEGAN, SLOW, event, failed, new_run, read, started, stepped
from tests.report.records import join_record, outcome_record
from tests.report.test_decisions import decided

_OF_STEP = {"step": 60, "error": "no space left"}
_BAD = {"step": 40, "why": "the loss is nan", "changed": [2]}
_ORIGIN = {"worker": 5, "micro_batch": 3, "layers": [1, 2], "where": "forward"}
EVENTS = [
    started(),
    event("plan", 0.0, generation=1, policy="start", file="generation-00001.json"),
    event("prepared", 1.0, generation=1, losses=3, prepare_s=0.5, error=None),
    event("migration", 1.0, generation=1, step=3, layers=2, bytes=8, slices=0, arriving={"3": "0-3"}),
    event("slow", 2.0, worker=1, speed=0.5, **SLOW),
    decided(2, trigger="slow"),
    event("join", 3.0, **join_record(22).values()),
    event("recovered", 4.0, worker=1, step=30, is_trial=False),
    event("slow_link", 5.0, workers=[0, 1], speed=0.5, **SLOW),
    event("recovered_link", 6.0, workers=[0, 1], step=30, is_trial=False),
    event("stay", 6.5, slow=[], slow_links=[[0, 1]], message="no other plan is better"),
    event(
        "hang",
        7.0,
        worker=3,
        incarnation=1,
        host="a",
        process="state S",
        doing="in F1",
        since=BEGAN,
        place="m.py:7 in f",
        file="e.txt",
    ),
    event("lost", 7.1, worker=3, host="a", step=3, noticed_by="watchdog", cause="hung"),
    event("messages_failed", 7.2, generation=1, reports=[{"reporter": 1, "peer": 3, "error": "reset"}]),
    failed(3, 7.5),
    event("failure_cost", 8.0, incident_generations=[2], step=3, failure_cost_steps=0.5, predicted_steps=0.4),
    event("outcome", 9.0, **outcome_record().values()),
    event("respawn", 9.0, worker=3, incarnation=2, message="worker 3 is started again"),
    event("join_failed", 9.5, worker=3, incarnation=2, cause="SIGKILL"),
    event("respawn", 9.6, worker=3, incarnation=3, message="worker 3 is started again"),
    event("joined", 10.0, worker=3, incarnation=3, host="a"),
    event("blocklisted", 10.5, worker=3, deaths=2),
    event("host_lost", 11.0, host="a", workers=[3]),
    event("host_joined", 12.0, host="a", workers=[], adopted=[3]),
    event("host_refused", 12.0, host="b", reason="another torch", report={}),
    event("draining", 13.0, workers=[2]),
    event("drain_failed", 13.5, workers=[2], reason="no plan"),
    event("drained", 14.0, worker=2, step=9),
    event("left", 14.0, worker=1, step=9, cause="exit code 1"),
    event("not_ended", 14.5, worker=1, host="b"),
    event("took_over", 15.0, step=9, generation=2),
    event("stalled", 15.0, stall_s=9.0),
    event("reclaimed", 15.0, term=3),
    event("waiting", 16.0, worker=1, doing="loading layers", since_s=10.0),
    event("waiting", 17.0, worker=1, doing="loading layers", since_s=20.0),
    event("records_late", 18.0, file="metrics.jsonl", reason="no space left"),
    event("records_written", 19.0, late_s=1.0, dropped=3),
    event("state_differs", 20.0, step=50, agreed=40, odd={}, undecided={"1": [0, 2]}),
    event("bad_step", 21.0, is_bad_again=True, action="skip", origins=[_ORIGIN], **_BAD),
    event("bad_step", 21.0, is_bad_again=False, action="applied", origins=[], **_BAD),
    event("sample_left_out", 21.2, step=4, epoch=0, sample=17, worker=1, host="a", error="OSError", is_replaced=False),
    event("devices_connected", 21.3, generation=2, worker=1, kept=3, formed=2, seconds=0.31),
    event("loader_ended", 21.4, worker=1, host="a", loader="loader 0", doing="reading sample 17"),
    event("empty_step", 21.0, step=4, message="no sample of step 4 has a loss term"),
    event("decision_failed", 22.0, workers=[1], slow_links=[[0, 1]], error="no time"),
    event("discarded", 23.0, generation=3, error="out of memory"),
    event("snapshot", 24.0, step=8, held_up_s=0.0, seconds=1.0),
    event("checkpoint", 25.0, step=8, copy_s=0.1, write_s=1.0),
    *(event(name, 26.0, **_OF_STEP) for name in ("checkpoint_failed", "checkpoint_unreadable")),
    event("checkpoint_late", 26.0, step=60),
    event("checkpoint_incomplete", 26.0, step=60),
    event("snapshot_unreadable", 26.0, **_OF_STEP),
    event("checkpoints_left_out", 26.0, step=8, steps=[4, 6], message="those of steps 4 and 6 were left out"),
    event("job_changed", 26.0, step=8, changes=["seed was 1 and is 2"], message="another job"),
    event("snapshots_off", 27.0, reason="no memory"),
    event("optimizer_undivided", 27.0, optimizer="Muon"),
    event("hint", 27.0, message="`loss` seems to return the mean"),
    event("refused", 28.0, address="10.0.0.9:1", reason="wrong join token", count=1),
    event("solar_storm", 29.0, worker=3, message="a bit has flipped"),
    event("finished", 30.0, status="failed", reason="all workers are lost"),
]
WRONG: list[Any] = [None, -1, 0, 1e400, float("nan"), "x", [], {}, True, 10**30, 2**63, [[]], ""]


def test_every_kind_of_event_is_among_them() -> None:
    events = [parse_event(json.dumps(each).encode()) for each in EVENTS]
    not_here = {NoCheckpoints, BackgroundReplaced, RecordsLost, *ROUTINE}
    assert set(EVENT_TYPES.values()) - not_here <= {type(each) for each in events}
    for record, line in zip(events, EVENTS, strict=True):
        written = json.loads(json.dumps(record.to_json()))
        assert {name: written[name] for name in line} == json.loads(json.dumps(line))
    for line in (stepped(1, 2.0), stepped(2, 3.0, loss=float("nan"), is_skipped=True)):
        assert parse_step(json.dumps(line).encode()).to_json() == line


def damaged(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value in which one part is missing or wrong."""
    yield from WRONG
    if isinstance(value, dict):
        for key in value:
            yield {name: each for name, each in value.items() if name != key}
            yield from ({**value, key: other} for other in damaged(value[key]))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in damaged(value[index]))


def show(run: RunDirectory, events: list[Event]) -> None:
    view = RunView(run)
    for each in events:
        view.add(each)
    view.add(read(stepped(4, 31.0)))
    for condition in view.conditions.found():
        condition.to_json()
    for diagnosis in view.incidents.diagnoses(view.decisions):
        diagnosis.to_json()
    content.news(view.events)
    for story in view.decisions.stories():
        story.to_json()
        describe_reason(story.decided)
    facts_of(view.report(BEGAN + 32.0, has_coordinator=None))


@pytest.mark.parametrize("index", range(len(EVENTS)), ids=[each["event"] for each in EVENTS])
def test_all_that_is_not_left_out_can_be_shown(tmp_path: Path, index: int) -> None:
    run = new_run(tmp_path)
    chosen = [EVENTS[0], *EVENTS[max(1, index - 6) : index + 6]] if index else EVENTS[:6]
    at = min(index, 7)
    assert chosen[at] == EVENTS[index]
    near = [parse_event(json.dumps(line).encode()) for line in chosen]
    for other in damaged(EVENTS[index]):
        try:
            line = parse_event(json.dumps(other).encode())
        except ConfigError:
            continue
        show(run, [*near[:at], line, *near[at + 1 :]])


def test_the_steps_that_are_not_left_out_can_be_shown(tmp_path: Path) -> None:
    for other in damaged(stepped(3, 4.0)):
        try:
            step = parse_step(json.dumps(other).encode())
        except ConfigError:
            continue
        view = RunView(new_run(tmp_path) if not (tmp_path / "run").exists() else RunDirectory.open(tmp_path / "run"))
        for each in (read(started()), read(stepped(2, 3.0)), step):
            view.add(each)
        facts_of(view.report(BEGAN + 5.0, has_coordinator=None))


def test_an_unfinished_last_line_is_no_damage(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.events_file.write_text(json.dumps(EVENTS[0]) + "\n[\n3\n{}\n" + json.dumps(EVENTS[1])[:20])
    events, damage = run.readable_events()
    assert [type(event) for event in events] == [Started]
    with refused(ConfigError):
        run.events()
    assert [text.partition(", ")[2].partition(";")[0] for text in damage] == [
        "line 2: is not JSON",
        "line 3: Input should be an object",
        "line 4: event: Field required",
    ]
