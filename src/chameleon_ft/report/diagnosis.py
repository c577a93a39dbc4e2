"""The diagnosis of a run: for each incident, which worker failed, where, since when, why, and what was done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from chameleon_ft.events.decisions import DecisionStory, decision_stories
from chameleon_ft.events.records import FailureRecord, NoticedBy, OutcomeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A worker that was lost.

    Attributes:
        host: where it ran; empty in older runs.
        since: when it failed, as far as that is known, in Unix seconds: the beginning of the operation in which it
            hung, the injected failure, or else its detection.
        detected_after_s: seconds from then until its detection; None if only the detection is known.
        doing: the activity in which it hung; None if it did not hang, or left no evidence.
        place: "FILE:LINE in FUNCTION" of that; likewise.
        process: the state of its process then; likewise.
        evidence: file with its last activities and its stacks, relative to the run directory; likewise.
        speed: its speed relative to the other workers, as measured before; None if it was not slower.
    """

    worker: int
    host: str
    since: float
    detected_after_s: float | None
    cause: str
    noticed_by: NoticedBy
    doing: str | None = None
    place: str | None = None
    process: str | None = None
    evidence: str | None = None
    speed: float | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any], hang: Mapping[str, Any] | None, decision: DecisionStory | None) -> Self:
        """Return the culprit of an event `failure`, with the evidence of its hang and the decision about its loss."""
        failure, hang = FailureRecord.from_json(event), hang or {}
        failed_at = event["time"] - failure.stall_s  # the detection, if the moment of the failure is not known
        noticed_at = failed_at + (failure.detect_s or 0.0)
        since = hang.get("since")
        return cls(
            worker=failure.worker,
            host=failure.host,
            since=since or failed_at,
            detected_after_s=failure.detect_s if since is None else noticed_at - since,
            cause=failure.cause,
            noticed_by=failure.noticed_by,
            doing=hang.get("doing"),
            place=hang.get("place"),
            process=hang.get("process"),
            evidence=f"incidents/{hang['file']}" if "file" in hang else None,
            speed=None if decision is None else decision.decided.corrections.slow.get(failure.worker),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One incident: the workers lost between two stretches of training, and what was done.

    Attributes:
        number: counted from 1 over the whole run.
        step: the step that was running.
        failed_messages: (reporter, peer, error) of messages that failed first.
        policy, action, resume_step, stall_s: of the recovery.
        cost_steps: of the incident, in steps; None if the interrupted step was never committed.
        decision: number of the decision about it, as in `chameleon explain`; None if there was none.
        outcome: measured results beside the predictions; likewise.
    """

    number: int
    step: int
    culprits: tuple[Culprit, ...]
    failed_messages: tuple[tuple[int, int | None, str], ...]
    policy: str
    action: str
    resume_step: int
    stall_s: float
    cost_steps: float | None
    decision: int | None
    outcome: OutcomeRecord | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "outcome": None if self.outcome is None else self.outcome.to_json()}


def diagnose(events: Sequence[Mapping[str, Any]]) -> tuple[Diagnosis, ...]:
    """Diagnose each incident from the events of a run, in their order.

    Raises ConfigError if a decision lacks a field: it was written by another version, or the file is damaged.
    """
    stories = decision_stories(events)
    found: list[Diagnosis] = []
    for incident in _incidents(events):
        first = FailureRecord.from_json(incident.failures[0])
        workers = [event["worker"] for event in incident.failures]
        lost = {(worker, first.generation) for worker in workers}
        story = next((s for s in stories if any((loss.worker, loss.generation) in lost for loss in s.losses)), None)
        costs = [e for e in events if e["event"] == "failure_cost" and first.generation in e["incident_generations"]]
        found.append(
            Diagnosis(
                number=len(found) + 1,
                step=first.step,
                culprits=tuple(
                    Culprit.of(event, incident.hangs.get(worker), story)
                    for worker, event in zip(workers, incident.failures, strict=True)
                ),
                failed_messages=tuple(
                    (report["reporter"], report["peer"], report["error"]) for report in incident.reports
                ),
                policy=first.policy,
                action=first.action,
                resume_step=first.resume_step,
                stall_s=max(event["stall_s"] for event in incident.failures),
                cost_steps=costs[-1]["failure_cost_steps"] if costs else None,
                decision=None if story is None else story.number,
                outcome=None if story is None else story.outcome,
            )
        )
    return tuple(found)


@dataclass(slots=True)
class _Incident:
    """The events of one incident, collected in their order."""

    failures: list[Mapping[str, Any]]
    hangs: dict[int, Mapping[str, Any]]
    reports: list[Mapping[str, Any]]


def _incidents(events: Iterable[Mapping[str, Any]]) -> list[_Incident]:
    """Group the failures by the generation with which training resumed, with the evidence and reports before them."""
    incidents: list[_Incident] = []
    hangs: dict[int, Mapping[str, Any]] = {}
    reports: list[Mapping[str, Any]] = []
    previous: Mapping[str, Any] = {}
    for event in events:
        match event["event"]:
            case "hang":
                # It may come after the failure's record.
                late = incidents and event["worker"] in [each["worker"] for each in incidents[-1].failures]
                is_late = late and event["worker"] not in incidents[-1].hangs and "message" in event
                (incidents[-1].hangs if is_late else hangs)[event["worker"]] = event
            case "messages_failed":
                reports += event["reports"]
            case "failure":
                if previous.get("event") != "failure" or previous["generation"] != event["generation"]:
                    incidents.append(_Incident([], hangs, reports))
                    hangs, reports = {}, []
                incidents[-1].failures.append(event)
        previous = event
    return incidents
