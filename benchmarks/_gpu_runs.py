"""The parts of `benchmarks.gpu` that time steps, and those that lose a rank and move its layers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import _chameleon
from benchmarks._chameleon import event_lines
from benchmarks._common import Bar
from benchmarks._gpu_parts import Result, Subject
from benchmarks._gpu_train import (
    DEVIATION,
    WORKERS,
    command,
    deviation_bar,
    live,
    measured_profile,
    run_config,
    verify,
)
from benchmarks._neighbours import progress
from chameleon_ft.config import Failure, Parallel, Snapshots, Timelines, TrainConfig
from chameleon_ft.cost.step import StepEstimate, estimate_step
from chameleon_ft.launch.live_run import drain
from chameleon_ft.report.comparison import measured_steps
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.storage.profiles import costs_of_run, read_profile
from chameleon_ft.storage.timelines import read_recorded_steps

_BF16_DEVIATION: Final = 2e-3
_STEP_ERROR: Final = 0.1
LOST_IN_STEP: Final = 5
_SNAPSHOT_EVERY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The median step of a run without failures, the prediction for it by its profile, and its report.

    Attributes:
        parts: label of a moment of the step -> the seconds until then, in the median.
    """

    measured_s: float
    parts: Mapping[str, float]
    predicted: StepEstimate
    report: dict[str, Any]


def _timed(subject: Subject, name: str, config: TrainConfig) -> _Steps:
    folder = subject.folder / name
    profile = measured_profile(subject, config, folder)
    progress(f"{config.workers} ranks without failures")
    run = _chameleon.train(config, run=folder / "run", timeout_s=subject.timeout_s)
    report = json.loads(command("report", str(run.path), "--json", timeout_s=subject.timeout_s))["generations"][0]
    plans = read_generation_plans(run.plans)
    (planned,) = plans.values()
    found = measured_steps(plans, read_recorded_steps(run.timelines))[1:]
    costs = costs_of_run(config, read_profile(profile), dict.fromkeys(range(config.workers), ""))
    return _Steps(
        measured_s=statistics.median(step.step_s for step in found),
        parts={
            "until the last operation has ended": statistics.median(step.lane.program_s for step in found),
            "until all gradients are reduced": statistics.median(step.lane.step_s for step in found),
        },
        predicted=estimate_step(planned.plan, planned.program, costs),
        report=report,
    )


def alone(subject: Subject) -> Result:
    """Compare the steps of one rank, which has the device for itself, with the prediction by its profile."""
    config = run_config(subject, workers=1, parallel=Parallel(dp=1, pp=1), timelines=Timelines(every=1))
    found = _timed(subject, "alone", config)
    figures = {
        "by the profile": found.predicted.step_s,
        "by the run's own operations": found.report["predicted_step_s"],
    }
    return Result(
        columns=("step of one rank", "ms", "over measured"),
        rows=_over_measured(found, figures),
        bars=(
            Bar(
                name="|error| of the step by the profile",
                value=abs(found.predicted.step_s / found.measured_s - 1),
                limit=_STEP_ERROR,
            ),
        ),
        data={"measured_s": found.measured_s, "parts_s": found.parts, "predicted_s": figures, "report": found.report},
    )


