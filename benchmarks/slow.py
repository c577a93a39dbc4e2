"""Are slow workers noticed, and is the plan for them as good as if they had been known?

Detection: drawn cases of 32 workers of which none, one or two compute at 0.5 to 0.9 of their speed, constantly or at
times. Their operations have the noise of a recorded run: a short one of two workers, or --noise. No process is started
for a case: it is the detector alone.

  precision   share of the reports of slow workers that are right
  recall      share of the slow spells that are noticed within ten steps
  noticed     steps after the first slow one until a spell is noticed

Plans: drawn cases through the detector and the planner, without processes. Whenever the plan for the slow workers is in
force, the step that it takes by their true speeds is compared with that of the best plan known for these.

Throughput: runs of emulated workers (Llama 2 7B), of which one or two become slow. Measured is the median step once the
run has switched to its last plan, over that of a second run with the same slow workers, which begins with the best plan
that the search finds for the true speeds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks._common import (
    ROOT,
    Bar,
    Report,
    Spread,
    add_most_others,
    arguments,
    base_config,
    child,
    new_folder,
    run_child,
    write_config,
)
from benchmarks._live_run import Tail, end
from benchmarks._neighbours import Neighbours, progress
from benchmarks._slow_cases import Detection, draw_case, noise_of, observe
from benchmarks._slow_plans import Chosen, PlansOfSlowWorkers
from chameleon_ft.config import (
    STAND_IN_JOB,
    Batch,
    Emulation,
    Failure,
    Parallel,
    Recovery,
    RunConfig,
    Snapshots,
    Timelines,
)
from chameleon_ft.coordinator.decisions.calibration import Corrections
from chameleon_ft.coordinator.state.incidents import FailureHistory
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.search import find_plan
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.profiles import costs_of_run, read_profile

_PRECISION, _RECALL, _THROUGHPUT = 0.95, 0.95, 0.97
_NOISE_STEPS: Final = 150
_FIRST: Final = 12  # step in which workers become slow
_MEASURED: Final = 15  # steps whose median counts
_SETTLED: Final = 12  # steps without a change of plan before them
_ALWAYS: Final = 1_000_000
_POLL_S: Final = 0.05


def main() -> int:
    given = _arguments()
    neighbours = Neighbours(most=given.max_others)
    folder = new_folder(given.out)
    rng = random.Random(given.seed)
    noise = noise_of(RunDirectory.open(given.noise or _recorded(given, folder)))
    found = [observe(draw_case(rng, workers=32), noise, rng, workers=32) for _ in range(given.cases)]
    chosen: list[Chosen] = []
    if given.plans:
        planner = _planner(given)
        for number in range(given.plans):
            progress(f"plans of case {number + 1} of {given.plans}")
            chosen += planner.run(draw_case(rng, workers=given.workers), noise, rng)
    ratios = []
    for number in range(given.runs):
        progress(f"run {number + 1} of {given.runs}")
        speeds = {
            worker: round(rng.uniform(0.5, 0.9), 2) for worker in rng.sample(range(given.workers), 1 + number % 2)
        }
        after, best = (
            neighbours.undisturbed(
                partial(_step_s, _config(given, speeds, plan=plan), timeout_s=given.timeout),
                folder / f"run-{number}-{'found' if plan is None else 'best'}",
            )
            for plan in (None, _best_plan(given, speeds, folder / f"best-{number}.json"))
        )
        ratios.append({"speeds": speeds, "step_s": after, "best_step_s": best, "throughput": best / after})
    return _report(found, chosen, ratios, neighbours).emit(folder, as_json=given.json)


def _recorded(given: argparse.Namespace, folder: Path) -> Path:
    """Train on two workers, and return the run with the times of all operations."""
    config = base_config(
        given.config,
        stamped=False,
        workers=2,
        steps=_NOISE_STEPS,
        parallel=Parallel(dp=2, pp=1, optimizer_redundancy="all"),
        timelines=Timelines(every=1),
    )
    run, file = folder / "noise", write_config(config, folder / "noise.toml")
    command = [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run)]
    run_child(command, log=folder / "noise.log", timeout_s=given.timeout)
    return run


def _config(given: argparse.Namespace, speeds: dict[int, float], *, plan: Path | None) -> RunConfig:
    """Return the configuration of a run in which workers become slow; from the first step on if `plan` is given."""
    step = _FIRST if plan is None else 0
    return RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=given.profile,
        plan=plan,
        workers=given.workers,
        steps=_ALWAYS,
        parallel=Parallel(dp=given.workers // 4, pp=4, split_backward=True, optimizer_redundancy="all"),
        batch=Batch(micro_batches=4 * given.workers, micro_batch_size=1),
        snapshots=Snapshots(every=0),
        recovery=Recovery(policy="chameleon", worker_mtbf_hours=1e6, host_failure_fraction=0.0),
        emulation=Emulation(time_scale=given.time_scale),
        failures=tuple(
            Failure(step=step, worker=worker, kind="slow", factor=speed) for worker, speed in sorted(speeds.items())
        ),
    )


def _planner(given: argparse.Namespace) -> PlansOfSlowWorkers:
    config, profile = _config(given, {}, plan=None), read_profile(given.profile)
    plan = data_pipeline_plan(
        layer_costs=profile.relative_costs,
        dp=config.parallel.dp,
        pp=config.parallel.pp,
        micro_batches=config.batch.micro_batches,
        workers=range(given.workers),
        split_backward=config.parallel.split_backward,
    )
    costs = costs_of_run(config, profile, dict.fromkeys(range(given.workers), ""))
    return PlansOfSlowWorkers(costs, plan, FailureHistory.before(config.recovery).rate)


def _best_plan(given: argparse.Namespace, speeds: dict[int, float], file: Path) -> Path:
    """Write the fastest plan that the search finds for these speeds."""
    config = _config(given, {}, plan=None)
    costs = costs_of_run(config, read_profile(given.profile), dict.fromkeys(range(given.workers), ""))
    found = find_plan(Corrections(slow=speeds).applied(costs), min_holders=2)
    file.write_text(found.best.plan.to_json(), encoding="utf-8")
    return file


def _step_s(config: RunConfig, folder: Path, *, timeout_s: float) -> float:
    """Run until the plan for the slow workers has been in force for a while; return the median step since."""
    folder.mkdir(parents=True)
    run, file = RunDirectory(folder / "run"), write_config(config, folder / "config.toml")
    command = [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run.path)]
    with child(command, log=folder / "run.log") as process:
        rows: list[dict[str, Any]] = []
        tail, deadline = Tail(run.metrics_file), time.monotonic() + timeout_s
        while not _is_settled(rows):
            if time.monotonic() > deadline:
                raise SystemExit(f"no plan was in force for long enough within {timeout_s:g} s (--timeout)")
            time.sleep(_POLL_S)
            rows.extend(tail.new())
        end(process)
    return statistics.median(float(row["step_s"]) for row in rows[-_MEASURED:])


def _is_settled(rows: list[dict[str, Any]]) -> bool:
    generations = [row["generation"] for row in rows[-_SETTLED - _MEASURED :]]
    return len(rows) >= _FIRST + 2 * _SETTLED + _MEASURED and len(set(generations)) == 1


def _report(
    found: list[Detection], chosen: list[Chosen], ratios: list[dict[str, Any]], neighbours: Neighbours
) -> Report:
    rows: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    if found:
        reports, right = sum(each.reports for each in found), sum(each.right for each in found)
        spells, noticed = sum(each.spells for each in found), sum(each.noticed for each in found)
        precision, recall = right / max(1, reports), noticed / max(1, spells)
        delays = Spread(tuple(float(delay) for each in found for delay in each.delays))
        errors = Spread(tuple(abs(error) for each in found for error in each.errors))
        rows += [
            ("reports of slow workers", str(reports), f"precision {precision:.3f}"),
            ("slow spells", str(spells), f"recall {recall:.3f}"),
            ("steps until a spell is noticed", str(len(delays.values)), delays.shown(0)),
            ("error of the reported speed", str(len(errors.values)), errors.shown()),
        ]
        bars += [
            Bar(name="precision", value=precision, limit=_PRECISION, at_least=True),
            Bar(name="recall within ten steps", value=recall, limit=_RECALL, at_least=True),
        ]
    if chosen:
        of_steps = Spread(tuple(each.throughput for each in chosen for _ in range(each.steps)))
        rows.append(
            (
                "steps under a plan for slow workers: throughput over the best",
                f"{len(of_steps.values)}",
                of_steps.shown(),
            )
        )
        bars.append(
            Bar(name="throughput of the plan, least", value=min(of_steps.values), limit=_THROUGHPUT, at_least=True)
        )
    if ratios:
        throughput = Spread(tuple(each["throughput"] for each in ratios))
        rows.append(("throughput over that of the best plan", str(len(ratios)), throughput.shown()))
        bars.append(
            Bar(
                name="throughput over that of the best plan",
                value=throughput.median,
                limit=_THROUGHPUT,
                at_least=True,
            )
        )
    return Report(
        benchmark="slow",
        columns=("", "number", "median (least to largest)"),
        rows=tuple(rows),
        bars=tuple(bars),
        results={
            "detection": [repr(each) for each in found],
            "plans": [repr(each) for each in chosen],
            "throughput": ratios,
        },
        neighbours=neighbours if ratios else None,
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="slow")
    add_most_others(parser)
    parser.add_argument("--cases", type=int, default=100, help="drawn cases for the detector; 0: none")
    parser.add_argument("--noise", type=Path, help="run directory of a run with timelines.every = 1")
    parser.add_argument("--plans", type=int, default=40, help="drawn cases for detector and planner")
    parser.add_argument("--runs", type=int, default=6, help="pairs of runs; 0: the detector alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=32, help="a multiple of 4")
    parser.add_argument("--profile", type=Path, default=ROOT / "profiles" / "llama2-7b-h100-80g.json")
    parser.add_argument("--time-scale", type=float, default=2.0, help="seconds that a second of the profile takes")
    given = parser.parse_args()
    given.profile = given.profile.resolve()
    return given


if __name__ == "__main__":
    raise SystemExit(main())
