"""Lines of a run's files, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chameleon_ft.config import RunConfig, TrainConfig
from chameleon_ft.events.lines import Record, parse_event, parse_step
from chameleon_ft.events.records import StepRecord
from chameleon_ft.storage.files import RunDirectory
from tests.report.records import failure_record, run_info

BEGAN = 1_000_000.0
"""When the run began, in Unix seconds."""
SLOW = {"since_step": 15, "step": 22, "before_step_s": 1.0, "step_s": 2.0}
"""Fields of an event about a slow worker or link, beside its speed."""


def new_run(folder: Path, **changes: Any) -> RunDirectory:
    """Make the directory of a run of 20 steps with four workers."""
    config: RunConfig = TrainConfig(workers=4, steps=20, **changes)
    return RunDirectory.create(folder / "run", config)


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    """An event, so many seconds after the beginning."""
    return {"time": BEGAN + at, "event": name, **fields}


def started(at: float = 0.0, *, steps: int = 20) -> dict[str, Any]:
    return event("started", at, **{**run_info().values(), "generation": 1, "steps": steps})


def stepped(step: int, at: float, *, step_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    """A committed step, so many seconds after the beginning."""
    values: dict[str, Any] = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "samples": 4, "tokens": 400, "workers": 4}
    record = StepRecord(step=step, step_s=step_s, generation=1, time=BEGAN + at, **{**values, **fields})
    return record.to_json()


def lost(worker: int, at: float, *, host: str = "b") -> dict[str, Any]:
    return event("lost", at, worker=worker, host=host, step=3, noticed_by="child", cause="SIGKILL")


def failed(worker: int, at: float, *, generation: int = 2, **fields: Any) -> dict[str, Any]:
    record = failure_record(3, worker=worker).values()
    return event("failure", at, **{**record, "generation": generation, **fields})


def read(line: dict[str, Any]) -> Record:
    """Return the record of a line."""
    content = json.dumps(line).encode()
    return parse_event(content) if "event" in line else parse_step(content)


def add(run: RunDirectory, *lines: dict[str, Any]) -> None:
    """Write lines as a run does."""
    for line in lines:
        file = run.events_file if "event" in line else run.metrics_file
        with file.open("a") as opened:
            opened.write(json.dumps(line) + "\n")
