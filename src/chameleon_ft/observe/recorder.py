"""The one place through which a run tells the outside what it does."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from chameleon_ft.observe.files import RunDirectory, open_for_appending
from chameleon_ft.observe.plans import GenerationPlan
from chameleon_ft.observe.records import (
    FailureRecord,
    JoinRecord,
    OutcomeRecord,
    RunStatus,
    StepRecord,
    Summary,
    summarize,
)
from chameleon_ft.observe.view import RunInfo, View

__all__ = ["Recorder"]

_logger = logging.getLogger(__name__)


class Recorder:
    """Appends records to the run directory and shows them in a view.

    Every line is on its way to the file system before the call returns: a crash of this process loses none. Use it as
    a context manager, or call `close`. `clock` gives Unix seconds.
    """

    def __init__(self, run: RunDirectory, view: View, *, clock: Callable[[], float] = time.time) -> None:
        self.run = run
        self._view = view
        self._clock = clock
        self._metrics = open_for_appending(run.metrics_file)
        self._events = open_for_appending(run.events_file)

    def started(self, info: RunInfo) -> None:
        """Record that the workers are together and training begins, or goes on, with `info`."""
        self._write_event("started", info.to_json())
        self._view.started(info)

    def plan(self, plan: GenerationPlan, *, policy: str) -> None:
        """Record what the workers were told to run, and which policy proposed it."""
        self.run.plans.mkdir(exist_ok=True)
        plan.write(self.run.plan_file(plan.generation))
        self.event(
            "plan",
            generation=plan.generation,
            policy=policy,
            file=str(self.run.plan_file(plan.generation).relative_to(self.run.path)),
        )

    def step(self, record: StepRecord) -> None:
        """Record a committed step."""
        _append(self._metrics, record.to_json())
        _logger.debug("step %d: loss %.6g, %.3f s, %d workers", record.step, record.loss, record.step_s, record.workers)
        self._view.step(record)

    def failure(self, record: FailureRecord) -> None:
        """Record a lost worker, once training goes on without it or the run ends."""
        self._write_event("failure", record.to_json())
        self._view.failure(record)

    def outcome(self, record: OutcomeRecord) -> None:
        """Record what came of a decision."""
        self._write_event("outcome", record.to_json())
        self._view.outcome(record)

    def join(self, record: JoinRecord) -> None:
        """Record a stop for workers that have come, once training goes on."""
        self._write_event("join", record.to_json())
        self._view.join(record)

    def event(self, name: str, **fields: Any) -> None:
        """Record anything else that happened; `fields` are JSON values."""
        self._write_event(name, fields)
        self._view.event(name, fields)

    def finish(self, status: RunStatus, *, reason: str) -> Summary:
        """Derive the summary from everything on disk, so that it covers a resumed run as a whole; write and show it."""
        self._write_event("finished", {"status": status, "reason": reason})
        summary = summarize(
            self.run.steps(),
            self.run.failures(),
            self.run.outcomes(),
            samples_per_step=self.run.config().batch.samples,
            status=status,
            reason=reason,
        )
        self.run.write_summary(summary)
        self._view.finished(summary)
        return summary

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._metrics.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write_event(self, name: str, fields: Mapping[str, Any]) -> None:
        if _logger.isEnabledFor(logging.INFO):
            scalars = (f"{key}={value}" for key, value in fields.items() if not isinstance(value, list | dict))
            _logger.info("%s: %s", name, ", ".join(scalars))
        _append(self._events, {"time": self._clock(), "event": name, **fields})


def _append(file: TextIO, data: Mapping[str, Any]) -> None:
    file.write(json.dumps(data) + "\n")
    file.flush()
