"""What to do when workers are lost: a pure function from what is known to what everyone does next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from chameleon_ft import recovery
from chameleon_ft.control.messages import Parked, Vote
from chameleon_ft.control.transition import PlannedTransition, placement_of, plan_transition
from chameleon_ft.control.words import counted, pipelines_in_words
from chameleon_ft.errors import ControlError, NoHolderError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import in_ranges
from chameleon_ft.recovery import STAY, FailureModel, largest_symmetric_layout
from chameleon_ft.schedule import InFlightLimit, Program, default_limits
from chameleon_ft.transfer import Transfer, plan_transfer, remap_plan, worker_kinds

__all__ = ["Decision", "Prepared", "Situation", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was weighed while training went on.

    Attributes:
        outlook: what it was weighed on.
        rate: likewise.
        decision: on how to go on with these; its program has been checked.
        search_s: seconds that it took.
    """

    outlook: recovery.DecisionContext
    rate: FailureModel
    decision: recovery.Decision
    search_s: float

    def is_for(self, outlook: recovery.DecisionContext) -> bool:
        """Whether the same plan runs, and the same workers are there."""
        return (self.outlook.plan, self.outlook.live) == (outlook.plan, outlook.live)

    @property
    def is_change(self) -> bool:
        """Whether it is better to stop for it than to go on as before."""
        return self.decision.chosen is not None and self.decision.chosen.policy != STAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when all survivors have parked.

    Attributes:
        plan: the plan whose placement is in force.
        live: workers that can go on, spares included.
        parked: what each of them said it holds.
        committed: steps known to be applied by some worker, alive or not.
        last_vote: the vote of step ``committed - 1``, where a worker has reported it.
        checkpoints: steps that complete checkpoints resume at, ascending.
        newcomers: those of the live workers that have come since the last decision.
    """

    plan: Plan
    live: Collection[int]
    parked: Mapping[int, Parked]
    committed: int
    last_vote: Vote | None
    checkpoints: Sequence[int]
    newcomers: Collection[int] = ()

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """Every live worker -> the layers that it holds; what one outside the plan may have is of an earlier step."""
        return {w: self.parked[w].layers if w in self.plan.placement.ranges else () for w in sorted(self.live)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What everyone does next. `policy` and `action` say it to people.

    Attributes:
        plan: what is trained.
        ceiling: what its workers can keep at most.
        first_step: the step to run next.
        load: where the layers' state comes from: fresh weights, what workers hold, or the checkpoint of this step.
        roll_forward: the vote by which workers apply step ``first_step - 1`` that have not.
        transition: how the placement changes; None where it does not.
        program: of the plan, where it is known already.
        weighed: all that was considered; None where there was nothing to choose.
        prepared: whether that was before everyone stopped; `program` has been checked then.
        lost_layers: layers that nobody holds any more.
        known: what it was made from, in JSON values.
    """

    plan: Plan
    ceiling: Mapping[int, InFlightLimit] = field(default_factory=lambda: FrozenMap({}))
    first_step: int
    load: Literal["initial", "keep"] | int
    roll_forward: Vote | None
    policy: str
    action: str
    transition: PlannedTransition | None = None
    program: Program | None = None
    weighed: recovery.Decision | None = None
    prepared: bool = False
    lost_layers: tuple[int, ...] = ()
    known: Mapping[str, object] = field(default_factory=lambda: FrozenMap({}))

    @property
    def everyone(self) -> tuple[int, ...]:
        """The workers that have orders, ascending: those that train, and those that only send what they hold."""
        return self.plan.workers if self.transition is None else self.transition.everyone

    def to_json(self) -> dict[str, object]:
        """The fields of the event `decision`, but for its generation and the seconds that it took."""
        weighed = {} if self.weighed is None else self.weighed.to_json()
        return {"prepared": self.prepared, **self.known, **weighed}


