"""Runs of Chameleon for the benchmarks, started as by a user, and their recoveries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._common import run_child, write_config
from benchmarks._stamped_job import Stamp, read_stamps
from chameleon_ft.config import Failure, PolicyName, RunConfig
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.storage.files import FaultLog, RunDirectory, read_lines


def event_lines(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the events of a run as JSON values."""
    return list(read_lines(run.events_file))


def train(
    config: RunConfig,
    *,
    run: Path,
    failures: Sequence[Failure] = (),
    policy: PolicyName = "reroute",
    salvage: bool = True,
    timeout_s: float,
    command: Sequence[str] = ("train",),
) -> RunDirectory:
    """Run ``chameleon train``, or another command, to its end in the directory `run` and return it. Exits if it fails.

    Args:
        command: with its own flags.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    recovery = config.recovery.model_copy(update={"policy": policy, "salvage": salvage})
    config = config.model_copy(update={"failures": tuple(failures), "recovery": recovery})
    file = write_config(config, run.with_suffix(".toml"))
    started = [sys.executable, "-m", "chameleon_ft", *command, str(file), "--output-dir", str(run)]
    run_child(started, log=run.with_suffix(".log"), timeout_s=timeout_s)
    return RunDirectory.open(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure, by the records of the run and by the stamps of the model. Times are in seconds."""

    worker: int
    phase: str
    noticed_by: str
    detect_s: float
    stop_s: float
    decide_s: float
    regroup_s: float
    stall_s: float
    """From the failure to the first forward of layer 0 after the recovery, by the stamps."""
    reported_stall_s: float
    """From the failure to the first worker that was ready to run an operation, by the record of the run."""
    until_commit_s: float
    """From the failure to the first worker's update of the step with which training resumed."""
    lost_s: float
    """`until_commit_s` less one median step of the survivors."""
    step_before_s: float
    """Median step before the failure."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def recovery_of(run: RunDirectory, failure: Failure) -> Recovery:
    """Return the recovery of `run` from `failure`, its only one."""
    (record,) = run.failures()
    fault = FaultLog(run.faults_file).last(failure.worker)
    if fault is None or record.detect_s is None:
        raise SystemExit(f"{run.path}: the moment of the failure was not recorded")
    failed_at = float(fault["time"])
    stamps = read_stamps(run.path)
    resumed_at = _first_forward(stamps, after=failed_at + _until_decided(record))
    until_commit_s = _update_of(stamps, record.resume_step) - failed_at
    steps = run.steps()
    return Recovery(
        worker=failure.worker,
        phase=failure.phase,
        noticed_by=record.noticed_by,
        detect_s=record.detect_s or 0.0,
        stop_s=record.stop_s,
        decide_s=record.decide_s,
        regroup_s=record.regroup_s,
        stall_s=resumed_at - failed_at,
        reported_stall_s=record.stall_s,
        until_commit_s=until_commit_s,
        lost_s=until_commit_s - median(step.step_s for step in steps if step.step > record.resume_step),
        step_before_s=median(step.step_s for step in steps if step.step < record.step),
    )


def _until_decided(record: FailureRecord) -> float:
    # No survivor runs an operation of the old generation after all have stopped.
    return (record.detect_s or 0.0) + record.stop_s + record.decide_s


def _first_forward(stamps: Sequence[Stamp], *, after: float) -> float:
    return next(stamp.time for stamp in stamps if stamp.event == "forward" and stamp.time > after)


def _update_of(stamps: Sequence[Stamp], step: int) -> float:
    return next(stamp.time for stamp in stamps if stamp.event == "update" and stamp.step == step)
