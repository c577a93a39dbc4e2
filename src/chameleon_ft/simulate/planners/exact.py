"""Policies as the runtime has them: every decision is that of `recovery.decide`, on real plans."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from chameleon_ft.cluster import Cluster
from chameleon_ft.estimate import PartsEstimate, StallModel, estimate_parts
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
    uniform_limits,
)
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, plan_of_layout
from chameleon_ft.simulate.by_class.replayed import fitting_estimate
from chameleon_ft.simulate.by_class.world import World
from chameleon_ft.simulate.planners.base import ActivePlan
from chameleon_ft.simulate.planners.options import Chosen, Option, SimulatorState

__all__ = ["Decisions", "ExactPlanner", "RealPlan"]

_K = TypeVar("_K")
_V = TypeVar("_V")

# Decisions that are remembered: more would take memory that grows with the trace.
_REMEMBERED: Final = 64


@dataclass(frozen=True, slots=True)
class RealPlan:
    """A plan with what its workers can keep at most."""

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]

    @classmethod
    def of_layout(cls, plan: Plan) -> RealPlan:
        """A plan as a run begins with one that is given to it."""
        return cls(plan, uniform_limits(plan.workers, max(len(route.hops) for route in plan.routes)))


class Decisions:
    """Decisions by what they are made from; made once where only the horizon or what stalls take is another.

    The same candidates are then scored again, and only if another one wins the decision is made again.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[object, ...], tuple[Decision, DecisionContext]] = OrderedDict()
        self._classes: OrderedDict[tuple[object, ...], list[LossClass]] = OrderedDict()

    def decide(self, context: DecisionContext, policy: str, rate: FailureModel) -> Decision:
        """What `recovery.decide` says."""
        key = policy, *_asked(context)
        # What the paper proposes depends on the horizon.
        if policy != "paper" and (known := self._known.get(key)) is not None:
            decision, before = known
            rescored = rescore(decision, before=before, now=context, failures=rate)
            if rescored is not None:
                self._known.move_to_end(key)
                return rescored
        decision = decide(context, policy, rate)
        _remember(self._known, key, (decision, context))
        return decision

    def classes(self, context: DecisionContext) -> list[LossClass]:
        """The losses that come to the same, while everyone is there, in the order in which they are prepared."""
        key = _asked(context)
        if key not in self._classes:
            of_workers, of_hosts = classes_to_prepare(context)
            _remember(self._classes, key, [*of_workers, *of_hosts])
        return self._classes[key]

    def on_representative(
        self,
        losses: LossClass,
        before: DecisionContext,
        now: DecisionContext,
        policy: str,
        rate: FailureModel,
    ) -> Decision:
        """What was decided on the loss of the representative of a class.

        Args:
            losses: a class of `before`.
            before: the context while everyone was there.
            now: another one of the class is lost.
            rate: that loss is counted.
        """
        left = before.costs.cluster.without(losses.lost)
        return self.decide(replace(now, costs=CostModel(before.costs.workload, left)), policy, rate)


