"""Policies as the runtime has them: every decision is that of `recovery.decide`, on real plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import NoHolderError
from chameleon_ft.estimate import StallModel, estimate_step
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery import (
    STAY,
    Decision,
    FailureRate,
    Situation,
    decide,
    exchanged,
    in_flight_ceiling,
    refreshed,
    reroute,
)
from chameleon_ft.recovery.equivalence import HostLossClass, LossClass, classes_to_prepare
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search import FoundPlan, InfeasibleError, SearchResult, find_plan
from chameleon_ft.simulate.in_force import PlanInForce
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planner import Chosen, Option, Outlook
from chameleon_ft.transfer import plan_in_roles, transfer_s, transfer_to

__all__ = ["Decisions", "ExactPlanner", "RealPlan"]

_REJOINING = frozenset({"reroute", "recycle"})
# From a checkpoint they go on with the fastest plan, the others with the largest layout of equal pipelines.
_PLANS_ANEW = frozenset({"chameleon", "repartition"})


@dataclass(frozen=True, slots=True)
class RealPlan:
    """A plan with what its workers can keep at most."""

    plan: Plan
    ceiling: Mapping[int, InFlightLimit]


class Decisions:
    """Decisions by what they are made from; made once where only the horizon or what stalls take is another.

    Then the same candidates are weighed anew, and only if another one wins the decision is made again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Decision, Situation]] = {}
        self._classes: dict[tuple[object, ...], list[LossClass | HostLossClass]] = {}

    def decide(self, situation: Situation, policy: str, rate: FailureRate) -> Decision:
        """What `recovery.decide` says."""
        key = policy, *_asked(situation)
        # What the paper proposes depends on the horizon.
        if policy != "paper" and (known := self._known.get(key)) is not None:
            decision, before = known
            fresh = refreshed(decision, before=before, now=situation, rate=rate)
            if fresh is not None:
                return fresh
        decision = decide(situation, policy, rate)
        self._known[key] = decision, situation
        return decision

    def classes(self, situation: Situation) -> list[LossClass | HostLossClass]:
        """The losses that come to the same, while everyone is there, in the order in which they are prepared."""
        key = _asked(situation)
        if key not in self._classes:
            of_workers, of_hosts = classes_to_prepare(situation)
            self._classes[key] = [*of_workers, *of_hosts]
        return self._classes[key]

    def on_representative(
        self, losses: LossClass | HostLossClass, before: Situation, now: Situation, policy: str, rate: FailureRate
    ) -> Decision:
        """What was decided on the loss of the representative of a class.

        Args:
            losses: a class of `before`.
            before: the situation while everyone was there.
            now: another one of the class is lost.
            rate: that loss is counted.
        """
        left = before.costs.cluster.without(losses.lost)
        return self.decide(replace(now, costs=CostModel(before.costs.workload, left)), policy, rate)


def _asked(situation: Situation) -> tuple[object, ...]:
    return situation.plan, situation.ceiling, situation.costs.cluster.workers, situation.holdings