def decide(
    situation: Situation,
    outlook: recovery.DecisionContext,
    *,
    policy: str,
    rate: FailureModel,
    prepared: recovery.Decision | None = None,
    decide_s: Callable[[], float] | None = None,
) -> Decision:
    """Choose how to go on; where nothing that the policy proposes can be done, all return to the newest checkpoint.

    There is nothing to choose where nobody is lost and nobody has come: the same plan is tried again.

    Args:
        outlook: the same situation in numbers: the plan in force, who is live, and what things cost.
        policy: name of a policy.
        rate: how soon the next failure is to be expected.
        prepared: what was decided on this beforehand; None if nothing was.
        decide_s: asked what deciding takes in all, when it has been weighed; see `recovery.decide`.

    Raises:
        NoHolderError: layers are held by nobody and there is no checkpoint.
        ControlError: nothing else can be done, and there is no checkpoint; or the survivors' states do not fit
            together, which the commit protocol rules out.
    """
    if not outlook.lost and not situation.newcomers:
        return _again(situation, outlook)
    weighed = prepared or recovery.decide(outlook, policy, rate, decide_s=decide_s)
    if weighed.chosen is None or weighed.course is None:
        return _fall_back(situation, outlook, weighed)
    course = weighed.course
    if course.transfer is None and not situation.checkpoints and outlook.has_checkpoints:
        # There will be checkpoints, but none is complete yet.
        outlook = replace(outlook, has_checkpoints=False)
        return decide(situation, outlook, policy=policy, rate=rate, decide_s=decide_s)
    if course.transfer is None:
        anew = _from_checkpoint(
            situation, outlook, weighed, course.plan, ceiling=course.in_flight_limits, policy=weighed.chosen.policy
        )
        return replace(anew, program=course.program, prepared=prepared is not None)
    first_step, vote = _resume_point(situation)
    # What was decided beforehand is for workers that hold their part of the placement in force and no more.
    is_as_planned = prepared is None or outlook.held == outlook.placement
    transition = _transition(situation, course.plan, outlook, transfer=course.transfer if is_as_planned else None)
    return Decision(
        plan=course.plan,
        ceiling=course.in_flight_limits,
        first_step=first_step,
        load="keep",
        roll_forward=vote,
        policy=weighed.chosen.policy,
        action=_in_words(situation.plan, course.plan, transition, outlook.lost, first_step, rolls=vote is not None),
        transition=transition,
        program=course.program,
        weighed=weighed,
        prepared=prepared is not None,
    )


def _again(situation: Situation, outlook: recovery.DecisionContext) -> Decision:
    first_step, vote = _resume_point(situation)
    plan = situation.plan
    return Decision(
        plan=plan,
        ceiling=outlook.in_flight_limits,
        first_step=first_step,
        load="keep",
        roll_forward=vote,
        policy="again",
        action=_in_words(plan, plan, None, (), first_step, rolls=vote is not None),
    )


def _transition(
    situation: Situation, plan: Plan, outlook: recovery.DecisionContext, *, transfer: Transfer | None = None
) -> PlannedTransition | None:
    layers = outlook.costs.workload.layers
    return plan_transition(
        situation.plan.placement, plan.placement, held=situation.held, layers=layers, transfer=transfer
    )


def _resume_point(situation: Situation) -> tuple[int, Vote | None]:
    """Return (the step to run next, the vote by which workers that have not applied the step before it do so)."""
    # Not of spares, whose state may be of a time that was given up.
    states = [situation.parked[worker] for worker in situation.plan.workers if worker in situation.parked]
    first_step = max((situation.committed, *(state.committed for state in states)))
    behind = [state for state in states if state.committed < first_step]
    if not behind:
        return first_step, None
    if any(state.committed != first_step - 1 or not state.reduced for state in behind):
        raise ControlError(f"some workers cannot follow the others to step {first_step}: {behind}")
    votes = [state.last_vote for state in states if state.committed == first_step and state.last_vote is not None]
    vote = votes[0] if votes else situation.last_vote
    if vote is None:
        raise ControlError(f"step {first_step - 1} was applied by some worker, but its vote is not known")
    return first_step, vote


