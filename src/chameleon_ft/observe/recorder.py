"""The recorder, through which a run writes its records and displays them, and the interface of the display."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TextIO, TypeAlias

from chameleon_ft.observe.files import RunDirectory, open_for_appending, read_lines
from chameleon_ft.observe.plans import GenerationPlan
from chameleon_ft.observe.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OtherRecord,
    OutcomeRecord,
    RunInfo,
    RunRecord,
    RunStatus,
    StepRecord,
    Summary,
    summarize,
)

__all__ = ["RecordLine", "Recorder", "View", "line_of"]

_logger = logging.getLogger(__name__)

RecordLine: TypeAlias = tuple[str, Mapping[str, Any]]
"""A file of the run, "metrics" or "events", and the fields of a line in it but for the time of writing."""

_NAMES: Final[Mapping[type, str]] = {
    FailureRecord: "failure",
    FailureCostRecord: "failure_cost",
    JoinRecord: "join",
    OutcomeRecord: "outcome",
}


def line_of(record: RunRecord) -> RecordLine:
    """Return the line of a record."""
    if isinstance(record, StepRecord):
        return "metrics", record.to_json()
    name = record.event if isinstance(record, OtherRecord) else _NAMES[type(record)]
    return "events", {"event": name, **record.to_json()}


class View:
    """Display of a run, which a Recorder calls from one thread; this base class displays nothing."""

    def started(self, info: RunInfo) -> None:
        """Training starts or resumes."""

    def step(self, record: StepRecord) -> None:
        """A step is committed."""

    def failure(self, record: FailureRecord) -> None:
        """The recovery from the loss of a worker is complete."""

    def failure_cost(self, record: FailureCostRecord) -> None:
        """The step that a failure interrupted is committed."""

    def outcome(self, record: OutcomeRecord) -> None:
        """The outcome of a decision is measured."""

    def join(self, record: JoinRecord) -> None:
        """Training goes on with a plan for new workers, without drained ones, or otherwise better."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Another event."""

    def finished(self, summary: Summary) -> None:
        """The run has ended."""


class Recorder(AbstractContextManager["Recorder"]):
    """Appends records to the run directory and displays them in a view.

    Every line is flushed to the file system before the call returns, so a crash of this process loses none. `clock`
    returns Unix seconds.
    """

    def __init__(self, run: RunDirectory, view: View, *, clock: Callable[[], float] = time.time) -> None:
        self.run = run
        self._view = view
        self._clock = clock
        self._metrics = open_for_appending(run.metrics_file)
        self._events = open_for_appending(run.events_file)

    def started(self, info: RunInfo) -> None:
        """Record that all workers are connected and training starts or resumes."""
        self._write_event("started", info.to_json())
        self._view.started(info)

    def plan(self, plan: GenerationPlan, *, policy: str) -> None:
        """Record the orders of a generation, and the policy that proposed them."""
        file = self.run.plan_file(plan.generation)
        file.parent.mkdir(exist_ok=True)
        plan.write(file)
        self.event("plan", generation=plan.generation, policy=policy, file=str(file.relative_to(self.run.path)))

    def record(self, record: RunRecord) -> None:
        """Write a record and show it."""
        match record:
            case StepRecord():
                self.step(record)
            case FailureRecord():
                self.failure(record)
            case FailureCostRecord():
                self.failure_cost(record)
            case JoinRecord():
                self.join(record)
            case OutcomeRecord():
                self.outcome(record)
            case OtherRecord(event=event, fields=fields):
                self.event(event, **fields)

    def complete(self, lines: Iterable[RecordLine]) -> None:
        """Write those of these lines that are missing; a coordinator may be lost before it has written all."""
        files = {"metrics": (self.run.metrics_file, self._metrics), "events": (self.run.events_file, self._events)}
        known = {name: [_without_time(line) for line in read_lines(path)] for name, (path, _) in files.items()}
        for name, fields in lines:
            line = json.loads(json.dumps(dict(fields)))
            if _without_time(line) not in known[name]:
                _append(files[name][1], line if name == "metrics" else {"time": self._clock(), **line})

    def step(self, record: StepRecord) -> None:
        """Record a committed step."""
        _append(self._metrics, record.to_json())
        _logger.debug("step %d: loss %.6g, %.3f s, %d workers", record.step, record.loss, record.step_s, record.workers)
        self._view.step(record)

    def failure(self, record: FailureRecord) -> None:
        """Record a lost worker, after training has resumed without it or the run has ended."""
        self._write_event("failure", record.to_json())
        self._view.failure(record)

    def failure_cost(self, record: FailureCostRecord) -> None:
        """Record the cost of an incident."""
        self._write_event("failure_cost", record.to_json())
        self._view.failure_cost(record)

    def outcome(self, record: OutcomeRecord) -> None:
        """Record the outcome of a decision."""
        self._write_event("outcome", record.to_json())
        self._view.outcome(record)

    def join(self, record: JoinRecord) -> None:
        """Record a better plan, once training goes on with it."""
        self._write_event("join", record.to_json())
        self._view.join(record)

    def event(self, name: str, **fields: Any) -> None:
        """Record another event; `fields` are JSON values."""
        self._write_event(name, fields)
        self._view.event(name, fields)

    def finish(self, status: RunStatus, *, reason: str) -> Summary:
        """Write and display the summary, derived from the files, so that it covers a resumed run as a whole."""
        self._write_event("finished", {"status": status, "reason": reason})
        config = self.run.config()
        summary = summarize(
            self.run.steps(),
            self.run.failures(),
            self.run.outcomes(),
            samples_per_step=config.batch.samples,
            first_step=config.forked.step,
            status=status,
            reason=reason,
        )
        self.run.write_summary(summary)
        self._view.finished(summary)
        return summary

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._events.close()

    def _write_event(self, name: str, fields: Mapping[str, Any]) -> None:
        if _logger.isEnabledFor(logging.INFO):
            scalars = (f"{key}={value}" for key, value in fields.items() if not isinstance(value, list | dict))
            _logger.info("%s: %s", name, ", ".join(scalars))
        _append(self._events, {"time": self._clock(), "event": name, **fields})


def _without_time(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "time"}


def _append(file: TextIO, data: Mapping[str, Any]) -> None:
    file.write(json.dumps(data) + "\n")
    file.flush()
