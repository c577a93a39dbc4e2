"""`chameleon diagnose`: runs that were made by hand, word by word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.events import kinds
from chameleon_ft.events.lines import EVENT_TYPES, parse_event
from chameleon_ft.report.conditions import ROUTINE, _Later, describe
from chameleon_ft.storage.files import RunDirectory
from tests.cli.conftest import CommandLine
from tests.report.records import join_record
from tests.report.test_decisions import came, decided, lost, planned, started
from tests.report.test_readable import EVENTS as READABLE

NOON = 1_767_268_800.0  # 2026-01-01 12:00:00 UTC

HANG = """
Incident 1 of 2: worker 5 lost in step 40
worker       5 on 10.0.0.2
since        2026-01-01 11:59:55 UTC, 5.000 s before it was detected
why          hung: in F1 for 5.0 s, at /home/me/model.py:7 in forward
detected by  lack of progress
process      state S, 1.00 s of processor time
evidence     incidents/worker-5-1.txt
action       reroute: micro-batches 2, 3 of worker 3 go to worker 1
resumed      at step 40 after a stall of 123 ms
cost         0.50 steps
since then   step 410 ms (predicted 400 ms, +2.5%), stall 900 ms (predicted 750 ms, +20.0%)
decision     1, see chameleon explain

Incident 2 of 2: workers 3, 6 lost in step 40
worker       3 on 10.0.0.1
since        2026-01-01 12:00:10 UTC, 10 ms before it was detected
why          SIGKILL
detected by  the end of its process
before       its operations ran at 0.50 of the speed of others
worker       6
since        2026-01-01 12:00:10 UTC, 10 ms before it was detected
why          SIGKILL
detected by  the end of its process
message      of worker 2 with worker 3 failed: connection reset
action       reroute: micro-batches 2, 3 of worker 3 go to worker 1
resumed      at step 40 after a stall of 133 ms
decision     2, see chameleon explain
"""


def failure(worker: int, generation: int, at: float, **fields: Any) -> dict[str, Any]:
    """The event of a worker whose loss was over at a time in seconds after noon."""
    return {**lost(worker, generation), "time": NOON + at, **fields}


def hang(worker: int, at: float, **fields: Any) -> dict[str, Any]:
    return {
        "event": "hang",
        "time": NOON + at,
        "worker": worker,
        "incarnation": 1,
        "host": "10.0.0.2",
        "process": "state S, 1.00 s of processor time",
        "doing": "in F1",
        "since": NOON + at - 5.1,
        "place": "/home/me/model.py:7 in forward",
        "file": f"worker-{worker}-1.txt",
        **fields,
    }


EVENTS = [
    {**started(), "steps": 100},
    hang(5, 0.1),
    decided(2, 5),
    planned(2, "repartition"),
    failure(
        5,
        2,
        0.123,
        cause="hung: in F1 for 5.0 s, at /home/me/model.py:7 in forward",
        noticed_by="watchdog",
        host="10.0.0.2",
        detect_s=None,
        stall_s=0.123,
    ),
    {
        "event": "failure_cost",
        "time": NOON + 1,
        "incident_generations": [2],
        "step": 40,
        "failure_cost_steps": 0.5,
        "predicted_steps": None,
    },
    came(2),
    {
        "event": "messages_failed",
        "time": NOON + 9,
        "generation": 2,
        "reports": [{"reporter": 2, "peer": 3, "error": "connection reset"}],
    },
    decided(3, 3, 6),
    planned(3, "repartition"),
    failure(3, 3, 10.133, host="10.0.0.1"),
    failure(6, 3, 10.133),
]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(events: list[dict[str, Any]]) -> str:
        config = RunConfig(workers=8, parallel=Parallel(dp=4, pp=2), batch=Batch(micro_batches=8))
        run = RunDirectory.create(tmp_path / "run", config)
        run.events_file.write_text("".join(json.dumps(event) + "\n" for event in events))
        return str(run.path)

    return write


def told(chameleon: CommandLine, *arguments: str) -> str:
    assert chameleon("diagnose", *arguments) == 0
    return str(chameleon.capture.readouterr().out)


def test_one_answer_for_each_incident(write: Any, chameleon: CommandLine) -> None:
    run = write(EVENTS)
    assert told(chameleon, run) == f"{run}\n{HANG}"


def test_as_json(write: Any, chameleon: CommandLine) -> None:
    first, second = json.loads(told(chameleon, write(EVENTS), "--json"))["incidents"]
    (culprit,) = first["culprits"]
    assert (culprit["worker"], culprit["host"], culprit["doing"]) == (5, "10.0.0.2", "in F1")
    assert culprit["place"] == "/home/me/model.py:7 in forward"
    assert culprit["since"] == pytest.approx(NOON - 5.0)
    assert (first["decision"], first["outcome"]["steps"], first["cost_steps"]) == (1, 10, 0.5)
    assert [culprit["worker"] for culprit in second["culprits"]] == [3, 6]
    assert second["failed_messages"] == [[2, 3, "connection reset"]]


def test_evidence_that_came_after_the_banner(write: Any, chameleon: CommandLine) -> None:
    events = [started(), failure(5, 2, 0.1, noticed_by="watchdog"), hang(5, 0.2, message="worker 5 hung")]
    (incident,) = json.loads(told(chameleon, write(events), "--json"))["incidents"]
    assert incident["culprits"][0]["evidence"] == "incidents/worker-5-1.txt"


def test_a_run_without_losses(write: Any, chameleon: CommandLine) -> None:
    run = write([started(), {"event": "finished", "time": NOON, "status": "failed", "reason": "the disk is full"}])
    assert told(chameleon, run) == f"{run}\nno worker was lost\n\nthe run failed: the disk is full\n"
    assert json.loads(told(chameleon, run, "--json")) == {"incidents": [], "conditions": [], "damaged_lines": []}


def test_damaged_lines_are_left_out_and_counted(write: Any, chameleon: CommandLine) -> None:
    first, *others = EVENTS
    run = write([first, {"event": "lost", "time": NOON}, {**others[1], "rate": 3}, *others])
    named = (
        f"{run}/events.jsonl, line 2: worker: Field required; the file is damaged, or was written by another version"
    )
    head, _, rest = told(chameleon, run).partition("\n\n")
    assert head == f"{run}\n2 lines cannot be read, and are left out; the first: {named} of chameleon"
    assert f"\n{rest}" == HANG
    damaged = json.loads(told(chameleon, run, "--json"))["damaged_lines"]
    assert [line.partition(", ")[2].partition(":")[0] for line in damaged] == ["line 2", "line 3"]


CONDITIONS = """
no worker was lost

