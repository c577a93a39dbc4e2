"""Does a step take as long as predicted? Plans of many kinds on emulated devices, beside the wall clock.

Every plan is run by the real system: a process per worker, real messages and reductions, commits and records. Only
the devices and links are emulated: an operation lasts as long as the profile says. So the comparison covers what a
plan adds to the times of operations: waiting for other workers, messages and sync, and the overhead of the system,
which no prediction includes. Predicted is a step of the program, by the profile, before it ran; measured is the time
from one step to the next, vote and update included.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import _chameleon
from benchmarks._common import ROOT, Bar, Report, Spread, add_most_others, new_folder, report_arguments
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import STAND_IN_JOB, Batch, Checkpoint, Emulation, Parallel, RunConfig, Snapshots, Timelines
from chameleon_ft.cost.profile import Profile
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route, data_pipeline_plan
from chameleon_ft.recovery import reroute, uniform_limits
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.storage.profiles import costs_of_run, profile_of_run
from chameleon_ft.storage.timelines import read_recorded_steps

_PP = 4
_MEAN, _WORST = 0.015, 0.04


@dataclass(frozen=True, slots=True)
class Case:
    """One plan to run."""

    name: str
    workers: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result: seconds of a step."""

    case: Case
    predicted_s: float
    measured: Spread

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured.median - 1

    def row(self) -> tuple[str, ...]:
        return (
            str(self.case.workers),
            self.case.name,
            "split" if self.case.plan.split_backward else "fused",
            f"{self.predicted_s:.3f}",
            self.measured.shown(),
            f"{self.error:+.2%}",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": self.case.workers,
            "plan": self.case.name,
            "split_backward": self.case.plan.split_backward,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured.to_json(),
            "error": self.error,
        }


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    neighbours = Neighbours(most=given.max_others)
    outcomes = []
    for workers in given.workers:
        for case in cases(_config(given, workers)):
            progress(f"{workers} workers, {case.name}{', split backward' if case.plan.split_backward else ''}")
            name = f"{workers}-{case.name.replace(' ', '-').replace(',', '')}"
            name += "-split" if case.plan.split_backward else ""
            outcomes.append(neighbours.undisturbed(partial(_run, given, case), folder / name))
    errors = [abs(outcome.error) for outcome in outcomes]
    report = Report(
        benchmark="accuracy",
        columns=("workers", "plan", "backward", "predicted, s", "measured, s", "error"),
        rows=tuple(outcome.row() for outcome in outcomes),
        bars=(
            Bar(name="mean |error| of the step time", value=statistics.fmean(errors), limit=_MEAN),
            Bar(name="worst |error| of the step time", value=max(errors), limit=_WORST),
            Bar(name="plans", value=float(len(outcomes)), limit=24.0, at_least=True),
        ),
        results={"plans": [outcome.to_json() for outcome in outcomes], "emulated": True},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def cases(config: RunConfig) -> Iterator[Case]:
    """Yield plans of all kinds over the workers of `config`, fused and split in turn."""
    profile = profile_of_run(config)
    symmetric = {split: _symmetric(config, profile, split_backward=split) for split in (False, True)}
    yield Case("equal", config.workers, symmetric[False])
    yield Case("equal", config.workers, symmetric[True])
    yield Case("depths 3 and 5 among 4", config.workers, _unequal_depths(config, profile, split_backward=False))
    yield Case("depths 3 and 5 among 4", config.workers, _unequal_depths(config, profile, split_backward=True))
    yield Case("unequal layers", config.workers, _unequal_layers(config, len(profile.layers), split_backward=False))
    costs = costs_of_run(config, profile, dict.fromkeys(range(config.workers), ""))
    in_flight_limits = uniform_limits(range(config.workers), _PP)
    for number in range(1, 5):
        split = (number + config.workers // 8) % 2 == 0
        lost = _spread_losses(config.workers, number)
        plan = reroute(symmetric[split], lost, costs, in_flight_limits=in_flight_limits)
        yield Case(f"{number} lost, rerouted", config.workers, plan)


def _symmetric(config: RunConfig, profile: Profile, *, split_backward: bool) -> Plan:
    return data_pipeline_plan(
        layer_costs=profile.relative_costs,
        dp=config.workers // _PP,
        pp=_PP,
        micro_batches=config.batch.micro_batches,
        split_backward=split_backward,
    )


def _unequal_depths(config: RunConfig, profile: Profile, *, split_backward: bool) -> Plan:
    depths = [_PP - 1, _PP + 1, *[_PP] * (config.workers // _PP - 2)]
    parts = {depth: _pipeline(profile.relative_costs, depth) for depth in set(depths)}
    return _of_pipelines([parts[depth] for depth in depths], config.batch.micro_batches, split_backward=split_backward)


def _unequal_layers(config: RunConfig, layers: int, *, split_backward: bool) -> Plan:
    """Cut the layers into stages of a fifth, a fifth, two fifths and a fifth."""
    cuts = [0, layers // 5, 2 * layers // 5, 4 * layers // 5, layers]
    part = [LayerRange(start, stop) for start, stop in pairwise(cuts)]
    pipelines = [part] * (config.workers // _PP)
    return _of_pipelines(pipelines, config.batch.micro_batches, split_backward=split_backward)


def _pipeline(layer_costs: Sequence[float], depth: int) -> list[LayerRange]:
    plan = data_pipeline_plan(layer_costs=layer_costs, dp=1, pp=depth, micro_batches=1)
    return [hop.layers for hop in plan.routes[0].hops]


def _of_pipelines(pipelines: Sequence[Sequence[LayerRange]], micro_batches: int, *, split_backward: bool) -> Plan:
    """Return pipelines of these stages, over workers 0, 1, ..., that take micro-batches in turn."""
    chains: list[tuple[Hop, ...]] = []
    for stages in pipelines:
        first = sum(map(len, chains))
        chains.append(tuple(Hop(first + index, layers) for index, layers in enumerate(stages)))
    placement = Placement(chains[0][-1].layers.stop, {hop.worker: (hop.layers,) for chain in chains for hop in chain})
    routes = tuple(Route(number, chains[number % len(chains)]) for number in range(micro_batches))
    return Plan(placement, routes, split_backward)


def _spread_losses(workers: int, number: int) -> list[int]:
    """Return workers of different stages, and of different pipelines if there are enough."""
    return [(index % (workers // _PP)) * _PP + index % _PP for index in range(number)]


def _run(given: argparse.Namespace, case: Case, path: Path) -> Outcome:
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = path.with_name(f"{path.name}-plan.json")
    plan.write_text(case.plan.to_json(), encoding="utf-8")
    config = _config(given, case.workers).model_copy(update={"plan": plan})
    run = _chameleon.train(config, run=path, timeout_s=given.timeout)
    (planned,) = read_generation_plans(run.plans).values()
    predicted = estimate_step(planned.plan, planned.program, planned.costs)
    return Outcome(case=case, predicted_s=predicted.step_s, measured=_measured(run))


def _measured(run: RunDirectory) -> Spread:
    """Return the times between the first worker's starts of consecutive steps, without the first step."""
    starts: dict[int, float] = {}
    for recorded in read_recorded_steps(run.timelines):
        starts[recorded.step] = min(recorded.time, starts.get(recorded.step, recorded.time))
    times = [starts[step] for step in sorted(starts)]
    return Spread(tuple(after - before for before, after in pairwise(times[1:])))


def _config(given: argparse.Namespace, workers: int) -> RunConfig:
    return RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=given.profile.resolve(),
        workers=workers,
        steps=given.steps + 2,
        parallel=Parallel(dp=workers // _PP, pp=_PP, optimizer_redundancy="all"),
        batch=Batch(micro_batches=workers // _PP * given.share, micro_batch_size=1),
        checkpoint=Checkpoint(every=0),
        snapshots=Snapshots(every=0),
        emulation=Emulation(time_scale=given.time_scale),
        timelines=Timelines(every=1),
    )


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="accuracy")
    add_most_others(parser)
    parser.add_argument("--profile", type=Path, default=ROOT / "profiles" / "llama2-7b-h100-80g.json")
    parser.add_argument("--workers", type=int, nargs="+", default=(8, 16, 32), metavar="N", help="multiples of 4")
    parser.add_argument("--share", type=int, default=8, help="micro-batches of a pipeline")
    parser.add_argument("--steps", type=int, default=4, help="steps of each plan that count")
    parser.add_argument("--time-scale", type=float, default=4.0, help="seconds that a second of the profile takes")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    given = parser.parse_args()
    if wrong := [count for count in given.workers if count < 8 or count % _PP]:
        parser.error(f"--workers {wrong[0]}: should be a multiple of {_PP}, and at least 8")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
