"""`chameleon diagnose`: show for each incident of a run which worker failed, where and why, and what was done."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from chameleon_ft.cli.arguments import RunPath, Switch, parse_arguments
from chameleon_ft.cli.output import Output
from chameleon_ft.events.records import DETECTED_BY, Started
from chameleon_ft.quantities import duration, listed
from chameleon_ft.report.facts import describe_damage
from chameleon_ft.report.incidents import Culprit, Diagnosis
from chameleon_ft.report.view import RunView
from chameleon_ft.storage.files import RunDirectory


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
    view, damaged = RunView.of_events(run)
    found, others = view.incidents.diagnoses(view.decisions), view.conditions.found()
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
    steps = max((event.steps for event in view.events if isinstance(event, Started)), default=math.inf)
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
        out.text(f"{condition.title}: {condition.subject}", "bold")
        lasted = "" if condition.lasted_s is None else f", for {duration(condition.lasted_s)}"
        since = f"{_date(condition.since)}{lasted}"
        out.facts([("since", since), ("why", condition.why), ("action", condition.action)])
    if view.ending is not None and view.ending.status != "finished":
        out.text("")
        out.text(f"the run {'failed' if view.ending.status == 'failed' else 'ended'}: {view.ending.reason}")
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
    # The number may be damaged.
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def _actions(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    for each in diagnosis.failed_messages:
        peer = "" if each.peer is None else f" with worker {each.peer}"
        yield "message", f"of worker {each.reporter}{peer} failed: {each.error}"
    yield "action", f"{diagnosis.policy}: {diagnosis.action}"
    if diagnosis.policy != "stop":
        yield "resumed", f"at step {diagnosis.resume_step} after a stall of {duration(diagnosis.stall_s)}"
    if diagnosis.cost_steps is not None:
        yield "cost", f"{diagnosis.cost_steps:.2f} steps"
    if diagnosis.outcome is not None:
        yield "since then", diagnosis.outcome.describe()
    if diagnosis.decision is not None:
        yield "decision", f"{diagnosis.decision}, see chameleon explain"