Slow: worker 5
since   2026-01-01 12:00:10 UTC, for 30.00 s
why     it computes at 0.52 of the speed of others since step 15; a step takes 1.500 s instead of 1.000 s
action  repair: 3 micro-batches less for worker 5

Slow: worker 2
since   2026-01-01 12:00:50 UTC
why     it computes at 0.90 of the speed of others since step 60
action  the plan stays as it is, because no other is better

Replaced: the coordinator
since   2026-01-01 12:01:00 UTC
why     the one before was lost, or left the run to it
action  another one continued in step 70 and generation 4

Slow disk: worker 3
since   2026-01-01 12:01:06 UTC
why     it has been loading layers for 20.00 s or longer
action  none; there is no limit to that

Held up: the coordinator
since   2026-01-01 12:01:10 UTC
why     it did not run for 25.00 s
action  no worker was given up for that

Did not lead: the coordinator
since   2026-01-01 12:01:11 UTC
why     it led no more, because its term had run out
action  it leads in term 3, and no worker was given up for that

Records were late: /data/run/metrics.jsonl
since   2026-01-01 12:01:20 UTC, for 41.00 s
why     [Errno 28] No space left on device
action  training continued; the records waited in memory and are written, but for 3 lines that are lost
"""


def happened(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": NOON + at, **fields}


def test_one_answer_for_each_condition_that_is_no_loss(write: Any, chameleon: CommandLine) -> None:
    run = write(
        [
            started(),
            happened("slow", 10, worker=5, speed=0.52, since_step=15, step=22, before_step_s=1.0, step_s=1.5),
            decided(2, trigger="slow"),
            happened(
                "join",
                15,
                **{**join_record(22).values(), "policy": "repair", "action": "3 micro-batches less for worker 5"},
            ),
            happened("recovered", 40, worker=5, step=50, is_trial=False),
            happened("slow", 50, worker=2, speed=0.9, since_step=60, step=67, before_step_s=None, step_s=None),
            happened("stay", 51, slow=[2]),
            happened("took_over", 60, step=70, generation=4),
            happened("waiting", 65, worker=3, doing="loading layers", since_s=10.0),
            happened("waiting", 66, worker=3, doing="loading layers", since_s=20.0),
            happened("stalled", 70, stall_s=25.0),
            happened("reclaimed", 71, term=3),
            happened("records_late", 80, file="/data/run/metrics.jsonl", reason="[Errno 28] No space left on device"),
            happened("records_written", 121, late_s=41.0, dropped=3),
        ]
    )
    assert told(chameleon, run).partition("\n")[2] == CONDITIONS.lstrip()
    kinds = [condition["kind"] for condition in json.loads(told(chameleon, run, "--json"))["conditions"]]
    assert kinds == ["slow", "slow", "took_over", "waiting", "stalled", "reclaimed", "records_late"]


OTHERS = """
Slow link: the link of workers 4, 5
since   2026-01-01 12:00:01 UTC, for 8.000 s
why     micro-batches take 2.00 times as long as on other links since step 15
action  none

