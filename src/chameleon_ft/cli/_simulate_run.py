"""A run as what `chameleon simulate --run` simulates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory
from chameleon_ft.plan import Plan
from chameleon_ft.simulate import Parameters
from chameleon_ft.simulate.recorded import (
    measured_parameters,
    recorded_changes,
    recorded_copies_s,
    recorded_run,
    trace_of_changes,
)
from chameleon_ft.simulate.sweep import Scene

__all__ = ["RunCase", "run_case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCase:
    """What happened in a run, to be lived through by all policies.

    Attributes:
        scene: its losses and returns, its workload and its cluster.
        start: the plan that it began with.
        parameters: what it knew of failures and checkpoints, and what these and its stalls took.
        timed_checkpoints: how many of its checkpoints say for how long training stood still.
        policy: that it had.
        samples_per_s: samples that it trained and that count, by all its time.
    """

    scene: Scene
    start: Plan
    parameters: Parameters
    timed_checkpoints: int
    policy: str
    samples_per_s: float


def run_case(path: Path) -> RunCase:
    """Read a run.

    Raises ConfigError where the directory is no run, or its records do not say enough.
    """
    run = RunDirectory.open(path)
    known = recorded_run(run, measured_parameters([run]))
    changes, duration_s = recorded_changes(run)
    samples = sum({step.step: step.samples for step in run.steps()}.values())
    if not samples:
        raise ConfigError(f"--run {path}: no step was committed; give a run that has trained")
    trace = trace_of_changes(
        changes, workers=len(known.costs.cluster.workers), duration_s=duration_s, name=f"the run {path.name}"
    )
    return RunCase(
        scene=Scene(trace, known.costs.workload, known.costs.cluster),
        start=known.start,
        parameters=known.parameters,
        timed_checkpoints=len(recorded_copies_s(run)),
        policy=known.policy,
        samples_per_s=samples / duration_s,
    )
