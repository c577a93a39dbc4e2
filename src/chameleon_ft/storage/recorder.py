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
from dataclasses import replace
from typing import Any, Final, TypeAlias

from chameleon_ft.clock import unix_s
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.base import Event
from chameleon_ft.events.decisions import PlanInForce
from chameleon_ft.events.kinds import Finished, RecordsLate, RecordsLost, RecordsWritten
from chameleon_ft.events.lines import Record, parse_event, parse_step
from chameleon_ft.events.records import RunStatus, StepRecord
from chameleon_ft.events.summary import Summary, summarize
from chameleon_ft.quantities import counted, duration
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.storage.file_queue import CaughtUp, FileQueue, Late
from chameleon_ft.storage.files import RunDirectory, readable_lines
from chameleon_ft.storage.plans import write_generation

_logger = logging.getLogger(__name__)

_CATCH_UP_S: Final = 10.0
_POLL_S: Final = 0.05
_SUMMARY_S: Final = 10.0
_NESTED: Final = (list, tuple, dict)

RecordLine: TypeAlias = tuple[str, Mapping[str, Any]]
"""A file of the run, "metrics" or "events", and the fields of a line in it."""


def line_of(record: Record) -> RecordLine:
    """Return the line of a record."""
    return "metrics" if isinstance(record, StepRecord) else "events", record.to_json()


class View:
    """Display of a run, which a Recorder calls from one thread; this base class displays nothing."""

    def show(self, record: Record) -> None:
        """Show a record that was written."""

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
        self._files = {"metrics": run.metrics_file, "events": run.events_file}
        config = run.config()
        self._batch, self._first_step = config.batch, config.forked.step

    def plan(self, spec: GenerationSpec) -> None:
        """Record a generation, and the policy that proposed it."""
        file = self.run.plan_file(spec.generation)
        self.files.submit(file, lambda: write_generation(spec, file))
        name = str(file.relative_to(self.run.path))
        self.record(PlanInForce(generation=spec.generation, policy=spec.policy, file=name))

    def record(self, record: Record) -> None:
        """Write a record, an event with the time of now, and show it."""
        if isinstance(record, Event):
            record = replace(record, time=self._clock())
        self._log(record)
        self._append(record)
        self._view.show(record)

    def complete(self, lines: Iterable[RecordLine]) -> None:
        """Write those of these lines that are missing; a coordinator may be lost before it has written all."""
        known = {name: [_without_time(line) for line in readable_lines(path)] for name, path in self._files.items()}
        for name, fields in lines:
            line = json.loads(json.dumps(dict(fields)))
            if _without_time(line) not in known[name]:
                written = line if name == "metrics" else {**line, "time": self._clock()}
                self.files.append(self._files[name], json.dumps(written) + "\n")

    def watch_files(self, unsaved: str = "") -> None:
        """Record once that records are late, and once that all have been written; call this now and then.

        Args:
            unsaved: since when no checkpoint is complete, which is said with it.
        """
        match self.files.news():
            case Late(path=path, reason=reason):
                message = f"{reason}, at {path}; training continues, and all is written as soon as that is possible"
                message += f"; {unsaved}" if unsaved else ""
                self.record(RecordsLate(file=str(path), reason=reason, message=message))
            case CaughtUp(late_s=late_s, dropped=dropped):
                lost = f"; {counted(dropped, 'line')} could not be kept and are lost" if dropped else ""
                message = f"all that was late is written, after {duration(late_s)}{lost}"
                self.record(RecordsWritten(late_s=late_s, dropped=dropped, message=message))

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
        end = Finished(time=self._clock(), status=status, reason=reason)
        self._log(end)
        self._append(end)
        late, lines = self.files.unwritten()
        steps, events = self._read(0.0 if late else _SUMMARY_S)
        # If nothing is late, all has been written when it is read.
        for path, line in lines if late else ():
            with suppress(ConfigError):
                if path == self.run.metrics_file:
                    steps.append(parse_step(line.encode()))
                elif path == self.run.events_file:
                    events.append(parse_event(line.encode()))
        summary = summarize(
            steps,
            events,
            samples_before=self._batch.samples_before,
            first_step=self._first_step,
            status=status,
            reason=reason,
        )
        self.files.submit(self.run.summary_file, lambda: self.run.write_summary(summary))
        self._view.finished(summary)
        if self.files.is_late:
            self._report_lost()
        return summary

    def _read(self, timeout_s: float) -> tuple[list[StepRecord], list[Event]]:
        """Read the steps and events from the files, after all that waits if that takes no longer than `timeout_s`."""
        with suppress(TimeoutError):
            return self.files.ask(self.run.events_file, lambda: _readable(self.run)).result(timeout_s)
        found: tuple[list[StepRecord], list[Event]] = ([], [])

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
        self._view.show(RecordsLost(message=message))

    def __exit__(self, *_: object) -> None:
        self.files.__exit__()
        self._view.close()

    def _log(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            figures = record.step, record.loss, record.step_s, record.workers
            _logger.debug("step %d: loss %.6g, %.3f s, %d workers", *figures)
        elif _logger.isEnabledFor(logging.INFO):
            scalars = (f"{key}={value}" for key, value in record.values().items() if not isinstance(value, _NESTED))
            _logger.info("%s: %s", record.name, ", ".join(scalars))

    def _append(self, record: Record) -> None:
        name, fields = line_of(record)
        self.files.append(self._files[name], json.dumps(fields) + "\n")


def _readable(run: RunDirectory) -> tuple[list[StepRecord], list[Event]]:
    return run.readable_steps()[0], run.readable_events()[0]


def _without_time(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "time"}