Bad step: step 40
since   2026-01-01 12:00:02 UTC
why     the loss is nan, also when it was computed again, first in the forward of micro-batch 3 on worker 5
action  its samples were left out

Bad step: step 41
since   2026-01-01 12:00:03 UTC
why     the loss is nan, but not when it was computed again: the contribution of worker 2 differed
action  the second result counts; the hardware is at fault

Silent corruption: layer 1
since   2026-01-01 12:00:04 UTC
why     workers 0, 2 have different states of it after 50 updates, without a majority
action  all returned to a snapshot or checkpoint of step 40 or before

Lost agent: node7 (10.0.0.7)
since   2026-01-01 12:00:05 UTC, for 1.000 s
why     its agent is gone
action  another agent adopted workers 4, 5

Host refused: node8 (10.0.0.8)
since   2026-01-01 12:00:05 UTC
why     torch 2.12.0, and the run has 2.13.0
action  its agent was not admitted, and started no worker

Messages failed: messages
since   2026-01-01 12:00:07 UTC
why     of worker 1: connection reset
action  no worker was lost; the step was completed in generation 9

Not written: the checkpoint of step 60
since   2026-01-01 12:00:10 UTC
why     [Errno 28] No space left on device
action  what was written of it is removed; the one before stays the newest

Refused: 10.0.0.9:1
since   2026-01-01 12:00:11 UTC
why     wrong join token
action  the connection was rejected (2 times in the records)

Lost before it took part: worker 3
since   2026-01-01 12:00:12 UTC
why     it was lost before it took part: SIGKILL
action  it was started again, as incarnation 4

