"""Part `layouts` of `benchmarks.search`: presets beside the best symmetric layout with any recomputation.

A symmetric layout is DP x PP with equal stages, 1F1B limits, split backward, and recomputation in its first stages: the
layout that an engineer would write by hand.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks._common import Bar
from benchmarks._neighbours import progress
from benchmarks._search_cases import PartReport
from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import DEVICES, MODELS, device, model_shape
from chameleon_ft.cost.step import estimate_parts
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.layouts import split_layers
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.workload import is_recomputed

_WORKERS: Final = (8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 512)
_SHARES: Final = (1, 2, 3, 4, 6, 8)
# Links between hosts, bytes per second: 100 Gbit/s, 400 Gbit/s, and the preset's own.
_LINKS: Final = (12.5e9, 50e9, None)
# A step with more operations than this is not scheduled for the comparison.
_MAX_OPERATIONS: Final = 400_000


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A drawn preset on a cluster; `tight` if the state of the model takes most of the memory."""

    name: str
    costs: CostModel
    tight: bool


@dataclass(frozen=True, slots=True)
class Symmetric:
    """The best symmetric layout of a case."""

    step_s: float
    dp: int
    pp: int
    recomputing: int


@dataclass(frozen=True, slots=True)
class Compared:
    """Step times of the plan found for a case and of its best symmetric layout, in seconds; infinite without one."""

    name: str
    tight: bool
    found_s: float
    bound_s: float
    symmetric_s: float
    search_s: float


def compared_layouts(*, seed: int, count: int) -> PartReport:
    """Measure drawn cases, each beside its best symmetric layout."""
    compared: list[Compared] = []
    for number, case in enumerate(layout_cases(seed, count)):
        progress(f"layouts: {number + 1} of {count}, {case.name}")
        symmetric = best_symmetric(case.costs)
        start = time.process_time()
        try:
            found = find_plan(case.costs)
            found_s, bound_s = found.best.step_s, found.bound_s
        except InfeasibleError:
            found_s = bound_s = math.inf
        search_s = time.process_time() - start
        symmetric_s = math.inf if symmetric is None else symmetric.step_s
        compared.append(Compared(case.name, case.tight, found_s, bound_s, symmetric_s, search_s))
    ratios = sorted(each.found_s / each.symmetric_s for each in compared if each.symmetric_s < math.inf)
    gaps = {
        tight: [each.found_s / each.bound_s - 1 for each in compared if each.tight is tight and each.bound_s < math.inf]
        for tight in (False, True)
    }
    seconds = [each.search_s for each in compared]
    return PartReport(
        rows=(
            ("step by that of the best symmetric layout", _shown(ratios, "{:.3f}"), f"{len(ratios)} cases"),
            ("gap without tight memory", _shown(gaps[False], "{:.1%}"), f"{len(gaps[False])} cases"),
            ("gap with tight memory", _shown(gaps[True], "{:.1%}"), f"{len(gaps[True])} cases"),
            ("processor seconds of a search", _shown(seconds, "{:.2f}"), ""),
        ),
        bars=(
            Bar(name="median step by symmetric", value=statistics.median(ratios), limit=0.97),
            Bar(name="worst step by symmetric", value=ratios[-1], limit=1.005),
            Bar(
                name="symmetric layouts below the bound",
                value=sum(each.symmetric_s < each.bound_s * (1 - 1e-9) for each in compared if each.bound_s < math.inf),
                limit=0,
            ),
            Bar(
                name="cases that only the symmetric layout fits",
                value=sum(each.symmetric_s < math.inf == each.found_s for each in compared),
                limit=0,
            ),
            *(
                Bar(name=f"median gap, {words}", value=statistics.median(gaps[tight]), limit=limit)
                for tight, words, limit in ((False, "memory to spare", 0.03), (True, "tight memory", 0.06))
                if gaps[tight]
            ),
        ),
        results={"layouts": [dataclasses.asdict(each) for each in compared]},
    )


