"""Throughput after a loss, for layouts of which every worker could hold any part: part `kept` of the search.

The layout before the loss and the plan after it each count with their best program, in the better backward mode. Memory
is unlimited. 1 is failure-free throughput times surviving capacity; the ratio exceeds 1 where the search finds better
pipelines than those of the layout.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks._common import Bar, Spread
from benchmarks._neighbours import progress
from benchmarks._search_cases import DEVICE, PartReport
from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.schedule import CostModel, Program, best_program, list_schedule
from chameleon_ft.search import FoundPlan, find_plan, reroute

_MODEL: Final = "llama2-7b"
_DP: Final = 8
_PP: Final = 4
_WORKERS: Final = _DP * _PP
_MICRO_BATCHES: Final = 128
_FEWEST_LOST: Final = 2
_MAX_LOST: Final = 4
_PROGRESS_EVERY: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A loss, and the plan that was found for the survivors."""

    lost: tuple[int, ...]
    workers: int
    """Layout before the loss."""
    failure_free_s: float
    found: FoundPlan

    @property
    def share(self) -> float:
        """Throughput after the loss / (surviving capacity * failure-free throughput)."""
        return self.of(self.failure_free_s)

    def of(self, failure_free_s: float) -> float:
        """Return `kept` relative to another failure-free step."""
        return failure_free_s / self.found.step_s / (1 - len(self.lost) / self.workers)

    def to_json(self) -> dict[str, Any]:
        return {"lost": self.lost, "plan": self.found.name, "step_s": self.found.step_s, "kept": self.share}


def kept_throughput(*, singles: int, multiples: int, seed: int) -> PartReport:
    """Measure `count` single losses, from worker 0 on, and as many seeded losses of two to four workers."""
    costs = _costs()
    plan, failure_free_s = _whole_layout(costs)
    fused = _layout(costs, split_backward=False)
    one_f_one_b_s = _step_s(fused, list_schedule(fused, costs), costs)
    best_of_all_s = find_plan(costs).best.step_s
    losses = [*((worker,) for worker in range(min(singles, _WORKERS))), *_multiples(multiples, seed)]
    kept: list[Kept] = []
    for number, lost in enumerate(losses):
        if number % _PROGRESS_EVERY == 0:
            progress(f"kept: loss {number + 1} of {len(losses)}")
        kept.append(_after(lost, plan, failure_free_s, costs))
    mean = statistics.mean(each.share for each in kept)
    bars = [Bar(name="kept throughput, mean", value=mean, limit=0.97, at_least=True)]
    single = [each for each in kept if len(each.lost) == 1]
    if single:
        least = min(one_f_one_b_s / each.found.step_s for each in single)
        bars.append(Bar(name="one lost, of 1F1B without a loss, least", value=least, limit=1.0, at_least=True))
    return PartReport(
        rows=_rows(single, [each for each in kept if len(each.lost) > 1], best_of_all_s),
        bars=tuple(bars),
        results={
            "kept": {
                "failure_free_s": failure_free_s,
                "one_f_one_b_s": one_f_one_b_s,
                "best_of_all_workers_s": best_of_all_s,
                "losses": [each.to_json() for each in kept],
            }
        },
    )


def _costs() -> CostModel:
    rates = device(DEVICE)
    workload = derive_workload(model_shape(_MODEL), rates, micro_batch_size=1, micro_batches=_MICRO_BATCHES)
    limited = rates.cluster(_WORKERS, workers_per_host=8)
    unlimited = tuple(dataclasses.replace(worker, memory_bytes=None) for worker in limited.workers)
    return CostModel(workload, Cluster(unlimited, limited.intra_host, limited.inter_host))


def _layout(costs: CostModel, *, split_backward: bool) -> Plan:
    return data_pipeline_plan(
        layer_costs=costs.workload.layer_times_s,
        dp=_DP,
        pp=_PP,
        micro_batches=_MICRO_BATCHES,
        split_backward=split_backward,
    )


def _whole_layout(costs: CostModel) -> tuple[Plan, float]:
    """Return the layout in the faster backward mode, and its step time."""
    plans = [_layout(costs, split_backward=split) for split in (True, False)]
    timed = [(_step_s(plan, best_program(plan, costs).program, costs), plan) for plan in plans]
    step_s, plan = min(timed, key=lambda each: each[0])
    return plan, step_s


def _step_s(plan: Plan, program: Program, costs: CostModel) -> float:
    return estimate_step(plan, program, costs).step_s


def _multiples(count: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(sorted(rng.sample(range(_WORKERS), rng.randint(_FEWEST_LOST, _MAX_LOST)))) for _ in range(count)]


def _after(lost: tuple[int, ...], plan: Plan, failure_free_s: float, costs: CostModel) -> Kept:
    left = CostModel(costs.workload, costs.cluster.without(lost))
    rerouted = reroute(plan, lost, left)
    found = find_plan(left, current=rerouted.placement, others={"reroute": rerouted}).best
    return Kept(lost=lost, workers=_WORKERS, failure_free_s=failure_free_s, found=found)


def _rows(single: Sequence[Kept], multiple: Sequence[Kept], best_of_all_s: float) -> tuple[tuple[str, str, str], ...]:
    rows: list[tuple[str, str, str]] = []
    for name, some in (("one lost", single), (f"{_FEWEST_LOST} to {_MAX_LOST} lost", multiple)):
        if some:
            shares = Spread(tuple(each.share for each in some))
            rerouted = sum(each.found.name == "reroute" for each in some)
            of_best = Spread(tuple(each.of(best_of_all_s) for each in some))
            rows += [
                (
                    f"kept of {_DP} x {_PP}, {name}",
                    shares.shown(),
                    f"mean {statistics.mean(shares.values):.4f}; rerouted is best in {rerouted} of {len(some)}",
                ),
                (
                    f"kept of the best plan of all {_WORKERS}, {name}",
                    of_best.shown(),
                    f"mean {statistics.mean(of_best.values):.4f}",
                ),
            ]
    return tuple(rows)