Solar storm: worker 3
since   2026-01-01 12:00:13 UTC
why     a bit has flipped
action  none
"""


def test_no_condition_is_left_out(write: Any, chameleon: CommandLine) -> None:
    full = {"step": 60, "error": "[Errno 28] No space left on device"}
    stranger = {"address": "10.0.0.9:1", "reason": "wrong join token"}
    link = {"workers": [4, 5], "speed": 0.5, "since_step": 15, "step": 22, "before_step_s": None, "step_s": None}
    bad = {"why": "the loss is nan", "origins": [], "changed": []}
    origin = {"worker": 5, "micro_batch": 3, "layers": [1, 2], "where": "forward"}
    report = {"reporter": 1, "peer": None, "error": "connection reset"}
    run = write(
        [
            started(),
            happened("slow_link", 1, **link),
            happened("bad_step", 2, step=40, is_bad_again=True, action="skip", **{**bad, "origins": [origin]}),
            happened("bad_step", 3, step=41, is_bad_again=False, action="applied", **{**bad, "changed": [2]}),
            happened("state_differs", 4, step=50, agreed=40, odd={}, undecided={"1": [0, 2]}),
            happened("host_lost", 5, host="node7 (10.0.0.7)", workers=[4, 5]),
            happened(
                "host_refused", 5.5, host="node8 (10.0.0.8)", reason="torch 2.12.0, and the run has 2.13.0", report={}
            ),
            happened("host_joined", 6, host="node7 (10.0.0.7)", workers=[], adopted=[4, 5]),
            happened("messages_failed", 7, generation=8, reports=[report]),
            {**planned(9, "reroute"), "time": NOON + 8},
            happened("recovered_link", 9, workers=[4, 5], step=70, is_trial=False),
            happened("checkpoint_failed", 10, **full, message="no complete one"),
            happened("checkpoint_failed", 10.1, **full),
            happened("refused", 11, **stranger, count=1),
            happened("refused", 11.5, **stranger, count=2),
            happened("join_failed", 12, worker=3, incarnation=3, cause="SIGKILL"),
            happened("respawn", 12.5, worker=3, incarnation=4),
            happened("solar_storm", 13, worker=3, message="a bit has flipped"),
        ]
    )
    assert told(chameleon, run).partition("\n\n")[2] == OTHERS.lstrip()


def test_every_event_is_routine_or_described() -> None:
    """A new kind of event is either part of a run without failures, or `chameleon diagnose` says what it means."""
    events = [parse_event(json.dumps(line).encode()) for line in READABLE]
    described = {type(each) for each in events if describe(each, _Later((), None, 1)) is not None}
    undescribed = set(EVENT_TYPES.values()) - set(ROUTINE) - described
    their = {kinds.BackgroundReplaced, kinds.NoCheckpoints, kinds.RecordsLost}
    assert undescribed == their, "their messages say all there is to say"


@pytest.mark.parametrize(
    ("then", "actions"),
    [
        (
            "plan",
            [
                "an older one was read",
                "all returned to a snapshot or checkpoint of step 40 or before",
                "all returned to the newest snapshot or checkpoint, and its samples were left out",
            ],
        ),
        ("finished", ["the run ended"] * 3),
        (None, ["none"] * 3),
    ],
)
def test_what_was_done_is_what_came_next(
    write: Any, chameleon: CommandLine, then: str | None, actions: list[str]
) -> None:
    """Not what would have been done, if there had been another checkpoint, or in a later start of the run."""
    ends = {
        "plan": [{**planned(9, "reroute"), "time": NOON + 4}],
        "finished": [happened("finished", 4, status="failed", reason="no checkpoint is left"), started()],
    }
    later = [] if then is None else [*ends[then], {**planned(10, "reroute"), "time": NOON + 5}]
    bad = {"step": 41, "why": "the loss is nan", "is_bad_again": True, "changed": [], "origins": []}
    run = write(
        [
            started(),
            happened("checkpoint_unreadable", 1, step=45, error="layer 1: a file is missing"),
            happened("state_differs", 2, step=50, agreed=40, odd={}, undecided={"1": [0, 2]}),
            happened("bad_step", 3, action="rollback", **bad),
            *later,
        ]
    )
    conditions = json.loads(told(chameleon, run, "--json"))["conditions"]
    assert [condition["action"] for condition in conditions] == actions


@pytest.mark.parametrize(("status", "how"), [("failed", "failed"), ("terminated", "ended"), ("interrupted", "ended")])
def test_why_a_run_has_ended_before_its_last_step(write: Any, chameleon: CommandLine, status: str, how: str) -> None:
    run = write([started(), happened("finished", 1, status=status, reason="a reason")])
    assert told(chameleon, run).endswith(f"\n\nthe run {how}: a reason\n")
