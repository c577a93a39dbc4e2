"""The recovery plan after workers are lost or have joined: a pure function of the cluster state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from chameleon_ft import recovery
from chameleon_ft.control.decisions.transition import PlannedTransition, placement_of, plan_transition
from chameleon_ft.control.formatting import describe_pipelines
from chameleon_ft.control.state.active_plan import ActivePlan, MovedLayers
from chameleon_ft.control.wire.messages import Quiesced, Vote
from chameleon_ft.errors import ControlError, NoHolderError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import counted, in_ranges
from chameleon_ft.recovery import FailureModel, largest_symmetric_layout
from chameleon_ft.schedule import InFlightLimit, Program, default_limits
from chameleon_ft.transfer import Transfer, plan_transfer, remap_plan, worker_kinds

__all__ = ["ClusterState", "RecoveryPlan", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The state of the cluster once all survivors have quiesced.

    Attributes:
        plan: the plan whose placement is in force.
        live: workers that can go on, spares included.
        quiesced: what each of them reported that it holds.
        committed: steps known to be applied by some worker, alive or not.
        last_vote: the vote of step ``committed - 1``, if a worker has reported it.
        checkpoints: steps that complete checkpoints resume at, ascending.
        newcomers: those of the live workers that have come since the last decision.
    """

    plan: Plan
    live: Collection[int]
    quiesced: Mapping[int, Quiesced]
    committed: int
    last_vote: Vote | None
    checkpoints: Sequence[int] = ()
    newcomers: Collection[int] = ()

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """Every live worker -> the layers that it holds; what one outside the plan may have is of an earlier step."""
        return {w: self.quiesced[w].layers if w in self.plan.placement.ranges else () for w in sorted(self.live)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The next work of every worker. `policy` and `action` describe it to people.

    Attributes:
        plan: what is trained.
        ceiling: what its workers can keep at most.
        first_step: the step to run next.
        load: where the layers' state comes from: fresh weights, what workers hold, or the checkpoint of this step.
        roll_forward: the vote by which workers apply step ``first_step - 1`` that have not.
        transition: how the placement changes; None if it does not.
        program: of the plan, if it is known already.
        weighed: all that was considered; None if there was nothing to choose.
        prepared: whether that was before the workers quiesced; `program` has been checked then.
        lost_layers: layers that no worker holds any more.
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

    def active(self) -> ActivePlan:
        """Return what is still of interest once it is being carried out."""
        transfer = None if self.transition is None else self.transition.transfer
        return ActivePlan(
            plan=self.plan,
            ceiling=self.ceiling,
            first_step=self.first_step,
            policy=self.policy,
            action=self.action,
            everyone=self.everyone,
            moved=None
            if transfer is None
            else MovedLayers(
                layers=sum(len(message.layers) for message in transfer.messages),
                messages=len(transfer.messages),
                rounds=len(transfer.rounds),
                num_bytes=transfer.total_bytes,
            ),
            lost_layers=self.lost_layers,
        )

    def to_json(self) -> dict[str, object]:
        """The fields of the event `decision`, but for its generation and the seconds that it took."""
        weighed = {} if self.weighed is None else self.weighed.to_json()
        return {"prepared": self.prepared, **self.known, **weighed}


def decide(
    cluster: ClusterState,
    context: recovery.DecisionContext,
    *,
    policy: str,
    rate: FailureModel,
    prepared: recovery.Decision | None = None,
    decide_s: Callable[[], float] | None = None,
) -> RecoveryPlan:
    """Choose how to continue; if nothing that the policy proposes can be done, return to the newest checkpoint.

    If no worker is lost and none has joined, there is nothing to choose: the plan is tried again.

    Args:
        context: the cluster in numbers: the plan in force, the live workers, and what things cost.
        policy: name of a policy.
        rate: how soon the next failure is to be expected.
        prepared: what was decided on this beforehand; None if nothing was.
        decide_s: asked what deciding takes in all, when it has been weighed; see `recovery.decide`.

    Raises:
        NoHolderError: layers are held by no worker and there is no checkpoint.
        ControlError: nothing else can be done, and there is no checkpoint; or the survivors' states do not fit
            together, which the commit protocol rules out.
    """
    if not context.lost and not cluster.newcomers:
        return _again(cluster, context)
    weighed = prepared or recovery.decide(context, policy, rate, decide_s=decide_s)
    if weighed.chosen is None or weighed.course is None:
        return _fall_back(cluster, context, weighed)
    course = weighed.course
    if course.transfer is None and not cluster.checkpoints and context.has_checkpoints:
        # There will be checkpoints, but none is complete yet.
        context = replace(context, has_checkpoints=False)
        return decide(cluster, context, policy=policy, rate=rate, decide_s=decide_s)
    if course.transfer is None:
        anew = _from_checkpoint(
            cluster, context, weighed, course.plan, ceiling=course.in_flight_limits, policy=weighed.chosen.policy
        )
        return replace(anew, program=course.program, prepared=prepared is not None)
    first_step, vote = _resume_point(cluster)
    # What was decided beforehand is for workers that hold their part of the placement in force and no more.
    is_as_planned = prepared is None or context.held == context.placement
    transition = _transition(cluster, course.plan, context, transfer=course.transfer if is_as_planned else None)
    return RecoveryPlan(
        plan=course.plan,
        ceiling=course.in_flight_limits,
        first_step=first_step,
        load="keep",
        roll_forward=vote,
        policy=weighed.chosen.policy,
        action=_describe_action(
            cluster.plan, course.plan, transition, context.lost, first_step, rolls=vote is not None
        ),
        transition=transition,
        program=course.program,
        weighed=weighed,
        prepared=prepared is not None,
    )


def _again(cluster: ClusterState, context: recovery.DecisionContext) -> RecoveryPlan:
    first_step, vote = _resume_point(cluster)
    plan = cluster.plan
    return RecoveryPlan(
        plan=plan,
        ceiling=context.in_flight_limits,
        first_step=first_step,
        load="keep",
        roll_forward=vote,
        policy="again",
        action=_describe_action(plan, plan, None, (), first_step, rolls=vote is not None),
    )


def _transition(
    cluster: ClusterState, plan: Plan, context: recovery.DecisionContext, *, transfer: Transfer | None = None
) -> PlannedTransition | None:
    layers = context.costs.workload.layers
    return plan_transition(cluster.plan.placement, plan.placement, held=cluster.held, layers=layers, transfer=transfer)


def _resume_point(cluster: ClusterState) -> tuple[int, Vote | None]:
    """Return (the step to run next, the vote by which workers that have not applied the step before it do so)."""
    # Not of spares, whose state may be of a time that was given up.
    states = [cluster.quiesced[worker] for worker in cluster.plan.workers if worker in cluster.quiesced]
    first_step = max((cluster.committed, *(state.committed for state in states)))
    behind = [state for state in states if state.committed < first_step]
    if not behind:
        return first_step, None
    if any(state.committed != first_step - 1 or not state.reduced for state in behind):
        raise ControlError(f"some workers cannot follow the others to step {first_step}: {behind}")
    votes = [state.last_vote for state in states if state.committed == first_step and state.last_vote is not None]
    vote = votes[0] if votes else cluster.last_vote
    if vote is None:
        raise ControlError(f"step {first_step - 1} was applied by some worker, but its vote is not known")
    return first_step, vote


def _fall_back(cluster: ClusterState, context: recovery.DecisionContext, weighed: recovery.Decision) -> RecoveryPlan:
    """Nothing can be done with the placement in force."""
    lost_layers = context.placement.unheld_layers
    plan = largest_symmetric_layout(
        live=sorted(cluster.live),
        layer_costs=[cost.forward_s + cost.backward_s for cost in context.costs.workload.layers],
        micro_batches=context.costs.workload.micro_batches,
        preferred_pp=max(len(route.hops) for route in cluster.plan.routes),
        split_backward=cluster.plan.split_backward,
    )
    if lost_layers and not placement_of(cluster.held, plan.placement.num_layers).unheld_layers:
        return _salvaged(cluster, context, weighed, plan)
    if not cluster.checkpoints and not lost_layers:
        reasons = "; ".join(f"{each.policy}: {each.reason}" for each in weighed.candidates)
        raise ControlError(f"nothing that the policy proposes can be done ({reasons}), and there is no checkpoint")
    return _from_checkpoint(cluster, context, weighed, plan, ceiling=default_limits(plan), policy="checkpoint")


def _salvaged(
    cluster: ClusterState, context: recovery.DecisionContext, weighed: recovery.Decision, plan: Plan
) -> RecoveryPlan:
    """A failed transition has left copies of layers whose holders are all lost: continue with these."""
    layers, workers = context.costs.workload.layers, context.costs.cluster
    held = placement_of(cluster.held, len(layers))
    plan = remap_plan(plan, plan_transfer(held, plan.placement, kinds=worker_kinds(workers), layers=layers).roles)
    first_step, vote = _resume_point(cluster)
    transition = _transition(cluster, plan, context)
    return RecoveryPlan(
        plan=plan,
        ceiling=default_limits(plan),
        first_step=first_step,
        load="keep",
        roll_forward=vote,
        policy="salvage",
        action=_describe_action(cluster.plan, plan, transition, context.lost, first_step, rolls=vote is not None),
        transition=transition,
        weighed=weighed,
    )


def _from_checkpoint(
    cluster: ClusterState,
    context: recovery.DecisionContext,
    weighed: recovery.Decision,
    plan: Plan,
    *,
    ceiling: Mapping[int, InFlightLimit],
    policy: str,
) -> RecoveryPlan:
    lost_layers = context.placement.unheld_layers
    if not cluster.checkpoints:
        if lost_layers:
            raise NoHolderError(lost_layers)
        raise ControlError(
            f"{policy} begins anew from a checkpoint, and this run has no complete one: set checkpoint.every, or take "
            "another recovery.policy"
        )
    step = cluster.checkpoints[-1]
    reached = [cluster.quiesced[worker].committed for worker in cluster.plan.workers if worker in cluster.quiesced]
    repeated = max((cluster.committed, *reached)) - step
    why = f"nobody holds layers {in_ranges(lost_layers)} any more: " if lost_layers else ""
    return RecoveryPlan(
        plan=plan,
        ceiling=ceiling,
        first_step=step,
        load=step,
        roll_forward=None,
        policy=policy,
        action=(
            f"{why}back to the checkpoint of step {step}, {describe_pipelines(plan)}; "
            f"{counted(repeated, 'step')} repeated"
        ),
        weighed=weighed,
        lost_layers=lost_layers,
    )


def _describe_action(
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
        return what + _describe_reroute(before, plan, lost, first_step)
    messages = transition.transfer.messages
    moved = (
        f"{counted(sum(len(message.layers) for message in messages), 'layer')} to "
        f"{counted(len({message.destination for message in messages}), 'worker')} "
        f"in {counted(len(transition.transfer.rounds), 'round')}"
        if messages
        else "no weights move"
    )
    return f"{what}{describe_pipelines(plan)}; {moved}; on with step {first_step}"


def _describe_reroute(before: Plan, plan: Plan, lost: Sequence[int], first_step: int) -> str:
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
