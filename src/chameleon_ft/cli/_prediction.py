"""What `chameleon plan` says of a plan, and how it comes by it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from chameleon_ft.cli._plan_case import PlanCase
from chameleon_ft.cli._plan_fit import Misfit, find_misfit
from chameleon_ft.errors import ConfigError, NoHolderError
from chameleon_ft.estimate import StepEstimate, estimate_step, total_work_bound_s
from chameleon_ft.plan import Plan
from chameleon_ft.plan.detours import disjoint_pipelines
from chameleon_ft.quantities import in_ranges
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search import (
    FoundPlan,
    SearchResult,
    SizeFigures,
    find_plan,
    find_plan_of_sizes,
    oobleck_plan,
    paper_plan,
    pareto_front,
)

__all__ = ["BASELINES", "Candidate", "Prediction", "Searched", "predict_layouts", "predict_searched"]

BASELINES: Final = {"paper": paper_plan, "oobleck": oobleck_plan}
"""Published planners to compare with, by name; their backward is fused."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was found, predicted as a run would run it: one program for all, gradients reduced after it."""

    found: FoundPlan
    estimate: StepEstimate

    @property
    def peak_bytes(self) -> int:
        """What the worker that needs most holds at its worst moment."""
        return max(memory.peak_bytes for memory in self.estimate.memory.values())

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "name": self.found.name,
            "step_s": self.estimate.step_s,
            "bytes_to_move": self.found.moved_bytes,
            "last_hosts": self.found.host_single_points_of_failure,
            "plan": json.loads(self.found.plan.to_json()),
        }