def _shown(values: Sequence[float], form: str) -> str:
    if not values:
        return "none"
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def layout_cases(seed: int, count: int) -> Iterator[LayoutCase]:
    """Yield presets on 8 to 512 workers with 1 to 8 micro-batches per worker; every other one has little memory."""
    rng = random.Random(seed)
    number = 0
    while number < count:
        model, name = rng.choice(sorted(MODELS)), rng.choice(sorted(DEVICES))
        if model == "llama3-405b":
            continue
        rates, workers = device(name), rng.choice(_WORKERS)
        micro_batches = max(1, workers * rng.choice(_SHARES))
        workload = derive_workload(model_shape(model), rates, micro_batch_size=1, micro_batches=micro_batches)
        state = sum(layer.param_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in workload.layers)
        most = rates.memory_bytes
        # Half of them have to recompute: the state of the model takes most of the memory of a few pipelines.
        tight = state > 0.45 * workers * most
        if tight != bool(number % 2) or state > 0.93 * workers * most:
            continue
        cluster = rates.cluster(workers, workers_per_host=rng.choice((4, 8, 8)))
        link = rng.choice(_LINKS)
        if link is not None:
            cluster = Cluster(cluster.workers, cluster.intra_host, Link(cluster.inter_host.latency_s, link))
        number += 1
        yield LayoutCase(f"{model} {name} {workers} x {micro_batches}", CostModel(workload, cluster), tight)


def best_symmetric(costs: CostModel) -> Symmetric | None:
    """Return the fastest fitting DP x PP with split backward and fewest recomputing first stages, or None."""
    workers, layers = len(costs.cluster.workers), len(costs.workload.layers)
    best: Symmetric | None = None
    for pp in range(1, min(workers, layers) + 1):
        for dp in sorted({workers // pp, _divisor(costs.workload.micro_batches, workers // pp)}):
            if dp * pp < workers * 0.8 or dp > costs.workload.micro_batches:
                continue
            if 3 * pp * costs.workload.micro_batches / dp > _MAX_OPERATIONS:
                continue
            found = _fewest_recomputing(costs, dp, pp, math.inf if best is None else best.step_s)
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found
    return best


def _divisor(number: int, most: int) -> int:
    return max(own for own in range(1, most + 1) if number % own == 0)


def _fewest_recomputing(costs: CostModel, dp: int, pp: int, best_s: float) -> Symmetric | None:
    """Find by bisection how many first stages have to recompute; the more, the less memory is needed."""
    weights = [layer.forward_s + layer.min_backward_s for layer in costs.workload.layers]
    ranges = split_layers(weights, pp)
    slowest_s = max(sum(weights[layer] for layer in own) for own in ranges)
    if slowest_s * -(-costs.workload.micro_batches // dp) >= best_s:
        return None

    def step_s(recomputing: int) -> float:
        return min(_placed_s(costs, ranges, dp, recomputing, by_stage=by_stage) for by_stage in (False, True))

    fewest = bisect_left(range(pp + 1), True, key=lambda recomputing: step_s(recomputing) < math.inf)
    return Symmetric(step_s(fewest), dp, pp, fewest) if fewest <= pp else None


def _placed_s(costs: CostModel, ranges: tuple[LayerRange, ...], dp: int, recomputing: int, *, by_stage: bool) -> float:
    """Return the layout with neighbours of a pipeline, or holders of a stage, on neighbouring workers."""
    pp, workload = len(ranges), costs.workload
    ids = np.array([worker.id for worker in costs.cluster.workers][: dp * pp])
    grid = ids.reshape(pp, dp).T if by_stage else ids.reshape(dp, pp)
    pipelines = [tuple(map(Hop, own, ranges)) for own in grid.tolist()]
    routes = [Route(number, pipelines[number % dp]) for number in range(workload.micro_batches)]
    recompute = {
        hop.worker: RecomputedLayers.in_full(hop.layers)
        for hops in pipelines
        for hop in hops[:recomputing]
        if any(is_recomputed(layer, len(workload.layers)) for layer in hop.layers)
    }
    held = {hop.worker: (hop.layers,) for hops in pipelines for hop in hops}
    plan = Plan(Placement(len(workload.layers), held), tuple(routes), True, FrozenMap(recompute))
    in_flight_limits = {
        hop.worker: InFlightLimit(pp - place, pp - place) for hops in pipelines for place, hop in enumerate(hops)
    }
    estimate = estimate_parts(plan, best_parts(plan, costs, in_flight_limits=in_flight_limits, effort=0), costs)
    return math.inf if estimate.over_capacity(costs) else estimate.step_s
