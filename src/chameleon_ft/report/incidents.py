"""The incidents of a run: which worker failed, where, since when, why, and what was done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from chameleon_ft.events.base import Event
from chameleon_ft.events.kinds import FailedMessage, Hang, MessagesFailed
from chameleon_ft.events.records import FailureRecord, NoticedBy, OutcomeRecord
from chameleon_ft.report.decisions import Decisions, DecisionStory


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
    def of(cls, failure: FailureRecord, hang: Hang | None, decision: DecisionStory | None) -> Self:
        """Return the culprit of a failure, with the evidence of its hang and the decision about its loss."""
        # The detection, if the moment of the failure is not known.
        failed_at = failure.time - failure.stall_s
        noticed_at = failed_at + (failure.detect_s or 0.0)
        since = None if hang is None else hang.since
        return cls(
            worker=failure.worker,
            host=failure.host,
            since=since or failed_at,
            detected_after_s=failure.detect_s if since is None else noticed_at - since,
            cause=failure.cause,
            noticed_by=failure.noticed_by,
            doing=None if hang is None else hang.doing,
            place=None if hang is None else hang.place,
            process=None if hang is None else hang.process,
            evidence=None if hang is None else f"incidents/{hang.file}",
            speed=None if decision is None else decision.decided.corrections.slow.get(failure.worker),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One incident: the workers lost between two stretches of training, and what was done.

    Attributes:
        number: counted from 1 over the whole run.
        step: the step that was running.
        failed_messages: The reports of messages that failed first.
        policy, action, resume_step, stall_s: of the recovery.
        cost_steps: The cost of the incident in steps; None if the interrupted step was never committed.
        decision: number of the decision about it, as in `chameleon explain`; None if there was none.
        outcome: measured results beside the predictions; likewise.
    """

    number: int
    step: int
    culprits: tuple[Culprit, ...]
    failed_messages: tuple[FailedMessage, ...]
    policy: str
    action: str
    resume_step: int
    stall_s: float
    cost_steps: float | None
    decision: int | None
    outcome: OutcomeRecord | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        messages = [(each.reporter, each.peer, each.error) for each in self.failed_messages]
        outcome = None if self.outcome is None else self.outcome.values()
        return {**asdict(self), "failed_messages": messages, "outcome": outcome}


@dataclass(slots=True)
class _Incident:
    """The events of one incident, collected in their order."""

    failures: list[FailureRecord]
    hangs: dict[int, Hang]
    reports: list[FailedMessage]


class Incidents:
    """Collects what belongs to incidents, from the events of a run in their order.

    Failures that follow each other and resumed with the same generation are one incident; the evidence and the reports
    before them belong to it.
    """

    def __init__(self) -> None:
        self._incidents: list[_Incident] = []
        self._hangs: dict[int, Hang] = {}
        self._reports: list[FailedMessage] = []
        self._previous: Event | None = None

    def add(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Hang(worker=worker):
                last = self._incidents[-1] if self._incidents else None
                # It may come after the failure's record.
                is_late = (
                    last is not None
                    and worker in [each.worker for each in last.failures]
                    and worker not in last.hangs
                    and event.message is not None
                )
                (last.hangs if last is not None and is_late else self._hangs)[worker] = event
            case MessagesFailed(reports=reports):
                self._reports += reports
            case FailureRecord(generation=generation):
                before = self._previous
                if isinstance(before, FailureRecord) and before.generation == generation:
                    self._incidents[-1].failures.append(event)
                else:
                    self._incidents.append(_Incident([event], self._hangs, self._reports))
                    self._hangs, self._reports = {}, []
        self._previous = event

    def diagnoses(self, decisions: Decisions) -> tuple[Diagnosis, ...]:
        """Return the incidents in their order, each with the decision about it."""
        stories = decisions.stories()
        found: list[Diagnosis] = []
        for number, incident in enumerate(self._incidents, start=1):
            first = incident.failures[0]
            lost = {(each.worker, first.generation) for each in incident.failures}
            story = next((s for s in stories if any((loss.worker, loss.generation) in lost for loss in s.losses)), None)
            found.append(
                Diagnosis(
                    number=number,
                    step=first.step,
                    culprits=tuple(
                        Culprit.of(each, incident.hangs.get(each.worker), story) for each in incident.failures
                    ),
                    failed_messages=tuple(incident.reports),
                    policy=first.policy,
                    action=first.action,
                    resume_step=first.resume_step,
                    stall_s=max(each.stall_s for each in incident.failures),
                    cost_steps=decisions.cost_steps(first.generation),
                    decision=None if story is None else story.number,
                    outcome=None if story is None else story.outcome,
                )
            )
        return tuple(found)