class ExactPlanner(PlanInForce[RealPlan]):
    """One policy of the runtime; see `simulate` for `as_in_run`."""

    def __init__(
        self,
        policy: str,
        costs: CostModel,
        parameters: Parameters,
        decisions: Decisions,
        start: Plan | None = None,
        *,
        as_in_run: bool = False,
    ) -> None:
        super().__init__()
        self._policy = policy
        self._costs = costs
        self._parameters = parameters
        self._decisions = decisions
        self._start = start
        self._rejoins = policy in _REJOINING and not as_in_run
        self._home: RealPlan | None = None
        self._last: RealPlan | None = None
        # The workers of the plan that were lost, though they may be back: they hold nothing.
        self._gone: frozenset[int] = frozenset()

    def start(self, speeds: Mapping[int, float]) -> Chosen | None:
        """See `Planner`: with the plan that was given, or the fastest that is found."""
        costs = self._of(speeds)
        if self._start is not None:
            depth = max(len(route.hops) for route in self._start.routes)
            self._home = RealPlan(self._start, in_flight_ceiling(self._start.workers, depth))
        else:
            try:
                found = self._best_of(find_plan(costs), costs)
            except InfeasibleError:
                return None
            self._home = RealPlan(found.plan, found.ceiling)
        step_s = _step_s(self._home, costs)
        return self._in_force(Option(kind="start", plan=self._home, step_s=step_s, stall_s=0.0))

    def _best_of(self, result: SearchResult, costs: CostModel) -> FoundPlan:
        """What trains the most samples until the first failure, as `recovery.decide` counts them."""
        rate, parameters = self._parameters.rate, self._parameters
        horizon_s = rate.horizon_s(len(costs.cluster.workers))
        # On average half of the time between two checkpoints is lost; without them, all.
        lost_s = (
            parameters.restart_s + parameters.checkpoint_interval_s / 2 if parameters.has_checkpoints else horizon_s
        )

        def samples(found: FoundPlan) -> float:
            last_holders = len(found.plan.placement.indispensable({worker: worker for worker in found.plan.workers}))
            share = rate.fatal_share(last_holders=last_holders, last_hosts=found.last_hosts, cluster=costs.cluster)
            return max(0.0, horizon_s - lost_s * share) / found.step_s

        return max((result.best, *result.alternatives), key=samples)

    def _reach(self, plan: RealPlan | None) -> None:
        if plan != self._reached:
            self._gone = frozenset()
        super()._reach(plan)

    def _lose(self, lost: frozenset[int]) -> None:
        self._gone |= lost

    def _used(self, plan: RealPlan) -> frozenset[int]:
        return frozenset(plan.plan.workers)

    def _in_force(self, option: Option) -> Chosen:
        self._last = option.plan
        return super()._in_force(option)

    def _of(self, speeds: Mapping[int, float]) -> CostModel:
        cluster = self._costs.cluster
        workers = tuple(replace(each, speed=speeds[each.id]) for each in cluster.workers if each.id in speeds)
        return CostModel(self._costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host))

    def _situation(self, reached: RealPlan, outlook: Outlook, phases: StallModel) -> Situation:
        gone = self._gone.intersection(reached.plan.workers)
        speeds = {worker: speed for worker, speed in outlook.speeds.items() if worker not in gone}
        parameters = self._parameters
        return Situation(
            plan=reached.plan,
            ceiling=reached.ceiling,
            costs=self._of(speeds),
            phases=phases,
            repeat_s=outlook.repeat_s,
            restart_s=parameters.restart_s + (outlook.rollback_s if parameters.has_checkpoints else 0.0),
            has_checkpoints=parameters.has_checkpoints,
        )

    def _decision(self, reached: RealPlan, outlook: Outlook) -> Decision:
        """What was prepared, or else what is found now, which takes longer where somebody is lost."""
        if not outlook.lost:
            situation = self._situation(reached, outlook, self._parameters.after_change)
            return self._decisions.decide(situation, self._policy, outlook.rate)
        situation = self._situation(reached, outlook, self._parameters.after_loss)
        found = None if outlook.interrupted else self._prepared(situation, outlook)
        if found is None:
            situation = replace(situation, phases=self._parameters.after_surprise)
            found = self._decisions.decide(situation, self._policy, outlook.rate)
        return found

    def _prepared(self, situation: Situation, outlook: Outlook) -> Decision | None:
        """As `Forethought` has it: one class of losses after the other, the largest first, each in its time.

        Those of single workers, and then those of hosts.
        """
        search_s = self._parameters.search_s
        hosts = {self._costs.cluster.hosts[worker] for worker in outlook.lost}
        if not situation.lost or len(hosts) > 1 or outlook.running_s < search_s:
            return None
        before = replace(situation, costs=self._of({**outlook.speeds, **dict.fromkeys(outlook.lost, 1.0)}))
        for number, losses in enumerate(self._decisions.classes(before), start=1):
            exchange = losses.exchange_for(outlook.lost)
            if exchange is not None and number * search_s <= outlook.running_s:
                found = self._decisions.on_representative(losses, before, situation, self._policy, outlook.rate)
                return exchanged(found, exchange)
        return None

    def _options(self, reached: RealPlan, outlook: Outlook) -> list[Option]:
        if not outlook.speeds:
            return []
        options: list[Option] = []
        decision = self._decision(reached, outlook)
        chosen, course = decision.chosen, decision.course
        if chosen is not None and course is not None and chosen.step_s is not None and chosen.stall_s is not None:
            from_checkpoint = course.transfer is None
            again_s = outlook.rollback_s if from_checkpoint else outlook.repeat_s if chosen.stall_s else 0.0
            options.append(
                Option(
                    kind="as-it-is" if chosen.policy == STAY else chosen.policy,
                    plan=RealPlan(course.plan, course.ceiling),
                    step_s=chosen.step_s,
                    stall_s=self._parameters.restart_s if from_checkpoint else chosen.stall_s - again_s,
                    again_s=again_s,
                    moved_bytes=chosen.moved_bytes or 0,
                    from_checkpoint=from_checkpoint,
                )
            )
        if self._rejoins:
            situation = self._situation(reached, outlook, self._parameters.after_change)
            options += self._rejoined(reached, situation, outlook)
        return options

    def _rejoined(self, reached: RealPlan, situation: Situation, outlook: Outlook) -> list[Option]:
        """Idle workers take the places of lost ones in the plan of the start; see the policy `recycle` by class."""
        assert self._home is not None
        live = set(situation.live)
        idle = sorted(live.difference(self._home.plan.workers) | live.difference(reached.plan.workers))
        gaps = [worker for worker in self._home.plan.workers if worker not in live or worker in idle]
        if not idle or not gaps:
            return []
        kept = {worker: worker for worker in self._home.plan.workers if worker not in gaps}
        roles = kept | dict(zip(gaps, idle, strict=False))
        left = gaps[len(idle) :]
        try:
            plan = reroute(self._home.plan, left, self._costs, ceiling=self._home.ceiling) if left else self._home.plan
            plan = plan_in_roles(plan, roles)
            layers = situation.costs.workload.layers
            transfer = transfer_to(situation.placement, plan.placement, live=situation.live, layers=layers)
        except NoHolderError:
            return []
        ceiling = {roles[worker]: limit for worker, limit in self._home.ceiling.items() if worker in roles}
        back = RealPlan(plan, FrozenMap(ceiling))
        return [
            Option(
                kind=f"{self._policy}-rejoin",
                plan=back,
                step_s=_step_s(back, situation.costs),
                stall_s=situation.phases.total_s + transfer_s(transfer.rounds, situation.costs.cluster),
                again_s=outlook.repeat_s,
                moved_bytes=transfer.total_bytes,
            )
        ]

    def _from_checkpoint(self, outlook: Outlook) -> list[Option]:
        """What the runtime goes back to a checkpoint with, of all who are there by now."""
        last = self._last
        if last is None or not outlook.speeds or not self._parameters.has_checkpoints:
            return []
        self._gone = frozenset()
        situation = self._situation(last, outlook, self._parameters.after_loss)
        if self._policy in _PLANS_ANEW:
            nothing = Placement(last.plan.placement.num_layers, {})
            decision = self._decisions.decide(replace(situation, holdings=nothing), self._policy, outlook.rate)
        else:
            decision = decide(situation, "restart", outlook.rate)
        if decision.chosen is None or decision.course is None or decision.chosen.step_s is None:
            return []
        return [
            Option(
                kind="checkpoint",
                plan=RealPlan(decision.course.plan, decision.course.ceiling),
                step_s=decision.chosen.step_s,
                stall_s=self._parameters.restart_s,
                again_s=outlook.rollback_s,
                from_checkpoint=True,
            )
        ]


def _step_s(real: RealPlan, costs: CostModel) -> float:
    """As the decision weighs it."""
    program = best_program(real.plan, costs, ceiling=real.ceiling).program
    return estimate_step(real.plan, program, costs).step_s
