"""How long does a decision take? 32 workers, 8 pipelines of 4 stages, Llama 2 7B, as in docs/policies.md.

Five parts; --parts picks some.

  single    one worker is lost and nothing is prepared: candidates are scored and the program is checked, as in a run
  two       two are lost at once, for which no decision is ever prepared
  prepared  one is lost after decisions were prepared, so that there is one to look up
  host      likewise, and a host is lost with all its workers
  run       32 emulated workers lose one, two at once, one, two and one: the time from the last answer of the survivors
            until all have their orders, as recorded by the run, with and without a prepared decision

In the first four, a decision is made in this process without sending orders; kernels are loaded before, as in a run. In
`run`, workers that have their orders begin at once, on the processors that the coordinator still needs for the others.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks._chameleon import event_lines
from benchmarks._common import ROOT, Bar, Report, Spread, add_most_others, new_folder, report_arguments
from benchmarks._neighbours import Neighbours, progress
from benchmarks._search_cases import DEVICE
from benchmarks._transitions import run_until
from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.config import STAND_IN_JOB, Batch, Checkpoint, Failure, Parallel, Recovery, RunConfig, Snapshots
from chameleon_ft.coordinator.decisions.decisions import DecisionCache
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.recovery import DecisionContext, FailureModel, decide, uniform_limits, warm_up
from chameleon_ft.schedule import CostModel, check_program

_PARTS: Final = ("single", "two", "prepared", "host", "run")
_PREPARED: Final = ("prepared", "host")
_WORDS: Final = {
    "single": "one worker lost, nothing prepared",
    "two": "two lost at once",
    "prepared": "one worker lost, looked up",
    "host": "a host of eight lost, looked up",
    "run": "in a run, nothing prepared",
    "run, prepared": "in a run, looked up",
}
_LIMITS_MS: Final = {
    "single": 60.0,
    "two": 60.0,
    "prepared": 5.0,
    "host": 5.0,
    "run": 10.0,
    "run, prepared": 5.0,
}
_RUNS: Final = 3
_KILLS: Final = ((10, (5,)), (20, (14, 27)), (30, (9,)), (40, (3, 22)), (50, (17,)))
"""(step, workers that are killed in it): far enough from each other that the next loss is prepared"""
_PIPELINES: Final = 8
_STAGES: Final = 4
_WORKERS: Final = _PIPELINES * _STAGES
_PER_HOST: Final = 8
_MICRO_BATCHES: Final = 128
_BETWEEN_HOSTS: Final = Link(latency_s=2e-5, bytes_per_s=12.5e9)
_POLICY: Final = "chameleon"
_POLL_S: Final = 0.05
_ALWAYS: Final = 1_000_000  # steps: a run is ended after its last decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Decisions of a part: milliseconds elapsed, and of processor time if they were made in this process."""

    part: str
    passed_ms: Spread
    processor_ms: Spread | None

    def to_json(self) -> dict[str, Any]:
        processor_ms = None if self.processor_ms is None else self.processor_ms.to_json()
        return {"passed_ms": self.passed_ms.to_json(), "processor_ms": processor_ms}


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    neighbours = Neighbours(most=given.max_others)
    warm_up()
    timed = [
        neighbours.undisturbed(partial(_time, part, given.repeats), folder / part)
        for part in _PARTS
        if part in given.parts and part != "run"
    ]
    if "run" in given.parts:
        timed += _in_runs(given, folder, neighbours)
    report = Report(
        benchmark="decision",
        columns=("decision", "number", "ms, median (least to largest)", "ms of processor time"),
        rows=tuple(
            (
                _WORDS[each.part],
                str(len(each.passed_ms.values)),
                each.passed_ms.shown(2),
                "" if each.processor_ms is None else each.processor_ms.shown(2),
            )
            for each in timed
        ),
        bars=tuple(
            Bar(name=f"{_WORDS[each.part]}, ms", value=each.passed_ms.median, limit=_LIMITS_MS[each.part])
            for each in timed
        ),
        results={each.part: each.to_json() for each in timed},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="decision")
    add_most_others(parser)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure; all of it")
    parser.add_argument("--repeats", type=int, default=21, help="decisions of each part but `run`")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    return parser.parse_args()


def losses_of(part: str, number: int) -> tuple[int, ...]:
    """Return the lost workers of the decision with this number."""
    if part == "host":
        first = _PER_HOST * number % _WORKERS
        return tuple(range(first, first + _PER_HOST))
    first = (5 * number + 1) % _WORKERS
    return (first, (first + 11) % _WORKERS) if part == "two" else (first,)


