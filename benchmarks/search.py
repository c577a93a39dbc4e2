"""Does the search find the best plan, how fast, and how much does it prove? Its parts, all by default:

- suite: generated instances that allow a complete search, against one;
- times: the re-partition after a loss, as `find_plan` makes it by default, for models on up to 100,000 workers; and
  with the detours of the active plan as a candidate, their computation included;
- gaps: how far plans are above their certified bounds after losses of 1 to 8 workers;
- kept: the throughput after a loss, as a share of surviving capacity times failure-free throughput;
- planners: the step beside those of the published planners;
- layouts: drawn presets on 8 to 512 workers, half of them with little memory, beside the best symmetric layout.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks._common import Bar, Report, Spread, add_most_others, new_folder, report_arguments
from benchmarks._neighbours import Neighbours, progress
from benchmarks._search_cases import MODELS, PartReport, preset_costs, spread_losses
from benchmarks._search_kept import kept_throughput
from benchmarks._search_layouts import compared_layouts
from benchmarks._search_planners import compared_planners
from chameleon_ft.cluster import Cluster
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import FoundPlan, InfeasibleError, SearchResult, find_plan, reroute
from tests.search.instances import instance
from tests.search.oracle import Exhaustive

_PARTS: Final = ("suite", "times", "gaps", "kept", "planners", "layouts")
_MODEL: Final = "llama2-7b"
_EXACT: Final = 1e-9
_LIMITS_MS: Final = {32: 150.0, 1_000: 500.0, 10_000: 2_000.0, 100_000: 15_000.0}
_DETOUR_LIMITS_MS: Final = {32: 180.0, 1_000: 1_500.0}
_THREE_CLASSES: Final = (1.0, 0.8, 0.6)
_SYNC_WORDS: Final = {False: "gradient sync free", True: "with gradient sync"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One instance of the suite: the found and the best step in seconds; infinite if nothing fits."""

    seed: int
    workers: int
    kinds: int
    found_s: float
    min_s: float
    bound_s: float

    @property
    def equal(self) -> bool:
        return self.found_s == self.min_s or abs(self.found_s - self.min_s) <= _EXACT * self.min_s

    @property
    def bounded(self) -> bool:
        return self.bound_s <= self.min_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The survivors, and the active plan if its detours are a candidate."""

    name: str
    limit_ms: float
    costs: CostModel
    before: FoundPlan | None = None

    def ask(self) -> SearchResult:
        """Compute the detours, if requested, and search."""
        if self.before is None:
            return find_plan(self.costs)
        live = {worker.id for worker in self.costs.cluster.workers}
        lost = [worker for worker in self.before.plan.workers if worker not in live]
        rerouted = reroute(self.before.plan, lost, self.costs, in_flight_limits=self.before.in_flight_limits)
        return find_plan(self.costs, current=rerouted.placement, others={"reroute": rerouted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A question with repeated measurements."""

    question: Question
    spread: Spread
    result: SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps after losses that leave enough memory."""

    model: str
    workers: int
    gradients: bool
    gaps: tuple[float, ...]


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    neighbours = Neighbours(most=given.max_others)
    parts = [_part(part, given, folder, neighbours) for part in _PARTS if part in given.parts]
    report = Report(
        benchmark="search",
        columns=("question", "median (least to largest)", ""),
        rows=tuple(row for part in parts for row in part.rows),
        bars=tuple(bar for part in parts for bar in part.bars),
        results={key: value for part in parts for key, value in part.results.items()},
        neighbours=neighbours if "times" in given.parts else None,
    )
    return report.emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="search")
    add_most_others(parser)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure; all of it")
    parser.add_argument("--models", nargs="+", default=MODELS, help="presets, of gaps and planners")
    parser.add_argument("--instances", type=int, default=300, help="instances of the suite")
    parser.add_argument("--repeats", type=int, default=5, help="times that each question is asked")
    parser.add_argument("--largest", type=int, default=100_000, help="workers of the largest question")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1024], help="gaps: workers before the loss")
    parser.add_argument("--losses", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8], help="gaps: workers lost")
    parser.add_argument("--singles", type=int, default=32, help="kept: losses of one worker")
    parser.add_argument("--multiples", type=int, default=50, help="kept: losses of two to four")
    parser.add_argument("--seed", type=int, default=0, help="kept and layouts: what is drawn")
    parser.add_argument("--drawn", type=int, default=300, help="layouts: drawn presets")
    parser.add_argument("--generated", type=int, default=200, help="planners: generated instances")
    parser.add_argument(
        "--planner-sizes", type=int, nargs="+", default=[8, 16, 32], help="planners: workers before the loss"
    )
    parser.add_argument("--planner-losses", type=int, nargs="+", default=[1, 2, 3, 4], help="planners: workers lost")
    return parser.parse_args()


def _part(part: str, given: argparse.Namespace, folder: Path, neighbours: Neighbours) -> PartReport:
    match part:
        case "suite":
            return _suite(given.instances)
        case "times":
            return _times(given.largest, given.repeats, folder, neighbours)
        case "gaps":
            return _all_gaps(given.models, given.sizes, given.losses)
        case "kept":
            return kept_throughput(singles=given.singles, multiples=given.multiples, seed=given.seed)
        case "layouts":
            return compared_layouts(seed=given.seed, count=given.drawn)
        case _:
            return compared_planners(
                instances=given.generated, models=given.models, sizes=given.planner_sizes, losses=given.planner_losses
            )


def _suite(instances: int) -> PartReport:
    compared: list[Compared] = []
    for seed in range(instances):
        if seed % 50 == 0:
            progress(f"suite: instance {seed + 1} of {instances}")
        compared.append(_compare(seed, equal=seed % 3 == 0))
    return PartReport(
        rows=(),
        bars=(
            Bar(name="instances of the suite", value=len(compared), limit=300, at_least=True),
            Bar(name="instances not equal to trying everything", value=sum(not c.equal for c in compared), limit=0),
            Bar(name="instances with a bound above the best", value=sum(not c.bounded for c in compared), limit=0),
        ),
        results={"suite": [dataclasses.asdict(each) for each in compared]},
    )


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
    min_s = Exhaustive(costs).min_s()
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
        min_s=min_s,
        bound_s=bound_s,
    )
    if not (done.equal and done.bounded):
        progress(f"suite: {done}")
    return done


def _times(largest: int, repeats: int, folder: Path, neighbours: Neighbours) -> PartReport:
    timed = [
        neighbours.undisturbed(partial(_time, question, repeats), folder / "times") for question in _questions(largest)
    ]
    return PartReport(
        rows=tuple((f"{each.question.name}, ms", each.spread.shown(1), f"gap {each.result.gap:.2%}") for each in timed),
        bars=tuple(
            Bar(name=f"{each.question.name}, ms", value=each.spread.median, limit=each.question.limit_ms)
            for each in timed
        ),
        results={"times_ms": [_timed_json(each) for each in timed]},
    )


def _timed_json(timed: Timed) -> dict[str, Any]:
    result = timed.result
    return {
        "question": timed.question.name,
        "gap": result.gap,
        "best": result.best.name,
        "alternatives": [each.name for each in result.alternatives],
        "too_large": dict(result.too_large),
        **timed.spread.to_json(),
    }


def _questions(largest: int) -> Iterator[Question]:
    for workers, limit_ms in _LIMITS_MS.items():
        if workers <= largest:
            for gradients, words in _SYNC_WORDS.items():
                costs = preset_costs(_MODEL, workers, (7,), gradients=gradients)
                yield Question(name=f"{workers:,} workers, one lost, {words}", limit_ms=limit_ms, costs=costs)
    costs = preset_costs(_MODEL, 1_000, (7,), gradients=False)
    slowed = tuple(dataclasses.replace(worker, speed=_THREE_CLASSES[worker.id % 3]) for worker in costs.cluster.workers)
    cluster = Cluster(slowed, costs.cluster.intra_host, costs.cluster.inter_host)
    yield Question(name="1,000 workers, three speeds", limit_ms=1_000.0, costs=CostModel(costs.workload, cluster))
    for workers, limit_ms in _DETOUR_LIMITS_MS.items():
        for gradients, words in _SYNC_WORDS.items():
            yield _with_detours(workers, limit_ms, gradients=gradients, words=words)


def _with_detours(workers: int, limit_ms: float, *, gradients: bool, words: str) -> Question:
    """Lose one worker that has layers of the plan that the search finds for all."""
    before = find_plan(preset_costs(_MODEL, workers, gradients=gradients)).best
    lost = before.plan.workers[7]
    return Question(
        name=f"{workers:,} workers, one lost, detours too, {words}",
        limit_ms=limit_ms,
        costs=preset_costs(_MODEL, workers, (lost,), gradients=gradients),
        before=before,
    )


def _time(question: Question, repeats: int, _: Path) -> Timed:
    """Measure `count` times; nothing is written."""
    progress(f"times: {question.name}")
    times: list[float] = []
    for _repeat in range(repeats):
        start = time.perf_counter()
        result = question.ask()
        times.append((time.perf_counter() - start) * 1000)
    return Timed(question=question, spread=Spread(tuple(times)), result=result)


def _all_gaps(models: Sequence[str], sizes: Sequence[int], losses: Sequence[int]) -> PartReport:
    every = [
        _gaps(model, workers, losses, gradients=gradients)
        for gradients in (True, False)
        for model in models
        for workers in sizes
    ]
    rows: list[tuple[str, str, str]] = []
    bars: list[Bar] = []
    for gradients, words in _SYNC_WORDS.items():
        some = [each for each in every if each.gradients is gradients and each.gaps]
        gaps = [gap for each in some for gap in each.gaps]
        if gaps:
            rows += [(f"gap of {each.model} on {each.workers}, {words}", *_shown(each.gaps)) for each in some]
            rows.append((f"gap, {words}", *_shown(gaps)))
            if gradients:
                bars.append(Bar(name=f"median gap, {words}", value=statistics.median(gaps), limit=0.03))
    return PartReport(
        rows=tuple(rows), bars=tuple(bars), results={"gaps": [dataclasses.asdict(each) for each in every]}
    )


def _shown(gaps: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(gaps):.2%} ({min(gaps):.2%} to {max(gaps):.2%})", f"{len(gaps)} losses"


def _gaps(model: str, workers: int, losses: Sequence[int], *, gradients: bool) -> Gaps:
    progress(f"gaps: {model} on {workers}, {_SYNC_WORDS[gradients]}")
    found: list[float] = []
    for count in losses:
        try:
            found.append(
                find_plan(preset_costs(model, workers, spread_losses(workers, count), gradients=gradients)).gap
            )
        except InfeasibleError as error:
            progress(f"gaps: {model} on {workers - count}: {error}")
    return Gaps(model=model, workers=workers, gradients=gradients, gaps=tuple(found))


if __name__ == "__main__":
    raise SystemExit(main())
