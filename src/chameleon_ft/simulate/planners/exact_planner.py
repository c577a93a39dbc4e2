"""Policies on few workers, as the runtime has them: every decision is that of `recovery.decide`, on real plans."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.cost.step import estimate_parts
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan import LayerRange, Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery import (
    POLICIES,
    STAY,
    Decision,
    DecisionContext,
    FailureModel,
    LossClass,
    LossRisk,
    classes_to_prepare,
    decide,
    remap_decision,
    rescore,
    risk_of,
)
from chameleon_ft.recovery.failure_model import by_host
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, fitting_estimate, plan_of_layout
from chameleon_ft.simulate.by_class.pipeline_classes import on_workers
from chameleon_ft.simulate.by_class.world import World, plans_found
from chameleon_ft.simulate.planners.planner import Option, Planner, SimulatorState

_K = TypeVar("_K")
_V = TypeVar("_V")

# Bounds the memory, which would otherwise grow with the trace.
_MAX_CACHED: Final = 64


@dataclass(frozen=True, slots=True)
class RealPlan:
    """A plan with the most micro-batches that its workers can keep."""

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]

    @property
    def used(self) -> frozenset[int]:
        """The workers of the plan."""
        return frozenset(self.plan.workers)


class Decisions:
    """A cache of decisions. If only the horizon or the duration of stalls differs, the candidates are scored again.

    The decision is made again only if another candidate wins then.
    """

    def __init__(self) -> None:
        self._decisions: OrderedDict[tuple[object, ...], tuple[Decision, DecisionContext]] = OrderedDict()
        self._classes: OrderedDict[tuple[object, ...], list[LossClass]] = OrderedDict()

    def decide(self, context: DecisionContext, policy: str, rate: FailureModel) -> Decision:
        """Return the decision of `recovery.decide`."""
        key = policy, *_key(context)
        # The paper's proposals depend on the horizon.
        if policy != "paper" and key in self._decisions:
            decision, before = self._decisions[key]
            rescored = rescore(decision, before=before, now=context, failures=rate)
            if rescored is not None:
                self._decisions.move_to_end(key)
                return rescored
        decision = decide(context, policy, rate)
        _store(self._decisions, key, (decision, context))
        return decision

    def classes(self, context: DecisionContext) -> list[LossClass]:
        """Return the classes of equivalent losses from a context without losses, in the order of their preparation."""
        key = _key(context)
        if key not in self._classes:
            of_workers, of_hosts = classes_to_prepare(context)
            _store(self._classes, key, [*of_workers, *of_hosts])
        return self._classes[key]


def _store(cached: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    cached[key] = value
    cached.move_to_end(key)
    if len(cached) > _MAX_CACHED:
        cached.popitem(last=False)


def _key(context: DecisionContext) -> tuple[object, ...]:
    return (
        context.plan,
        context.in_flight_limits,
        context.costs.cluster.workers,
        context.holdings,
        context.home,
        context.home_in_flight_limits,
        context.effort,
        context.migrates,
    )


class ExactPlanner(Planner[RealPlan]):
    """One policy of the runtime.

    Args:
        policy: its name.
        world, start_number: as for `Planner`.
        decisions: the cache.
        start: the plan to start with; None for the best that is found.
        as_in_run: see `simulate`.
    """

    def __init__(
        self,
        policy: str,
        world: World,
        decisions: Decisions,
        start: RealPlan | None = None,
        *,
        start_number: int = 0,
        as_in_run: bool = False,
    ) -> None:
        super().__init__(POLICIES[policy], world, start_number=start_number)
        self._name = policy
        self._decisions = decisions
        self._start = start
        self._as_in_run = as_in_run
        # The last plan that had other places than the plan before, some of which may be empty now.
        self._home: RealPlan | None = None

    def _starts(self, speeds: Mapping[int, float]) -> list[Option[RealPlan]]:
        costs, given = self._costs_of(speeds), self._start
        if given is not None and speeds.keys() >= given.used:
            parts = best_parts(given.plan, costs, in_flight_limits=given.in_flight_limits)
            return [Option(policy="start", plan=given, step_s=estimate_parts(given.plan, parts, costs).step_s)]
        options = self._of_layouts(self._world.starts(self._policy, speeds, self._start_number), costs)
        if self._policy.starts == "several":
            return options
        return options + [
            Option(policy="start", plan=RealPlan(each.plan, each.in_flight_limits), step_s=each.step_s)
            for each in plans_found(costs)
        ]

    def _of_layouts(self, layouts: Iterable[ClusterLayout], costs: CostModel) -> list[Option[RealPlan]]:
        """Return the plans of the layouts that fit."""
        options: list[Option[RealPlan]] = []
        for layout in layouts:
            plan = plan_of_layout(layout, self._world.times)
            if plan is not None and (found := fitting_estimate(plan, costs)) is not None:
                in_flight_limits, estimate = found
                real = RealPlan(plan, FrozenMap(in_flight_limits))
                options.append(Option(policy="start", plan=real, step_s=estimate.step_s))
        return options

    def _placement(self, plan: RealPlan) -> Placement:
        return plan.plan.placement

    def _in_place(self, reached: RealPlan, state: SimulatorState) -> Option[RealPlan] | None:
        """Return the plan of the runtime: without a search, if one follows while it trains."""
        context = replace(self._context(reached, state, self._parameters.after_loss), home=None, migrates=False)
        if self._name != "reroute":
            context = replace(context, effort=0)
        decision = self._decisions.decide(context, "reroute", state.rate)
        chosen, course = decision.chosen, decision.course
        if chosen is None or course is None or chosen.step_s is None:
            return None
        return Option(
            policy="as-it-is" if chosen.policy == STAY else chosen.policy,
            plan=RealPlan(course.plan, course.in_flight_limits),
            step_s=chosen.step_s,
        )

    def _risk(self, plan: RealPlan, state: SimulatorState) -> LossRisk | None:
        placement = plan.plan.placement.without(plan.used.difference(state.speeds))
        if placement.unheld_layers:
            return None
        return risk_of(placement, {worker: self._hosts[worker] for worker in state.speeds}, self._costs.workload.owners)

    def _rings(self, plan: RealPlan) -> list[NDArray[np.int64]]:
        placement, numbers = plan.plan.placement, self._world.host_numbers
        every = {placement.holders(layer) for layer in range(placement.num_layers)}
        return [by_host(np.array(holders), numbers) for holders in every]

    def _activate(self, option: Option[RealPlan]) -> Option[RealPlan]:
        if not self._as_in_run and (self._home is None or _places(option.plan) - _places(self._home)):
            self._home = option.plan
        return super()._activate(option)

    def _costs_of(self, speeds: Mapping[int, float]) -> CostModel:
        workers = self._costs.cluster.workers
        return on_workers(self._costs, (replace(each, speed=speeds[each.id]) for each in workers if each.id in speeds))

    def _context(self, reached: RealPlan, state: SimulatorState, phases: StallModel) -> DecisionContext:
        parameters = self._parameters
        return DecisionContext(
            plan=reached.plan,
            in_flight_limits=reached.in_flight_limits,
            costs=self._costs_of({worker: speed for worker, speed in state.speeds.items() if worker not in self._lost}),
            phases=phases,
            repeat_s=state.repeat_s,
            restart_cost_s=parameters.restart_cost_s,
            has_checkpoints=parameters.has_checkpoints,
            checkpoints=state.checkpoints,
            snapshots=state.snapshots,
            measured_migration_factor=parameters.migration_factor,
            migrates=self.salvages and not state.lost,
            salvages=self.salvages,
            home=None if self._home is None else self._home.plan,
            home_in_flight_limits={} if self._home is None else self._home.in_flight_limits,
        )

    def _decision(self, reached: RealPlan, state: SimulatorState) -> Decision:
        """Return the prepared decision, or else one that is made now, which takes longer after a loss."""
        parameters = self._parameters
        beside_training = parameters.after_switch if self.salvages else parameters.after_change
        context = self._context(reached, state, parameters.after_loss if state.lost else beside_training)
        if state.lost:
            if not state.interrupted and (prepared := self._prepared(context, state)) is not None:
                return prepared
            context = replace(context, phases=parameters.after_surprise)
        return self._decisions.decide(context, self._name, state.rate)

    def _prepared(self, context: DecisionContext, state: SimulatorState) -> Decision | None:
        """Return the decision on this loss if its class has been prepared in time; None if not.

        As in the runtime, one class after the other is prepared, each in its time: first those of single workers, the
        largest first, and then those of hosts.
        """
        search_s = self._parameters.search_s
        hosts = {self._hosts[worker] for worker in state.lost}
        if not context.lost or len(hosts) > 1 or state.running_s < search_s:
            return None
        before = self._costs_of({**state.speeds, **dict.fromkeys(state.lost, 1.0)})
        for number, losses in enumerate(self._decisions.classes(replace(context, costs=before)), start=1):
            symmetry = losses.symmetries.get(state.lost)
            if symmetry is not None and number * search_s <= state.running_s:
                left = replace(before, cluster=before.cluster.without(losses.lost))
                found = self._decisions.decide(replace(context, costs=left), self._name, state.rate)
                return remap_decision(found, symmetry)
        return None

    def _options(self, reached: RealPlan, state: SimulatorState) -> list[Option[RealPlan]]:
        decision = self._decision(reached, state)
        chosen, course = decision.chosen, decision.course
        if chosen is None or course is None or chosen.step_s is None or chosen.stall_s is None:
            return []
        from_checkpoint = course.transfer is None
        saves_first = from_checkpoint and not self._lost
        near = state.snapshots if chosen.policy.startswith("snapshot") else None
        saved = state.checkpoints if near is None else near.taken
        repeat_s = saved.unsaved_s if from_checkpoint else state.repeat_s
        repeat_s = repeat_s if chosen.stall_s and not saves_first else 0.0
        return [
            Option(
                policy="as-it-is" if chosen.policy == STAY else chosen.policy,
                plan=RealPlan(course.plan, course.in_flight_limits),
                step_s=chosen.step_s,
                still_s=chosen.stall_s - repeat_s,
                repeat_s=repeat_s,
                migration_s=chosen.migration_s,
                migration_step_s=chosen.migration_step_s,
                needs_switch=chosen.needs_switch,
                moved_bytes=chosen.moved_bytes,
                from_checkpoint=from_checkpoint,
                saves_first=saves_first,
                from_snapshot=near is not None,
            )
        ]

    def _restarts(self, state: SimulatorState) -> list[Option[RealPlan]]:
        """Return the plans of the runtime and, unless all is as in a run, also the layouts that are found by class."""
        found: list[Option[RealPlan]] = []
        if self._decided is not None and (self._as_in_run or self._policy.replans):
            self._lost = frozenset()
            context = self._context(self._decided, state, self._parameters.after_loss)
            if self._policy.replans:
                nothing = Placement(self._decided.plan.placement.num_layers, {})
                decision = self._decisions.decide(replace(context, holdings=nothing), self._name, state.rate)
            else:
                decision = decide(context, "restart", state.rate)
            chosen, course = decision.chosen, decision.course
            if chosen is not None and course is not None and chosen.step_s is not None:
                plan = RealPlan(course.plan, course.in_flight_limits)
                found.append(Option(policy="start", plan=plan, step_s=chosen.step_s))
        if not self._as_in_run:
            layouts = self._world.restarts(self._policy, state.speeds, self._start_number)
            found += self._of_layouts(layouts, self._costs_of(state.speeds))
        return found


def _places(real: RealPlan) -> Counter[tuple[LayerRange, ...]]:
    """Return how many workers hold equal layers."""
    return Counter(real.plan.placement.ranges.values())