def _over_measured(found: _Steps, predicted: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    figures = {"measured": found.measured_s, **found.parts, **predicted}
    return tuple((name, f"{1e3 * each:.1f}", f"{each / found.measured_s:.3f}") for name, each in figures.items())


def steps(subject: Subject) -> Result:
    """Compare the steps of a run without failures with three predictions."""
    found = _timed(subject, "steps", run_config(subject, timelines=Timelines(every=1)))
    figures = {
        "by the run's own operations": found.report["predicted_step_s"],
        "by the profile, each rank with a device of its own": found.predicted.step_s,
        "by the profile, all operations one after the other": sum(found.predicted.busy_s.values()),
    }
    return Result(
        columns=("step of four ranks", "ms", "over measured"),
        rows=_over_measured(found, figures),
        bars=(
            Bar(
                name="|error| of the step by the run's own operations",
                value=abs(found.report["predicted_step_s"] / found.measured_s - 1),
                limit=_STEP_ERROR,
            ),
        ),
        remarks=(
            "ranks that share a device take longer than one alone and less than all in turn, as far as one does not "
            "fill it; so only the first prediction has a bar",
        ),
        data={"measured_s": found.measured_s, "parts_s": found.parts, "predicted_s": figures, "report": found.report},
    )


def salvage(subject: Subject) -> Result:
    """Kill a rank in a backward: the step is completed, and all losses are those of the plain loop."""
    return completed(subject, "salvage", run_config(subject), limit=DEVIATION)


def in_bf16(subject: Subject) -> Result:
    """Do the same in bf16, with the optimizer's state shared by two owners."""
    shared = Parallel(dp=2, pp=2, optimizer_redundancy=2)
    config = run_config(subject, in_bf16=True, parallel=shared)
    return completed(subject, "in-bf16", config, limit=_BF16_DEVIATION)


_KILL: Final = Failure(worker=WORKERS - 1, step=LOST_IN_STEP, phase="backward")


def completed(subject: Subject, name: str, config: TrainConfig, *, limit: float, failure: Failure = _KILL) -> Result:
    """Lose a rank, by default in a backward, and compare the losses with those of the plain loop."""
    progress(f"four ranks, one of which is lost, in {config.precision}")
    run = _chameleon.train(config, run=subject.folder / name, failures=[failure], timeout_s=subject.timeout_s)
    (lost,) = run.failures()
    verified = verify(run, subject)
    return Result(
        columns=("lost", "stall, s", "repeated, s", "largest deviation of a loss"),
        rows=(
            (
                f"worker {lost.worker} in step {lost.step}",
                f"{lost.stall_s:.3f}",
                "-" if lost.repeated_s is None else f"{lost.repeated_s:.3f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            ),
        ),
        bars=(
            Bar(name="interrupted steps that were salvaged", value=float(lost.is_salvaged), limit=1.0, at_least=True),
            deviation_bar(verified, limit),
        ),
        data={"verified": verified, "stall_s": lost.stall_s, "is_salvaged": lost.is_salvaged},
    )


def snapshots(subject: Subject) -> Result:
    """Kill the only holder of some layers: the run goes back to a snapshot, and no loss changes."""
    progress("four ranks with snapshots, one of which is killed with its layers")
    failure = Failure(worker=1, step=2 * LOST_IN_STEP, phase="backward")
    parallel = Parallel(dp=1, pp=WORKERS)
    config = run_config(subject, parallel=parallel, snapshots=Snapshots(every=_SNAPSHOT_EVERY))
    run = _chameleon.train(config, run=subject.folder / "snapshots", failures=[failure], timeout_s=subject.timeout_s)
    (lost,) = run.failures()
    verified = verify(run, subject)
    repeated = lost.step - lost.resume_step
    return Result(
        columns=("killed", "source", "steps repeated", "stall, s", "transfer, s", "largest deviation of a loss"),
        rows=(
            (
                f"worker {lost.worker} in step {lost.step}",
                lost.policy,
                str(repeated),
                f"{lost.stall_s:.3f}",
                f"{lost.transfer_s:.3f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            ),
        ),
        bars=(
            Bar(name="returns to a snapshot", value=float(lost.policy == "snapshot"), limit=1.0, at_least=True),
            Bar(name="steps repeated", value=float(repeated), limit=float(_SNAPSHOT_EVERY)),
            deviation_bar(verified),
        ),
        data={"verified": verified, "stall_s": lost.stall_s, "transfer_s": lost.transfer_s},
    )


def migration(subject: Subject) -> Result:
    """Drain the only holder of some layers: they move while all ranks train, and no loss changes."""
    progress("four ranks, one of which is drained while its layers move")
    steps = 2 * subject.size.steps  # it is drained and its layers have moved long before the end
    config = run_config(subject, policy="chameleon", parallel=Parallel(dp=1, pp=WORKERS), steps=steps)
    path = subject.folder / "migration"
    with live(config, path, from_step=LOST_IN_STEP, timeout_s=subject.timeout_s) as run:
        drain(run, workers=[WORKERS - 1])
    joins = [event for event in event_lines(run) if event["event"] == "join" and event["drained"]]
    moved_bytes = sum(event["moved_bytes"] for event in joins)
    stopped_s = max((event["stop_s"] for event in joins), default=0.0)
    verified = verify(run, subject)
    return Result(
        columns=("drained", "bytes moved", "moved for, s", "stall at the switch, s", "largest deviation of a loss"),
        rows=tuple(
            (
                f"worker {event['drained'][0]} before step {event['resume_step']}",
                f"{event['moved_bytes']:,}",
                f"{event['migrate_s']:.3f}",
                f"{event['stall_s']:.3f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            )
            for event in joins
        ),
        bars=(
            Bar(name="bytes that moved while training", value=float(moved_bytes), limit=1.0, at_least=True),
            Bar(name="seconds for which workers stopped", value=stopped_s, limit=0.0),
            deviation_bar(verified),
        ),
        data={"verified": verified, "joins": joins},
    )
