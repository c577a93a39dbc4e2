"""`chameleon diagnose`: show for each incident of a run which worker failed, where and why, and what was done."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from chameleon_ft.cli.arguments import RunPath, Switch, parse_arguments
from chameleon_ft.cli.output import Output
from chameleon_ft.events.records import DETECTED_BY
from chameleon_ft.quantities import duration, listed
from chameleon_ft.report.conditions import conditions
from chameleon_ft.report.diagnosis import Culprit, Diagnosis, diagnose
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.readable import describe_damage, readable_events

_TITLES: Final[Mapping[str, str]] = {
    "slow": "Slow",
    "took_over": "Replaced",
    "stalled": "Held up",
    "reclaimed": "Did not lead",
    "records_late": "Records were late",
    "waiting": "Slow disk",
    "state_differs": "Silent corruption",
    "join_failed": "Lost before it took part",
    "blocklisted": "Given up",
    "discarded": "Not prepared",
    "host_lost": "Lost agent",
    "not_ended": "Not ended",
    "checkpoint_late": "Slow checkpoint",
    "checkpoint_failed": "Not written",
    "checkpoint_unreadable": "Not read",
    "checkpoint_incomplete": "Not complete",
    "checkpoints_left_out": "Slow checkpoint",
    "job_changed": "Another job",
}


@dataclass(frozen=True)
class DiagnoseArguments:
    """Show for each incident of a run which worker failed, on which host, since when, why, and what was done.

    Only the files of the run are read, so the run may still be live.
    """

    run: RunPath
    """Run directory."""
    json: Switch = False
    """Print the incidents as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(DiagnoseArguments, arguments, command="diagnose")
    run = RunDirectory.open(given.run)
    events, damaged = readable_events(run)
    found, others = diagnose(events), conditions(events)
    if given.json:
        answer = {
            "incidents": [each.to_json() for each in found],
            "conditions": [each.to_json() for each in others],
            "damaged_lines": damaged,
        }
        print(json.dumps(answer))
        return 0
    out = Output()
    out.text(str(run.path), "bold")
    if damaged:
        out.text(describe_damage(damaged))
    steps = max((event["steps"] for event in events if event["event"] == "started"), default=math.inf)
    for diagnosis in found:
        out.text("")
        workers = listed("worker", [culprit.worker for culprit in diagnosis.culprits])
        when = f"in step {diagnosis.step}" if diagnosis.step < steps else "after the last step"
        out.text(f"Incident {diagnosis.number} of {len(found)}: {workers} lost {when}", "bold")
        out.facts([*(fact for culprit in diagnosis.culprits for fact in _facts_of(culprit)), *_actions(diagnosis)])
    if not found:
        out.text("no worker was lost")
    for condition in others:
        out.text("")
        title = _TITLES.get(condition.kind, condition.kind.replace("_", " ").capitalize())
        out.text(f"{title}: {condition.subject}", "bold")
        lasted = "" if condition.lasted_s is None else f", for {duration(condition.lasted_s)}"
        since = f"{_date(condition.since)}{lasted}"
        out.facts([("since", since), ("why", condition.why), ("action", condition.action)])
    for event in events[-1:]:
        if event["event"] == "finished" and event["status"] != "finished":
            out.text("")
            out.text(f"the run {'failed' if event['status'] == 'failed' else 'ended'}: {event['reason']}")
    return 0


def _facts_of(culprit: Culprit) -> Iterator[tuple[str, str]]:
    yield "worker", f"{culprit.worker}{f' on {culprit.host}' if culprit.host else ''}"
    after = "" if culprit.detected_after_s is None else f", {duration(culprit.detected_after_s)} before it was detected"
    yield "since", f"{_date(culprit.since)}{after}"
    yield "why", culprit.cause
    yield "detected by", DETECTED_BY[culprit.noticed_by]
    if culprit.process is not None:
        yield "process", culprit.process
    if culprit.evidence is not None:
        yield "evidence", culprit.evidence
    if culprit.speed is not None:
        yield "before", f"its operations ran at {culprit.speed:.2f} of the speed of others"


def _date(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # of a damaged number
        return "an unknown time"


def _actions(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    for reporter, peer, error in diagnosis.failed_messages:
        yield "message", f"of worker {reporter}{'' if peer is None else f' with worker {peer}'} failed: {error}"
    yield "action", f"{diagnosis.policy}: {diagnosis.action}"
    if diagnosis.policy != "stop":
        yield "resumed", f"at step {diagnosis.resume_step} after a stall of {duration(diagnosis.stall_s)}"
    if diagnosis.cost_steps is not None:
        yield "cost", f"{diagnosis.cost_steps:.2f} steps"
    if diagnosis.outcome is not None:
        yield "since then", diagnosis.outcome.describe()
    if diagnosis.decision is not None:
        yield "decision", f"{diagnosis.decision}, see chameleon explain"
