"""Policies as the runtime has them: every decision is that of `recovery.decide`, on real plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import NoHolderError
from chameleon_ft.estimate import estimate_step
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery import Decision, FailureRate, Situation, decide, in_flight_ceiling, reroute
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planner import Chosen, Option, Outlook, best_option
from chameleon_ft.transfer import plan_in_roles, transfer_s, transfer_to

__all__ = ["Decisions", "ExactPlanner", "RealPlan"]

_REJOINING = frozenset({"reroute", "recycle"})


@dataclass(frozen=True, slots=True)
class RealPlan:
    """A plan with what its workers can keep at most."""

    plan: Plan
    ceiling: Mapping[int, InFlightLimit]


class Decisions:
    """Decisions by what they are made from; made once where only the horizon or the repeated work is another.

    Then the same candidates are weighed anew, and only if another one wins the decision is made again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Decision, float]] = {}

    def decide(self, situation: Situation, policy: str, rate: FailureRate) -> Decision:
        """What `recovery.decide` says."""
        key = policy, situation.plan, situation.ceiling, situation.costs.cluster.workers, situation.phases
        known = self._known.get(key)
        # What the paper proposes depends on the horizon.
        if known is None or policy == "paper" or not self._wins_again(*known, situation, rate):
            self._known[key] = known = decide(situation, policy, rate), situation.repeat_s
        decision, repeat_s = known
        chosen = decision.chosen
        if chosen is None or not chosen.stall_s:
            return decision
        stall_s = chosen.stall_s - repeat_s + situation.repeat_s
        return replace(decision, chosen=replace(chosen, stall_s=stall_s))

    @staticmethod
    def _wins_again(decision: Decision, repeat_s: float, situation: Situation, rate: FailureRate) -> bool:
        if decision.chosen is None:
            return True
        options: list[Option] = []
        for each in decision.candidates:
            if each.feasible and each.step_s is not None and each.stall_s is not None:
                stall_s = each.stall_s and each.stall_s - repeat_s + situation.repeat_s
                moved = each.moved_bytes or 0
                options.append(
                    Option(kind=each.policy, plan=each, step_s=each.step_s, stall_s=stall_s, moved_bytes=moved)
                )
        best = best_option(options, rate.horizon_s(len(situation.live)))
        return best is not None and best.kind == decision.chosen.policy


class ExactPlanner:
    """One policy of the runtime."""

    def __init__(
        self, policy: str, costs: CostModel, parameters: Parameters, decisions: Decisions, start: Plan | None = None
    ) -> None:
        self._policy = policy
        self._costs = costs
        self._parameters = parameters
        self._decisions = decisions
        self._start = start
        self._home: RealPlan | None = None
        # What is in force, and the workers of it that were lost, though they may be back: they hold nothing.
        self._reached: RealPlan | None = None
        self._gone: frozenset[int] = frozenset()
        self._decided: RealPlan | None = None
        self._last: RealPlan | None = None

    def start(self, speeds: Mapping[int, float]) -> Chosen | None:
        """See `Planner`: with the plan that was given, or the fastest that is found."""
        costs = self._of(speeds)
        if self._start is not None:
            depth = max(len(route.hops) for route in self._start.routes)
            self._home = RealPlan(self._start, in_flight_ceiling(self._start.workers, depth))
        else:
            try:
                found = find_plan(costs).best
            except InfeasibleError:
                return None
            self._home = RealPlan(found.plan, found.ceiling)
        step_s = _step_s(self._home, costs)
        return self._in_force(Option(kind="start", plan=self._home, step_s=step_s, stall_s=0.0))

    def decide(self, outlook: Outlook) -> Chosen | None:
        """See `Planner`."""
        if not outlook.interrupted:
            if self._decided != self._reached:
                self._gone = frozenset()
            self._reached = self._decided
        self._gone |= outlook.lost
        options = [] if self._reached is None else self._options(self._reached, outlook)
        if not options:
            options = self._from_checkpoint(outlook)
        best = best_option(options, outlook.horizon_s)
        if best is None:
            self._reached = self._decided = None
            return None
        if best.from_checkpoint:
            self._reached = None
        return self._in_force(best)

    def _in_force(self, option: Option) -> Chosen:
        self._decided = self._last = option.plan
        return Chosen(option=option, used=frozenset(option.plan.plan.workers))

    def _of(self, speeds: Mapping[int, float]) -> CostModel:
        cluster = self._costs.cluster
        workers = tuple(replace(each, speed=speeds[each.id]) for each in cluster.workers if each.id in speeds)
        return CostModel(self._costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host))

    def _situation(self, reached: RealPlan, outlook: Outlook) -> Situation:
        gone = self._gone.intersection(reached.plan.workers)
        speeds = {worker: speed for worker, speed in outlook.speeds.items() if worker not in gone}
        return Situation(
            plan=reached.plan,
            ceiling=reached.ceiling,
            costs=self._of(speeds),
            phases=self._parameters.after_loss if outlook.lost else self._parameters.after_change,
            repeat_s=outlook.repeat_s,
            restart_s=self._parameters.restart_s + outlook.rollback_s,
        )

    def _options(self, reached: RealPlan, outlook: Outlook) -> list[Option]:
        situation = self._situation(reached, outlook)
        if not situation.live:
            return []
        options: list[Option] = []
        if not situation.lost:
            step_s = _step_s(reached, situation.costs)
            options.append(Option(kind="as-it-is", plan=reached, step_s=step_s, stall_s=0.0))
        decision = self._decisions.decide(situation, self._policy, outlook.rate)
        chosen, course = decision.chosen, decision.course
        if chosen is not None and course is not None and chosen.step_s is not None and chosen.stall_s is not None:
            again_s = outlook.repeat_s if chosen.stall_s else 0.0
            options.append(
                Option(
                    kind=chosen.policy,
                    plan=RealPlan(course.plan, course.ceiling),
                    step_s=chosen.step_s,
                    stall_s=chosen.stall_s - again_s,
                    again_s=again_s,
                    moved_bytes=chosen.moved_bytes or 0,
                )
            )
        if self._policy in _REJOINING:
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
        """The layout that the runtime goes back to a checkpoint with."""
        last = self._last
        if last is None or not outlook.speeds:
            return []
        self._gone = frozenset()
        decision = decide(self._situation(last, outlook), "restart", outlook.rate)
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