@dataclass(frozen=True, slots=True)
class Searched:
    """How a plan was found: by which planner, what the search proves, and the candidates, the fastest first."""

    planner: str
    result: SearchResult
    candidates: tuple[Candidate, ...]
    search_s: float

    @property
    def moves_weights(self) -> bool:
        """Whether the best candidate is more than detours."""
        return self.candidates[0].found.moved_bytes > 0

    @property
    def gap(self) -> float:
        """By which share of the bound the best candidate is slower than it."""
        bound_s = self.result.bound_s
        return self.candidates[0].estimate.step_s / bound_s - 1 if bound_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        best, *others = self.candidates
        return {
            "planner": self.planner,
            "found": best.found.name,
            "search_s": self.search_s,
            "search_bound_s": self.result.bound_s,
            "search_gap": self.gap,
            "family": self.result.family.value,
            "bytes_to_move": best.found.moved_bytes,
            "last_hosts": best.found.host_single_points_of_failure,
            "alternatives": [other.to_json() for other in others],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Everything that is said of a plan.

    Attributes:
        before: the plan before anything failed, and its step; None where there was none.
        total_work_bound_s: seconds below which no plan for these workers gets: all work over the speed of all of them.
        searched: how the plan was found; None for a layout that was asked for.
        sizes: the micro-batch sizes of which `case` is the best; empty if there is no choice.
    """

    case: PlanCase
    costs: CostModel
    dead: tuple[int, ...]
    before: Plan | None
    before_step_s: float | None
    plan: Plan
    estimate: StepEstimate
    total_work_bound_s: float
    misfit: Misfit | None
    searched: Searched | None
    sizes: tuple[SizeFigures, ...] = ()

    @property
    def title(self) -> str:
        """What it is of, in a line."""
        profile, parallel = self.case.profile, self.case.parallel
        workers = f"{len(self.case.hosts)}" if parallel is None else f"{parallel.dp} x {parallel.pp}"
        slow = "".join(f", worker {worker} at speed {speed:g}" for worker, speed in sorted(self.case.speeds.items()))
        lost = f", without worker{'s' if len(self.dead) > 1 else ''} {in_ranges(self.dead)}"
        return (
            f"{profile.name} on {profile.fingerprint.device} ({profile.source}), {workers} workers, "
            f"{self.case.micro_batches} micro-batches of {profile.fingerprint.micro_batch_size}"
            f"{', split backward' if self.plan.split_backward else ''}{slow}"
            f"{lost if self.dead else ''}"
        )

    @property
    def idle(self) -> tuple[int, ...]:
        """The live workers that have no part in the plan."""
        return tuple(sorted(set(self.case.hosts).difference(self.plan.workers, self.dead)))

    @property
    def pipelines(self) -> list[tuple[int, ...]]:
        """The workers of each pipeline before anything failed, by stage."""
        if self.before is None or (self.searched is not None and self.searched.moves_weights):
            return disjoint_pipelines(self.plan)
        return disjoint_pipelines(self.before)

    @property
    def hosts(self) -> int:
        """How many hosts have workers that are not dead."""
        return len({host for worker, host in self.costs.cluster.hosts.items() if worker not in self.dead})

    @property
    def figures(self) -> SizeFigures:
        """A note on its micro-batch size if there are several; empty otherwise."""
        size = self.costs.workload.micro_batch_size
        fits = self.misfit is None
        return SizeFigures(size, self.estimate.bound_s if fits else math.inf, self.estimate.step_s if fits else None)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        estimate = self.estimate
        return {
            "model": self.case.profile.name,
            "device": self.case.profile.fingerprint.device,
            "profile": self.case.profile.source,
            "planner": "layout",
            "micro_batch_size": self.costs.workload.micro_batch_size,
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
            "samples_per_s": self.costs.workload.samples / estimate.step_s,
            "peak_memory_bytes": {str(worker): memory.peak_bytes for worker, memory in estimate.memory.items()},
            "capacity_bytes": {
                str(worker): self.costs.cluster.worker(worker).memory_bytes for worker in self.plan.workers
            },
            "fits": self.misfit is None,
            **({} if self.searched is None else self.searched.to_json()),
        }


def predict_layouts(cases: Sequence[PlanCase], dead: tuple[int, ...]) -> Prediction:
    """Predict the layout of each case, which differ in the micro-batch size, and return the fastest that fits.

    Raises ConfigError as `predict_layout` does.
    """
    predictions = [predict_layout(case, dead) for case in cases]
    best = min(predictions, key=lambda each: (each.misfit is not None, each.estimate.step_s))
    return best if len(cases) == 1 else replace(best, sizes=tuple(each.figures for each in predictions))


def predict_layout(case: PlanCase, dead: tuple[int, ...]) -> Prediction:
    """Predict the layout of equal pipelines of `case`, with the work of dead workers done by their peers.

    Raises ConfigError where nobody is left to do it.
    """
    assert case.parallel is not None
    costs, ceiling, before = case.costs, case.ceiling(case.parallel), case.layout(case.parallel)
    plan = before
    if dead:
        try:
            plan = reroute(before, dead, costs, in_flight_limits=ceiling)
        except NoHolderError as error:
            raise ConfigError(
                f"--failed {','.join(map(str, dead))}: no live worker holds layers {in_ranges(error.layers)}; a run "
                "goes back to its newest checkpoint then, in the largest layout that is left; --planner chameleon says "
                "what the rest could do best"
            ) from None
    return _prediction(case, costs, dead, before, ceiling, plan, _estimate(plan, costs, ceiling), searched=None)


def predict_searched(cases: Sequence[PlanCase], dead: tuple[int, ...], *, planner: str) -> Prediction:
    """Have a planner find the plan of the workers that are not dead; where the case has a layout, from that one on.

    Several cases differ in the micro-batch size, and have no layout and no dead workers; the best of all is found.

    The bound is always that of the search. Raises PlanError where no plan fits into their memory, ConfigError where
    the planner finds none.
    """
    started = time.perf_counter()
    case, result = cases[0], None
    if len(cases) > 1:
        result = find_plan_of_sizes([each.costs for each in cases])
        case = next(each for each in cases if each.micro_batches == result.best.plan.micro_batches)
    costs = case.costs
    live = CostModel(costs.workload, costs.cluster.without(dead))
    before = None if case.parallel is None else case.layout(case.parallel)
    before_ceiling = {} if case.parallel is None else case.ceiling(case.parallel)
    current = None if before is None else before.placement.without(dead)
    result = result or find_plan(
        live,
        current=current,
        others={} if before is None else _detours(before, dead, costs, before_ceiling),
        others_in_flight_limits=before_ceiling,
    )
    all_found: tuple[FoundPlan, ...] = (result.best, *result.alternatives)
    if planner in BASELINES:
        started = time.perf_counter()
        chosen = BASELINES[planner](live, current=current)
        if chosen is None:
            raise ConfigError(
                f"--planner {planner}: finds no plan of these workers that fits; --planner chameleon does"
            )
        all_found = (chosen.found,)
    search_s = time.perf_counter() - started
    candidates = [Candidate(found, _estimate(found.plan, costs, found.in_flight_limits or None)) for found in all_found]
    front = pareto_front(
        candidates,
        lambda each: (each.estimate.step_s, each.found.moved_bytes, each.found.host_single_points_of_failure),
    )
    searched = Searched(planner, result, tuple(front), search_s)
    best = searched.candidates[0]
    found = _prediction(case, costs, dead, before, before_ceiling, best.found.plan, best.estimate, searched=searched)
    return replace(found, sizes=result.sizes)


def _detours(
    before: Plan, dead: Collection[int], costs: CostModel, ceiling: Mapping[int, InFlightLimit]
) -> dict[str, Plan]:
    try:
        return {"reroute": reroute(before, dead, costs, in_flight_limits=ceiling)}
    except NoHolderError:
        return {}


def _prediction(
    case: PlanCase,
    costs: CostModel,
    dead: tuple[int, ...],
    before: Plan | None,
    before_ceiling: Mapping[int, InFlightLimit],
    plan: Plan,
    estimate: StepEstimate,
    *,
    searched: Searched | None,
) -> Prediction:
    before_step_s = None
    if before is not None:
        before_step_s = estimate.step_s if plan == before else _estimate(before, costs, before_ceiling).step_s
    live = CostModel(costs.workload, costs.cluster.without(dead))
    return Prediction(
        case=case,
        costs=costs,
        dead=dead,
        before=before,
        before_step_s=before_step_s,
        plan=plan,
        estimate=estimate,
        total_work_bound_s=total_work_bound_s(live),
        misfit=find_misfit(estimate, case, costs),
        searched=searched,
    )


def _estimate(plan: Plan, costs: CostModel, ceiling: Mapping[int, InFlightLimit] | None) -> StepEstimate:
    program = best_program(plan, costs, in_flight_limits=ceiling).program
    return estimate_step(plan, program, costs)
