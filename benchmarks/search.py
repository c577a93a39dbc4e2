"""Does the search find the best plan, how fast, and how much does it prove? Three parts:

- suite: generated instances on which everything can be tried, against a complete search;
- times: the re-partition after a loss, as `find_plan` makes it by default, for models on up to 100,000 workers;
- gaps: how far plans are above their certified bounds after losses of 1 to 8 workers.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks._common import Bar, Report, Spread, add_most_others, new_folder, report_arguments
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.cluster import Cluster
from chameleon_ft.presets import derive_workload, device, model_shape
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import InfeasibleError, SearchResult, find_plan
from tests.search.instances import instance
from tests.search.oracle import Exhaustive

_EXACT: Final = 1e-9
_MICRO_BATCHES_PER_WORKER: Final = 4
_LIMITS_MS: Final = {32: 20.0, 1_000: 100.0, 10_000: 1_000.0, 100_000: 10_000.0}
_THREE_CLASSES: Final = (1.0, 0.8, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One instance of the suite: what was found, what there is, in seconds; infinite where nothing fits."""

    seed: int
    workers: int
    kinds: int
    found_s: float
    least_s: float
    bound_s: float

    @property
    def equal(self) -> bool:
        return self.found_s == self.least_s or abs(self.found_s - self.least_s) <= _EXACT * self.least_s

    @property
    def bounded(self) -> bool:
        return self.bound_s <= self.least_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One question that was asked several times."""

    name: str
    limit_ms: float
    spread: Spread
    result: SearchResult


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    compared = [_compare(seed, equal=seed % 3 == 0) for seed in range(given.instances)]
    neighbours = Neighbours(most=given.most_others)
    timed = [
        neighbours.undisturbed(partial(_time, *question, given.repeats), folder / "times")
        for question in _questions(given.largest)
    ]
    gaps = {(model, workers): _gaps(model, workers, given.losses) for model in given.models for workers in given.sizes}
    return _report(compared, timed, gaps, neighbours).emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="search")
    add_most_others(parser)
    parser.add_argument("--instances", type=int, default=300, help="instances of the suite")
    parser.add_argument("--repeats", type=int, default=5, help="times that each question is asked")
    parser.add_argument("--largest", type=int, default=100_000, help="workers of the largest question")
    parser.add_argument("--losses", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8], help="workers lost")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1024], help="workers before the loss")
    parser.add_argument("--models", nargs="+", default=["llama2-7b", "llama2-13b", "qwen2.5-7b"], help="presets")
    return parser.parse_args()


def _compare(seed: int, *, equal: bool) -> Compared:
    rng = random.Random(seed)
    costs = instance(
        rng,
        workers=rng.randint(1, 24 if equal else 12),
        layers=rng.randint(1, 5 if equal else 4),
        micro_batches=rng.randint(1, 10 if equal else 5),
        kinds=1 if equal else rng.randint(2, 3),
        memory=rng.random() < 0.6,
    )
    least_s = Exhaustive(costs).least_s()
    try:
        found = find_plan(costs, effort=None)
        found_s, bound_s = found.best.step_s, found.bound_s
    except InfeasibleError:
        found_s = bound_s = math.inf
    done = Compared(
        seed=seed,
        workers=len(costs.cluster.workers),
        kinds=len({worker.speed for worker in costs.cluster.workers}),
        found_s=found_s,
        least_s=least_s,
        bound_s=bound_s,
    )
    if not (done.equal and done.bounded):
        progress(f"suite: {done}")
    return done


def _questions(largest: int) -> list[tuple[str, float, CostModel]]:
    questions = [
        (f"{workers:,} workers, one lost, {what}", limit_ms, _costs("llama2-7b", workers, (7,), gradients=gradients))
        for workers, limit_ms in _LIMITS_MS.items()
        if workers <= largest
        for what, gradients in (("gradient sync free", False), ("with gradient sync", True))
    ]
    costs = _costs("llama2-7b", 1_000, (7,), gradients=False)
    slowed = tuple(dataclasses.replace(worker, speed=_THREE_CLASSES[worker.id % 3]) for worker in costs.cluster.workers)
    cluster = Cluster(slowed, costs.cluster.intra_host, costs.cluster.inter_host)
    questions.append(("1,000 workers, three speeds", 1_000.0, CostModel(costs.workload, cluster)))
    return questions


def _time(name: str, limit_ms: float, costs: CostModel, repeats: int, _: Path) -> Timed:
    """Ask so many times; nothing is written."""
    progress(f"times: {name}")
    times: list[float] = []
    for _repeat in range(repeats):
        start = time.perf_counter()
        result = find_plan(costs)
        times.append((time.perf_counter() - start) * 1000)
    return Timed(name=name, limit_ms=limit_ms, spread=Spread(tuple(times)), result=result)


def _gaps(model: str, workers: int, losses: list[int]) -> list[float]:
    """Gaps after losses of the workers 0, w, 2 w, ...: spread over hosts and stages."""
    progress(f"gaps: {model} on {workers}")
    found: list[float] = []
    for count in losses:
        lost = tuple(range(0, workers, max(1, workers // count)))[:count]
        try:
            found.append(find_plan(_costs(model, workers, lost, gradients=False)).gap)
        except InfeasibleError as error:
            progress(f"gaps: {model} on {workers - count}: {error}")
    return found


def _costs(model: str, workers: int, lost: tuple[int, ...], *, gradients: bool) -> CostModel:
    rates = device("h100-80g")
    workload = derive_workload(
        model_shape(model), rates, micro_batch_size=1, micro_batches=_MICRO_BATCHES_PER_WORKER * workers
    )
    if not gradients:
        layers = tuple(dataclasses.replace(layer, gradient_bytes=0) for layer in workload.layers)
        workload = dataclasses.replace(workload, layers=layers)
    return CostModel(workload, rates.cluster(workers).without(lost))


def _report(
    compared: list[Compared], timed: list[Timed], gaps: dict[tuple[str, int], list[float]], neighbours: Neighbours
) -> Report:
    every = [gap for found in gaps.values() for gap in found]
    bars = [
        Bar(name="instances of the suite", value=len(compared), limit=300, at_least=True),
        Bar(name="instances not equal to trying everything", value=sum(not c.equal for c in compared), limit=0),
        Bar(name="instances with a bound above the best", value=sum(not c.bounded for c in compared), limit=0),
        *(Bar(name=f"{each.name}, ms", value=each.spread.median, limit=each.limit_ms) for each in timed),
    ]
    if every:
        bars.append(Bar(name="median gap, gradient sync free", value=statistics.median(every), limit=0.03))
    rows = [(each.name, each.spread.shown(1), f"{each.result.gap:.2%}") for each in timed]
    rows += [
        (f"{model} on {workers}, 1 to 8 lost", "", f"{statistics.median(found):.2%} (to {max(found):.2%})")
        for (model, workers), found in gaps.items()
        if found
    ]
    return Report(
        benchmark="search",
        columns=("question", "ms: median (least to largest)", "gap"),
        rows=tuple(rows),
        bars=tuple(bars),
        results={
            "suite": [dataclasses.asdict(each) for each in compared],
            "times_ms": [{"question": each.name, "gap": each.result.gap, **each.spread.to_json()} for each in timed],
            "gaps": [{"model": model, "workers": n, "gaps": found} for (model, n), found in gaps.items()],
        },
        neighbours=neighbours,
    )


if __name__ == "__main__":
    raise SystemExit(main())
