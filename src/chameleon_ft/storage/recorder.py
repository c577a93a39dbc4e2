"""The recorder, through which a run writes its records and displays them, and the interface of the display."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from chameleon_ft.clock import unix_s
from chameleon_ft.events.records import (
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
from chameleon_ft.quantities import counted, duration
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.storage.file_queue import CaughtUp, FileQueue, Late
from chameleon_ft.storage.files import RunDirectory, failures_in, outcomes_in, readable_lines
from chameleon_ft.storage.plans import write_generation
from chameleon_ft.storage.readable import readable_events, readable_steps

_logger = logging.getLogger(__name__)

_CATCH_UP_S: Final = 10.0
_POLL_S: Final = 0.05
_SUMMARY_S: Final = 10.0

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
        """Training continues with a better plan: with new workers, without drained ones, or for slow ones."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Another event."""

    def finished(self, summary: Summary) -> None:
        """The run has ended."""

    def close(self) -> None:
        """Wait until all is shown; nothing follows."""


class Recorder(AbstractContextManager["Recorder"]):
    """Appends records to the run directory and displays them in a view.

    While the disk is quick, every line is handed to the file system before the call returns, so a crash of this process
    loses none; see `FileQueue`, also for `may_write`. `clock` returns Unix seconds.

    Attributes:
        files: carries out all file operations of the run's coordinator in their order.
    """

    def __init__(
        self,
        run: RunDirectory,
        view: View,
        *,
        clock: Callable[[], float] = unix_s,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.run = run
        self._view = view
        self._clock = clock
        self.files = FileQueue(may_write=may_write)
        config = run.config()
        self._samples_per_step, self._first_step = config.batch.samples, config.forked.step

    def started(self, info: RunInfo) -> None:
        """Record that all workers are connected and training starts or resumes."""
        self._write_event("started", info.to_json())
        self._view.started(info)

    def plan(self, spec: GenerationSpec) -> None:
        """Record a generation, and the policy that proposed it."""
        file = self.run.plan_file(spec.generation)
        self.files.submit(file, lambda: write_generation(spec, file))
        self.event("plan", generation=spec.generation, policy=spec.policy, file=str(file.relative_to(self.run.path)))

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
        files = {"metrics": self.run.metrics_file, "events": self.run.events_file}
        known = {name: [_without_time(line) for line in readable_lines(path)] for name, path in files.items()}
        for name, fields in lines:
            line = json.loads(json.dumps(dict(fields)))
            if _without_time(line) not in known[name]:
                self._append(files[name], line if name == "metrics" else {"time": self._clock(), **line})

    def step(self, record: StepRecord) -> None:
        """Record a committed step."""
        self._append(self.run.metrics_file, record.to_json())
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
        """Record a better plan, once training continues with it."""
        self._write_event("join", record.to_json())
        self._view.join(record)

    def event(self, name: str, **fields: Any) -> None:
        """Record another event; `fields` are JSON values."""
        self._write_event(name, fields)
        self._view.event(name, fields)

    def watch_files(self, unsaved: str = "") -> None:
        """Record once that records are late, and once that all have been written; call this now and then.

        Args:
            unsaved: since when no checkpoint is complete, which is said with it.
        """
        match self.files.news():
            case Late(path=path, reason=reason):
                message = f"{reason}, at {path}; training continues, and all is written as soon as that is possible"
                message += f"; {unsaved}" if unsaved else ""
                self.event("records_late", file=str(path), reason=reason, message=message)
            case CaughtUp(late_s=late_s, dropped=dropped):
                lost = f"; {counted(dropped, 'line')} could not be kept and are lost" if dropped else ""
                message = f"all that was late is written, after {duration(late_s)}{lost}"
                self.event("records_written", late_s=late_s, dropped=dropped, message=message)

    async def catch_up(self) -> None:
        """Wait for records that are late, as long as the disk takes some of them now and then."""
        waiting, given_up_at_s = self.files.num_waiting, time.monotonic() + _CATCH_UP_S
        while self.files.num_waiting and time.monotonic() < given_up_at_s:
            await asyncio.sleep(_POLL_S)
            if self.files.num_waiting < waiting:
                waiting, given_up_at_s = self.files.num_waiting, time.monotonic() + _CATCH_UP_S
        self.watch_files()

    def finish(self, status: RunStatus, *, reason: str) -> Summary:
        """Write and display the summary, derived from the files, so that it covers a resumed run as a whole.

        If the files cannot be written, what they lack is in the summary too, and the display says what is missing.
        """
        self._write_event("finished", {"status": status, "reason": reason})
        late, lines = self.files.unwritten()
        steps, events = self._read(0.0 if late else _SUMMARY_S)
        # If nothing is late, all has been written when it is read.
        for path, line in lines if late else ():
            if path == self.run.metrics_file:
                steps.append(StepRecord.from_json(json.loads(line)))
            elif path == self.run.events_file:
                events.append(json.loads(line))
        summary = summarize(
            steps,
            failures_in(events),
            outcomes_in(events),
            samples_per_step=self._samples_per_step,
            first_step=self._first_step,
            status=status,
            reason=reason,
        )
        self.files.submit(self.run.summary_file, lambda: self.run.write_summary(summary))
        self._view.finished(summary)
        if self.files.is_late:
            self._report_lost()
        return summary

    def _read(self, timeout_s: float) -> tuple[list[StepRecord], list[dict[str, Any]]]:
        """Read the steps and events from the files, after all that waits if that takes no longer than `timeout_s`."""
        with suppress(TimeoutError):
            return self.files.ask(self.run.events_file, lambda: _readable(self.run)).result(timeout_s)
        found: tuple[list[StepRecord], list[dict[str, Any]]] = ([], [])

        def read() -> None:
            found[0][:], found[1][:] = _readable(self.run)

        # A full disk can be read. One that does not answer must not hold up the end of the run.
        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        reading.join(_SUMMARY_S)
        return found

    def _report_lost(self) -> None:
        late, lines = self.files.unwritten()
        counts = Counter(str(path) for path, _ in lines)
        missing = ", ".join(f"{counted(count, 'line')} of {path}" for path, count in counts.items())
        why = "the disk does not answer" if late is None else f"{late.reason}, at {late.path}"
        message = f"{why}; not written: {missing or self.run.summary_file}"
        self._view.event("records_lost", {"message": message})

    def __exit__(self, *_: object) -> None:
        self.files.__exit__()
        self._view.close()

    def _write_event(self, name: str, fields: Mapping[str, Any]) -> None:
        if _logger.isEnabledFor(logging.INFO):
            scalars = (f"{key}={value}" for key, value in fields.items() if not isinstance(value, list | dict))
            _logger.info("%s: %s", name, ", ".join(scalars))
        self._append(self.run.events_file, {"time": self._clock(), "event": name, **fields})

    def _append(self, file: Path, data: Mapping[str, Any]) -> None:
        self.files.append(file, json.dumps(data) + "\n")


def _readable(run: RunDirectory) -> tuple[list[StepRecord], list[dict[str, Any]]]:
    return readable_steps(run)[0], readable_events(run)[0]


def _without_time(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "time"}
