"""A run of `benchmarks.policies` beside the same failures in the simulator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks._policies_observed import Observed
from benchmarks._policies_scenarios import SCENARIOS
from chameleon_ft.config import PolicyName
from chameleon_ft.simulate import Parameters, simulate
from chameleon_ft.simulate.recorded import Change, RecordedRun, measured_parameters, recorded_run, trace_of_changes
from chameleon_ft.simulate.results import PolicyResult
from chameleon_ft.storage.files import RunDirectory

_EVERY_STEP: Final = 1e-6  # seconds between checkpoints: repeated work counts as trained, see `Clock`


@dataclass(frozen=True)
class Made:
    """A recorded run: its folder, scenario, policy and observations."""

    folder: Path
    scenario: str
    policy: str

    @cached_property
    def observed(self) -> Observed:
        return Observed.read(self.folder / self.scenario / f"{self.policy}.json")

    @property
    def run(self) -> RunDirectory:
        return RunDirectory.open(self.folder / self.scenario / self.observed.run)

    @cached_property
    def scale(self) -> float:
        """Seconds of the wall clock per second of the emulated devices."""
        return self.run.config().emulation.time_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A run and its simulation; samples per second and seconds are those of the emulated devices.

    Attributes:
        made: the run.
        simulated: simulation of its policy with its failures and returns.
        by_class: simulation with pipelines counted by class; None if not requested.
    """

    made: Made
    simulated: PolicyResult
    by_class: PolicyResult | None

    @property
    def real_per_s(self) -> float:
        return self.made.observed.samples_per_s * self.made.scale

    @property
    def simulated_per_s(self) -> float:
        return self.simulated.goodput * self.made.scale

    @property
    def error(self) -> float:
        return _error(self.simulated.goodput, self.made.observed.samples_per_s)

    @property
    def by_class_error(self) -> float | None:
        return None if self.by_class is None else _error(self.by_class.goodput, self.made.observed.samples_per_s)

    def row(self) -> tuple[str, ...]:
        observed, scale = self.made.observed, self.made.scale
        by_class = () if self.by_class_error is None else (f"{self.by_class_error:+.1%}",)
        return (
            self.made.scenario,
            self.made.policy + (", ended" if observed.ended else ""),
            f"{observed.lost}",
            f"{self.real_per_s:.1f}",
            f"{self.simulated_per_s:.1f}",
            f"{self.error:+.1%}",
            f"{observed.stall_s / scale:.2f}",
            f"{self.simulated.stall_s / scale:.2f}",
            f"{observed.others_share:.0%}",
            *by_class,
        )

    def to_json(self) -> dict[str, Any]:
        observed, scale = self.made.observed, self.made.scale
        return {
            "scenario": self.made.scenario,
            "policy": self.made.policy,
            "run": str(self.made.run.path),
            "lost": observed.lost,
            "ended": observed.ended,
            "real_per_s": self.real_per_s,
            "simulated_per_s": self.simulated_per_s,
            "error": self.error,
            "by_class_error": self.by_class_error,
            "real_stall_s": observed.stall_s / scale,
            "simulated_stall_s": self.simulated.stall_s / scale,
            "real_plans": [outage.policy for outage in observed.outages],
            "others_share": observed.others_share,
            "simulated_plans": [each.chosen for each in self.simulated.decisions],
        }


def made_in(folders: Iterable[Path]) -> list[Made]:
    """Return all runs in these folders, in the order of scenarios and policies."""
    return [
        Made(folder, scenario, policy)
        for folder in folders
        for scenario in SCENARIOS
        for policy in get_args(PolicyName)
        if (folder / scenario / f"{policy}.json").exists()
    ]


def constants(made: Made, runs: Sequence[Made]) -> Parameters:
    """Return what was measured in other scenarios, with the same policy if possible; see `measured_parameters`.

    Where there are none, the defaults of the simulator remain.
    """
    others = [other for other in runs if other.scenario != made.scenario]
    of_all = measured_parameters(other.run for other in others)
    return measured_parameters((other.run for other in others if other.policy == made.policy), of_all)


def replayed(made: Made, assumed: Parameters, *, by_class: bool) -> Replayed:
    """Simulate a run with its recorded failures and returns."""
    known = recorded_run(made.run, assumed)
    parameters = replace(known.parameters, checkpoint_write_s=0.0)
    if parameters.has_checkpoints:
        parameters = replace(parameters, checkpoint_interval_s=_EVERY_STEP)
    exact = replace(parameters, exact_up_to=made.observed.workers)
    return Replayed(
        made=made,
        simulated=_simulated(made, known, exact),
        by_class=_simulated(made, known, replace(parameters, exact_up_to=0)) if by_class else None,
    )


def _simulated(made: Made, known: RecordedRun, parameters: Parameters) -> PolicyResult:
    observed = made.observed
    trace = trace_of_changes(
        [Change(change.at_s, change.worker, is_lost=change.live < 0) for change in observed.changes],
        workers=observed.workers,
        duration_s=observed.duration_s,
        name=made.scenario,
    )
    results = simulate(
        trace,
        known.costs.workload,
        known.costs.cluster,
        [made.policy],
        parameters=parameters,
        start=known.start,
        as_in_run=True,
    )
    return results.policies[made.policy]


def mean_error(runs: Iterable[Replayed]) -> float:
    """Return the mean of the absolute errors."""
    return statistics.fmean(abs(each.error) for each in runs)


def _error(simulated: float, real: float) -> float:
    if real:
        return simulated / real - 1
    return 0.0 if not simulated else math.inf