def _fall_back(situation: Situation, outlook: recovery.DecisionContext, weighed: recovery.Decision) -> Decision:
    """Nothing can be done with the placement in force."""
    lost_layers = outlook.placement.unheld_layers
    plan = largest_symmetric_layout(
        live=sorted(situation.live),
        layer_costs=[cost.forward_s + cost.backward_s for cost in outlook.costs.workload.layers],
        micro_batches=outlook.costs.workload.micro_batches,
        preferred_pp=max(len(route.hops) for route in situation.plan.routes),
        split_backward=situation.plan.split_backward,
    )
    if lost_layers and not placement_of(situation.held, plan.placement.num_layers).unheld_layers:
        return _salvaged(situation, outlook, weighed, plan)
    if not situation.checkpoints and not lost_layers:
        reasons = "; ".join(f"{each.policy}: {each.reason}" for each in weighed.candidates)
        raise ControlError(f"nothing that the policy proposes can be done ({reasons}), and there is no checkpoint")
    return _from_checkpoint(situation, outlook, weighed, plan, ceiling=default_limits(plan), policy="checkpoint")


def _salvaged(
    situation: Situation, outlook: recovery.DecisionContext, weighed: recovery.Decision, plan: Plan
) -> Decision:
    """A transition that failed has left copies of layers whose holders are all lost: go on with these."""
    layers, cluster = outlook.costs.workload.layers, outlook.costs.cluster
    held = placement_of(situation.held, len(layers))
    plan = remap_plan(plan, plan_transfer(held, plan.placement, kinds=worker_kinds(cluster), layers=layers).roles)
    first_step, vote = _resume_point(situation)
    transition = _transition(situation, plan, outlook)
    return Decision(
        plan=plan,
        ceiling=default_limits(plan),
        first_step=first_step,
        load="keep",
        roll_forward=vote,
        policy="salvage",
        action=_in_words(situation.plan, plan, transition, outlook.lost, first_step, rolls=vote is not None),
        transition=transition,
        weighed=weighed,
    )


def _from_checkpoint(
    situation: Situation,
    outlook: recovery.DecisionContext,
    weighed: recovery.Decision,
    plan: Plan,
    *,
    ceiling: Mapping[int, InFlightLimit],
    policy: str,
) -> Decision:
    lost_layers = outlook.placement.unheld_layers
    if not situation.checkpoints:
        if lost_layers:
            raise NoHolderError(lost_layers)
        raise ControlError(
            f"{policy} begins anew from a checkpoint, and this run has no complete one: set checkpoint.every, or take "
            "another recovery.policy"
        )
    step = situation.checkpoints[-1]
    reached = [situation.parked[worker].committed for worker in situation.plan.workers if worker in situation.parked]
    repeated = max((situation.committed, *reached)) - step
    why = f"nobody holds layers {in_ranges(lost_layers)} any more: " if lost_layers else ""
    return Decision(
        plan=plan,
        ceiling=ceiling,
        first_step=step,
        load=step,
        roll_forward=None,
        policy=policy,
        action=(
            f"{why}back to the checkpoint of step {step}, {pipelines_in_words(plan)}; "
            f"{counted(repeated, 'step')} repeated"
        ),
        weighed=weighed,
        lost_layers=lost_layers,
    )


def _in_words(
    before: Plan,
    plan: Plan,
    transition: PlannedTransition | None,
    lost: Sequence[int],
    first_step: int,
    *,
    rolls: bool,
) -> str:
    what = f"step {first_step - 1} applied, " if rolls else ""
    if transition is None:
        return what + _rerouted_in_words(before, plan, lost, first_step)
    messages = transition.transfer.messages
    moved = (
        f"{counted(sum(len(message.layers) for message in messages), 'layer')} to "
        f"{counted(len({message.destination for message in messages}), 'worker')} "
        f"in {counted(len(transition.transfer.rounds), 'round')}"
        if messages
        else "no weights move"
    )
    return f"{what}{pipelines_in_words(plan)}; {moved}; on with step {first_step}"


def _rerouted_in_words(before: Plan, plan: Plan, lost: Sequence[int], first_step: int) -> str:
    moved = sum(1 for new, old in zip(plan.routes, before.routes, strict=True) if new.hops != old.hops)
    helpers = {
        hop.worker
        for new, old in zip(plan.routes, before.routes, strict=True)
        for hop in new.hops
        if hop not in old.hops
    }
    if not moved:
        return f"on with step {first_step} and the same routes"
    names = ", ".join(map(str, sorted(helpers)))
    return (
        f"{moved} micro-batches of worker{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} "
        f"go through worker{'s' if len(helpers) > 1 else ''} {names}; no weights move; on with step {first_step}"
    )
