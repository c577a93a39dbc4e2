"""The prediction of `chameleon plan`: for a layout of equal pipelines, or for the plan that a planner finds."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from chameleon_ft.cost.step import StepEstimate, estimate_step, total_work_bound_s
from chameleon_ft.errors import ConfigError, NoHolderError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.layouts import disjoint_pipelines, with_micro_batches
from chameleon_ft.quantities import in_ranges
from chameleon_ft.recovery import reroute
from chameleon_ft.recovery.proposals import RivalPlanner
from chameleon_ft.registry import PLANNERS
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search import FoundPlan, SearchResult, SizeFigures, find_plan, find_plan_of_sizes, pareto_front
from chameleon_ft.session.plan_case import PlanCase


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was found, with the estimate for a run: one program for all workers, then gradient sync."""

    found: FoundPlan
    estimate: StepEstimate

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.found.name,
            "step_s": self.estimate.step_s,
            "bytes_to_move": self.found.moved_bytes,
            "host_single_points_of_failure": self.found.host_single_points_of_failure,
            "plan": json.loads(self.found.plan.to_json()),
        }


@dataclass(frozen=True, slots=True)
class Search:
    """How a plan was found: the planner, the bound that the search proves, and the candidates, fastest first."""

    planner: str
    result: SearchResult
    candidates: tuple[Candidate, ...]
    search_s: float

    @property
    def gap(self) -> float:
        """Share of the bound by which the best candidate is slower than it."""
        bound_s = self.result.bound_s
        return self.candidates[0].estimate.step_s / bound_s - 1 if bound_s else 0.0

    def to_json(self) -> dict[str, Any]:
        best, *others = self.candidates
        return {
            "planner": self.planner,
            "found": best.found.name,
            "search_s": self.search_s,
            "search_bound_s": self.result.bound_s,
            "search_gap": self.gap,
            "family": "pipelines",
            "bytes_to_move": best.found.moved_bytes,
            "host_single_points_of_failure": best.found.host_single_points_of_failure,
            "alternatives": [other.to_json() for other in others],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan and its predicted step.

    Attributes:
        dead: the lost workers.
        before_step_s: seconds of a step of the case's layout before the loss; None without a layout.
        search: how the plan was found; None for the layout.
        missing_bytes: by worker, the bytes needed beyond its capacity; empty if the plan fits.
        sizes: the micro-batch sizes of which `case` is the best; empty if there is no choice.
    """

    case: PlanCase
    dead: tuple[int, ...]
    before_step_s: float | None
    plan: Plan
    estimate: StepEstimate
    search: Search | None
    missing_bytes: Mapping[int, int]
    sizes: tuple[SizeFigures, ...] = ()

    @property
    def title(self) -> str:
        """A line that names the case."""
        profile, parallel, workers = self.case.profile, self.case.parallel, self.case.costs.cluster.workers
        count = f"{len(workers)}" if parallel is None else f"{parallel.dp} x {parallel.pp}"
        slow = "".join(f", worker {each.id} at speed {each.speed:g}" for each in workers if each.speed != 1)
        lost = f", without worker{'s' if len(self.dead) > 1 else ''} {in_ranges(self.dead)}" if self.dead else ""
        return (
            f"{profile.name} on {profile.fingerprint.device} ({profile.source}), {count} workers, "
            f"{self.case.micro_batches} micro-batches of {profile.fingerprint.micro_batch_size}"
            f"{', split backward' if self.plan.split_backward else ''}{slow}{lost}"
        )

    @property
    def total_work_bound_s(self) -> float:
        """Lower bound of a step on the live workers, in seconds: all work divided by the sum of their speeds."""
        return total_work_bound_s(_live(self.case.costs, self.dead))

    @property
    def pipelines(self) -> list[tuple[int, ...]]:
        """The workers of each pipeline, by stage; before the loss, unless the plan moves weights."""
        before = self.case.layout
        moves = self.search is not None and self.search.candidates[0].found.moved_bytes > 0
        return disjoint_pipelines(self.plan if before is None or moves else before)

    @property
    def samples_per_s(self) -> float:
        return self.case.costs.workload.samples / self.estimate.step_s

    def ramp(self) -> Iterator[tuple[int, int, float]]:
        """Yield the first step, the micro-batches and the seconds of a step of each stage before this batch."""
        case = self.case
        for first_step, count in case.ramp:
            plan, costs = with_micro_batches(self.plan, count), case.costs.with_micro_batches(count)
            yield first_step, count, _estimate(plan, costs, case.in_flight_limits or None).step_s

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        estimate, costs, snapshots = self.estimate, self.case.costs, self.case.snapshots_of(self.plan)
        return {
            "model": self.case.profile.name,
            "device": self.case.profile.fingerprint.device,
            "profile": self.case.profile.source,
            "planner": "layout",
            "micro_batch_size": costs.workload.micro_batch_size,
            "micro_batch_sizes": [
                {
                    "micro_batch_size": each.micro_batch_size,
                    "step_s": each.step_s,
                    "bound_s": None if each.bound_s == math.inf else each.bound_s,
                }
                for each in self.sizes
            ],
            "plan": json.loads(self.plan.to_json()),
            "dead": list(self.dead),
            "step_s": estimate.step_s,
            "program_s": estimate.program_s,
            "sync_s": estimate.sync.exposed_s,
            "bound_s": estimate.bound_s,
            "gap": estimate.gap,
            "total_work_bound_s": self.total_work_bound_s,
            "bubble": estimate.bubble,
            "failure_free_step_s": self.before_step_s,
            "samples_per_s": self.samples_per_s,
            "ramp": [
                {"first_step": first_step, "micro_batches": count, "step_s": step_s}
                for first_step, count, step_s in self.ramp()
            ],
            "peak_memory_bytes": {str(worker): memory.peak_bytes for worker, memory in estimate.memory.items()},
            "peak_memory_parts": {str(worker): asdict(memory.peak) for worker, memory in estimate.memory.items()},
            "capacity_bytes": {str(worker): costs.cluster.worker(worker).memory_bytes for worker in self.plan.workers},
            "snapshot_bytes": {}
            if snapshots is None
            else {str(worker): memory.total_bytes for worker, memory in snapshots.memory.items()},
            "snapshots_off": None if snapshots is None else snapshots.refusal or None,
            "fits": not self.missing_bytes,
            **({} if self.search is None else self.search.to_json()),
        }


def predict_layouts(cases: Sequence[PlanCase], dead: tuple[int, ...]) -> Prediction:
    """Predict the layout of each case, which differ in the micro-batch size, and return the fastest that fits.

    Peers do the work of dead workers. Raises ConfigError if a layer has no live holder.
    """
    predictions = [_predict_layout(case, dead) for case in cases]
    best = min(predictions, key=lambda each: (bool(each.missing_bytes), each.estimate.step_s))
    return best if len(cases) == 1 else replace(best, sizes=tuple(map(_figures, predictions)))


def _predict_layout(case: PlanCase, dead: tuple[int, ...]) -> Prediction:
    plan = case.layout
    assert plan is not None
    if dead:
        try:
            plan = reroute(plan, dead, case.costs, in_flight_limits=case.in_flight_limits)
        except NoHolderError as error:
            raise ConfigError(
                f"--failed {','.join(map(str, dead))}: no live worker holds layers {in_ranges(error.layers)}; a run "
                "then returns to its newest checkpoint, in the largest layout of the others; --planner chameleon finds "
                "their best plan"
            ) from None
    return _prediction(case, dead, plan, _estimate(plan, case.costs, case.in_flight_limits))


def _figures(prediction: Prediction) -> SizeFigures:
    size, estimate = prediction.case.costs.workload.micro_batch_size, prediction.estimate
    return (
        SizeFigures(size, math.inf, None)
        if prediction.missing_bytes
        else SizeFigures(size, estimate.bound_s, estimate.step_s)
    )


def predict_searched(cases: Sequence[PlanCase], dead: tuple[int, ...], *, planner: str) -> Prediction:
    """Predict the plan that a planner finds for the live workers, starting from the case's layout if it has one.

    Several cases differ in the micro-batch size, and have no layout and no dead workers; the best of all is found. The
    bound is always that of the search.

    Raises:
        PlanError: no plan fits into memory.
        ConfigError: the planner finds none.
    """
    started = time.perf_counter()
    case, result = cases[0], None
    if len(cases) > 1:
        result = find_plan_of_sizes([each.costs for each in cases])
        case = next(each for each in cases if each.micro_batches == result.best.plan.micro_batches)
    costs, before, limits = case.costs, case.layout, case.in_flight_limits
    live = _live(costs, dead)
    current = None if before is None else before.placement.without(dead)
    if result is None:
        others = {}
        if before is not None:
            with contextlib.suppress(NoHolderError):
                others["reroute"] = reroute(before, dead, costs, in_flight_limits=limits)
        result = find_plan(live, current=current, others=others, others_in_flight_limits=limits)
    all_found: tuple[FoundPlan, ...] = (result.best, *result.alternatives)
    if planner != "chameleon":
        started = time.perf_counter()
        rival: RivalPlanner = PLANNERS[planner]
        chosen = rival.plan(live, current=current)
        if chosen is None:
            raise ConfigError(
                f"--planner {planner}: finds no plan of these workers that fits; --planner chameleon does"
            )
        all_found = (chosen,)
    search_s = time.perf_counter() - started
    front = pareto_front(
        [Candidate(found, _estimate(found.plan, costs, found.in_flight_limits or None)) for found in all_found],
        lambda each: (each.estimate.step_s, each.found.moved_bytes, each.found.host_single_points_of_failure),
    )
    best = front[0]
    search = Search(planner, result, tuple(front), search_s)
    return replace(_prediction(case, dead, best.found.plan, best.estimate, search), sizes=result.sizes)


def _prediction(
    case: PlanCase, dead: tuple[int, ...], plan: Plan, estimate: StepEstimate, search: Search | None = None
) -> Prediction:
    before, before_step_s = case.layout, None
    if before is not None:
        unchanged = plan == before
        before_step_s = (estimate if unchanged else _estimate(before, case.costs, case.in_flight_limits)).step_s
    return Prediction(
        case=case,
        dead=dead,
        before_step_s=before_step_s,
        plan=plan,
        estimate=estimate,
        search=search,
        missing_bytes=estimate.over_capacity(case.costs),
    )


def _live(costs: CostModel, dead: tuple[int, ...]) -> CostModel:
    return CostModel(costs.workload, costs.cluster.without(dead))


def _estimate(plan: Plan, costs: CostModel, limits: Mapping[int, InFlightLimit] | None) -> StepEstimate:
    return estimate_step(plan, best_program(plan, costs, in_flight_limits=limits).program, costs)