def context(lost: Sequence[int]) -> DecisionContext:
    """Return the context after the loss of these workers of a symmetric plan."""
    rates = device(DEVICE)
    workload = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=_MICRO_BATCHES)
    hosts = rates.cluster(_WORKERS, workers_per_host=_PER_HOST)
    plan = data_pipeline_plan(
        layer_costs=workload.layer_times_s,
        dp=_PIPELINES,
        pp=_STAGES,
        micro_batches=_MICRO_BATCHES,
        split_backward=True,
    )
    return DecisionContext(
        plan=plan,
        in_flight_limits=uniform_limits(plan.workers, _STAGES),
        costs=CostModel(workload, Cluster(hosts.workers, hosts.intra_host, _BETWEEN_HOSTS).without(lost)),
        phases=StallModel(detect_s=0.02, stop_s=0.03, decide_s=0.05, regroup_s=0.5),
        repeat_s=1.0,
        restart_cost_s=300.0,
    )


def rate(failures: int) -> FailureModel:
    """Return the failure model after `failures` failures."""
    return FailureModel(worker_mtbf_s=5000 * 3600.0, prior_failures=1, failures=failures)


def _time(part: str, repeats: int, _: Path) -> Timed:
    """Decide `count` times; nothing is written."""
    progress(_WORDS[part])
    decisions = asyncio.run(_looked_up(part, repeats)) if part in _PREPARED else _decided(part, repeats)
    passed_s, processor_s = zip(*decisions, strict=True)
    return Timed(
        part=part,
        passed_ms=Spread(tuple(1000 * each for each in passed_s)),
        processor_ms=Spread(tuple(1000 * each for each in processor_s)),
    )


def _in_runs(given: argparse.Namespace, folder: Path, neighbours: Neighbours) -> list[Timed]:
    """Return the times of decisions in runs of the real system."""
    config = RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=ROOT / "profiles" / "llama2-7b-h100-80g.json",
        workers=_WORKERS,
        steps=_ALWAYS,
        parallel=Parallel(dp=_PIPELINES, pp=_STAGES, optimizer_redundancy="all"),
        batch=Batch(micro_batches=_MICRO_BATCHES // 2, micro_batch_size=1),
        checkpoint=Checkpoint(every=0),
        snapshots=Snapshots(every=0),
        recovery=Recovery(policy=_POLICY),
        failures=tuple(
            Failure(step=step, worker=worker, phase="backward") for step, workers in _KILLS for worker in workers
        ),
    )
    found: dict[str, list[float]] = {}
    for number in range(_RUNS):
        progress(f"run {number + 1} of {_RUNS}")
        measure = partial(_decisions_of, config, given.timeout)
        for part, decide_ms in neighbours.undisturbed(measure, folder / f"run-{number}"):
            found.setdefault(part, []).append(decide_ms)
    return [Timed(part=part, passed_ms=Spread(tuple(each)), processor_ms=None) for part, each in sorted(found.items())]


def _decisions_of(config: RunConfig, timeout_s: float, path: Path) -> list[tuple[str, float]]:
    """Return the kind of each decision, and its milliseconds."""
    run = run_until(config, run=path, event="failure", count=len(_KILLS), timeout_s=timeout_s)
    decide_s = {record.generation: record.decide_s for record in run.failures()}
    return [
        ("run, prepared" if event["prepared"] else "run", 1000 * decide_s[event["generation"]])
        for event in event_lines(run)
        if event["event"] == "decision" and event["generation"] in decide_s
    ]


def _decided(part: str, repeats: int) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for number in range(repeats):
        lost = losses_of(part, number)
        now = context(lost)
        found.append(_seconds(partial(_decide_and_check, now, rate(len(lost)))))
    return found


def _decide_and_check(now: DecisionContext, failures: FailureModel) -> None:
    course = decide(now, _POLICY, failures).course
    assert course is not None
    check_program(course.program, course.plan)


async def _looked_up(part: str, repeats: int) -> list[tuple[float, float]]:
    """Return the arguments with which a coordinator prepares decisions, which it does in another process."""
    with ThreadPoolExecutor(1) as executor:
        forethought = DecisionCache(_POLICY, executor, prepared=lambda *_: None)
        forethought.expect(lambda: (context(()), rate(0)))
        after = [context(losses_of(part, number)) for number in range(repeats)]
        while not all(forethought.look_up(now, rate(1)) for now in after):
            await asyncio.sleep(_POLL_S)
        found = [_seconds(partial(forethought.look_up, now, rate(1))) for now in after]
        forethought.drop()
    return found


def _seconds(decide: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds elapsed, and of processor time."""
    began_s, processor_began_s = time.perf_counter(), time.process_time()
    decide()
    return time.perf_counter() - began_s, time.process_time() - processor_began_s


if __name__ == "__main__":
    raise SystemExit(main())