def _remember(known: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def _asked(context: DecisionContext) -> tuple[object, ...]:
    return (
        context.plan,
        context.in_flight_limits,
        context.costs.cluster.workers,
        context.holdings,
        context.home,
        context.home_in_flight_limits,
    )


class ExactPlanner(ActivePlan[RealPlan]):
    """One policy of the runtime.

    Args:
        policy: its name.
        model: costs, and the layouts that are found by class: to begin with, and to go on with from a checkpoint.
        decisions: that are remembered.
        start: the plan to begin with; None for the best that is found.
        start_number: which of several start layouts to begin with.
        as_in_run: see `simulate`.
    """

    def __init__(
        self,
        policy: str,
        model: World,
        decisions: Decisions,
        start: RealPlan | None = None,
        *,
        start_number: int = 0,
        as_in_run: bool = False,
    ) -> None:
        super().__init__(model.costs, model.parameters, has_checkpoints=model.parameters.has_checkpoints)
        self._name = policy
        self._policy = POLICIES[policy]
        self._model = model
        self._decisions = decisions
        self._start = start
        self._start_number = start_number
        self._as_in_run = as_in_run
        # The last plan that has other places than the one before, some of which may be empty now; and the last of all.
        self._home: RealPlan | None = None
        self._decided: RealPlan | None = None

    def _starts(self, speeds: Mapping[int, float]) -> list[Option]:
        costs = self._of(speeds)
        given = self._start
        if given is not None and speeds.keys() >= set(given.plan.workers):
            return [Option(kind="start", plan=given, step_s=_estimate(given, costs).step_s, stall_s=0.0)]
        options = self._of_layouts(self._model.starts(self._policy, speeds, self._start_number), costs)
        if self._policy.starts == "several":
            return options
        try:
            result = find_plan(costs)
        except InfeasibleError:
            return options
        return options + [
            Option(kind="start", plan=RealPlan(each.plan, each.in_flight_limits), step_s=each.step_s, stall_s=0.0)
            for each in (result.best, *result.alternatives)
        ]

    def _of_layouts(self, layouts: Iterable[ClusterLayout], costs: CostModel) -> list[Option]:
        """The plans of layouts, as far as they fit."""
        options: list[Option] = []
        for layout in layouts:
            plan = plan_of_layout(layout, self._model.times)
            if plan is None:
                continue
            found = fitting_estimate(plan, costs)
            if found is not None:
                real = RealPlan(plan, FrozenMap(found[0]))
                options.append(Option(kind="start", plan=real, step_s=found[1].step_s, stall_s=0.0))
        return options

    def _risk(self, plan: RealPlan, live: Collection[int]) -> LossRisk | None:
        placement = plan.plan.placement.without(set(plan.plan.workers).difference(live))
        hosts = self._costs.cluster.hosts
        return None if placement.unheld_layers else risk_of(placement, {worker: hosts[worker] for worker in live})

    def _used(self, plan: RealPlan) -> frozenset[int]:
        return frozenset(plan.plan.workers)

    def _activate(self, option: Option, live: Collection[int]) -> Chosen:
        self._decided = option.plan
        if not self._as_in_run and (self._home is None or _places(self._decided) - _places(self._home)):
            self._home = self._decided
        return super()._activate(option, live)

    def _of(self, speeds: Mapping[int, float]) -> CostModel:
        cluster = self._costs.cluster
        workers = tuple(replace(each, speed=speeds[each.id]) for each in cluster.workers if each.id in speeds)
        return CostModel(self._costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host))

    def _context(self, reached: RealPlan, state: SimulatorState, phases: StallModel) -> DecisionContext:
        gone = self._lost.intersection(reached.plan.workers)
        speeds = {worker: speed for worker, speed in state.speeds.items() if worker not in gone}
        parameters = self._parameters
        return DecisionContext(
            plan=reached.plan,
            in_flight_limits=reached.in_flight_limits,
            costs=self._of(speeds),
            phases=phases,
            repeat_s=state.repeat_s,
            restart_s=parameters.restart_s,
            has_checkpoints=parameters.has_checkpoints,
            checkpoints=state.checkpoints,
            home=None if self._home is None else self._home.plan,
            home_in_flight_limits={} if self._home is None else self._home.in_flight_limits,
        )

    def _decision(self, reached: RealPlan, state: SimulatorState) -> Decision:
        """What was prepared, or else what is found now, which takes longer where somebody is lost."""
        if not state.lost:
            context = self._context(reached, state, self._parameters.after_change)
            return self._decisions.decide(context, self._name, state.rate)
        context = self._context(reached, state, self._parameters.after_loss)
        found = None if state.interrupted else self._prepared(context, state)
        if found is None:
            context = replace(context, phases=self._parameters.after_surprise)
            found = self._decisions.decide(context, self._name, state.rate)
        return found

    def _prepared(self, context: DecisionContext, state: SimulatorState) -> Decision | None:
        """As `Forethought` has it: one class of losses after the other, the largest first, each in its time.

        Those of single workers, and then those of hosts.
        """
        search_s = self._parameters.search_s
        hosts = {self._costs.cluster.hosts[worker] for worker in state.lost}
        if not context.lost or len(hosts) > 1 or state.running_s < search_s:
            return None
        before = replace(context, costs=self._of({**state.speeds, **dict.fromkeys(state.lost, 1.0)}))
        for number, losses in enumerate(self._decisions.classes(before), start=1):
            symmetry = losses.symmetries.get(state.lost)
            if symmetry is not None and number * search_s <= state.running_s:
                found = self._decisions.on_representative(losses, before, context, self._name, state.rate)
                return remap_decision(found, symmetry)
        return None

    def _options(self, reached: RealPlan, state: SimulatorState) -> list[Option]:
        decision = self._decision(reached, state)
        chosen, course = decision.chosen, decision.course
        if chosen is None or course is None or chosen.step_s is None or chosen.stall_s is None:
            return []
        from_checkpoint = course.transfer is None
        saves_first = from_checkpoint and self._lost.isdisjoint(reached.plan.workers)
        repeat_s = state.checkpoints.unsaved_s if from_checkpoint else state.repeat_s
        repeat_s = repeat_s if chosen.stall_s and not saves_first else 0.0
        return [
            Option(
                kind="as-it-is" if chosen.policy == STAY else chosen.policy,
                plan=RealPlan(course.plan, course.in_flight_limits),
                step_s=chosen.step_s,
                stall_s=chosen.stall_s - repeat_s,
                repeat_s=repeat_s,
                moved_bytes=chosen.moved_bytes or 0,
                from_checkpoint=from_checkpoint,
                saves_first=saves_first,
            )
        ]

    def _restarts(self, state: SimulatorState) -> list[Option]:
        """The plans that the runtime goes on with; beside these, unless all is as in a run, those found by class."""
        costs = self._of(state.speeds)
        found: list[Option] = []
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
                found.append(Option(kind="checkpoint", plan=plan, step_s=chosen.step_s, stall_s=0.0))
        if self._as_in_run:
            return found
        return found + self._of_layouts(self._model.restarts(self._policy, state.speeds, self._start_number), costs)


def _places(real: RealPlan) -> Counter[tuple[LayerRange, ...]]:
    """How many workers hold the same layers."""
    return Counter(real.plan.placement.ranges.values())


def _estimate(real: RealPlan, costs: CostModel) -> PartsEstimate:
    return estimate_parts(real.plan, best_parts(real.plan, costs, in_flight_limits=real.in_flight_limits), costs)
