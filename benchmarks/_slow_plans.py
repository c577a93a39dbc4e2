"""The plans that are chosen for slow workers, by their true speeds: detector and planner over drawn cases."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks._slow_cases import STEPS, Case
from chameleon_ft.coordinator.decisions.calibration import Corrections
from chameleon_ft.coordinator.decisions.planner import decide_on_switch
from chameleon_ft.coordinator.detectors.base import OperationsMeasured
from chameleon_ft.coordinator.detectors.slowness import SlownessDetector
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery import DecisionContext, FailureModel, uniform_limits
from chameleon_ft.schedule import CostModel, InFlightLimit, Program, best_program
from chameleon_ft.search import find_plan

_NO_STALL = StallModel(detect_s=0.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0)
_SWITCHED_AFTER = 3  # steps from a report to the first step under another plan: a search, a migration and a vote


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan that was in force while some workers were slow, and how it did by their true speeds."""

    speeds: Mapping[int, float]
    known: Mapping[int, float]  # the speeds by which it was chosen
    steps: int
    step_s: float
    best_step_s: float  # of the best plan known for the true speeds: found by a search for them, or in force before

    @property
    def throughput(self) -> float:
        """Its throughput over that of the plan for the true speeds."""
        return self.best_step_s / self.step_s


@dataclass(frozen=True, slots=True)
class _InForce:
    plan: Plan
    program: Program
    in_flight_limits: Mapping[int, InFlightLimit]


class PlansOfSlowWorkers:
    """Decides for drawn cases as a run would, from `plan` on, with costs that are right but for the slow workers."""

    def __init__(self, costs: CostModel, plan: Plan, failures: FailureModel) -> None:
        self._costs = costs
        self._first = self._begun(plan, uniform_limits(plan.workers, max(len(route.hops) for route in plan.routes)))
        self._failures = failures
        self._best_s = cache(self._search)

    def run(self, case: Case, noise: Sequence[Sequence[float]], rng: random.Random) -> list[Chosen]:
        """Return the plans in force from the step after each switch, with speeds that some worker lacks."""
        workers = self._costs.cluster.hosts
        series = {worker: rng.choice(noise) for worker in workers}
        offsets = {worker: rng.randrange(len(own)) for worker, own in series.items()}
        detector, in_force = SlownessDetector(), self._first
        decided: Mapping[int, float] = FrozenMap({})
        upcoming: tuple[int, _InForce] | None = None
        steps: dict[tuple[int, Mapping[int, float], Mapping[int, float]], int] = {}
        plans = [in_force]
        generation = 1
        for step in range(STEPS):
            if upcoming is not None and step >= upcoming[0]:
                in_force, upcoming = upcoming[1], None
                plans.append(in_force)
                generation += 1
            speeds = FrozenMap({each: case.speed(each, step) for each in workers if case.speed(each, step) < 1})
            if upcoming is None and decided and speeds and set(decided) >= set(speeds):
                key = len(plans) - 1, speeds, decided
                steps[key] = steps.get(key, 0) + 1
            for worker in in_force.plan.workers:
                own = series[worker]
                ratio = own[(offsets[worker] + step) % len(own)] / case.speed(worker, step)
                detector, _ = detector.observe(OperationsMeasured(worker, generation, step, ratio, None))
            if upcoming is None and detector.speeds != decided:
                decided = detector.speeds
                upcoming = step + _SWITCHED_AFTER, self._decided(in_force, decided)
        found = []
        for (number, at, known), count in steps.items():
            best_s = min(self._best_s(at), *(self._step_s(each, at) for each in plans))
            found.append(Chosen(at, known, count, self._step_s(plans[number], at), best_s))
        return found

    def _costs_at(self, speeds: Mapping[int, float]) -> CostModel:
        return Corrections(slow=speeds).applied(self._costs)

    def _begun(
        self, plan: Plan, limits: Mapping[int, InFlightLimit], known: Mapping[int, float] = FrozenMap({})
    ) -> _InForce:
        program = best_program(plan, self._costs_at(known), in_flight_limits=limits).program
        return _InForce(plan, program, limits)

    def _decided(self, now: _InForce, speeds: Mapping[int, float]) -> _InForce:
        """Return the plan that a run switches to, or the present one."""
        context = DecisionContext(
            plan=now.plan,
            in_flight_limits=now.in_flight_limits,
            costs=self._costs_at(speeds),
            phases=_NO_STALL,
            repeat_s=0.0,
            restart_cost_s=300.0,
            salvages=True,
        )
        _, plans = decide_on_switch(context, "chameleon", self._failures, migrates=True)
        if not plans:
            return now
        final = plans[-1]
        return self._begun(final.plan, final.in_flight_limits, speeds)

    def _step_s(self, in_force: _InForce, speeds: Mapping[int, float]) -> float:
        return estimate_step(in_force.plan, in_force.program, self._costs_at(speeds)).step_s

    def _search(self, speeds: Mapping[int, float]) -> float:
        return find_plan(self._costs_at(speeds), min_holders=2).best.step_s
