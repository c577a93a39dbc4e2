"""The next generation after workers are lost or join: a pure function of the cluster state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from chameleon_ft import recovery
from chameleon_ft.coordinator.decisions.cluster_state import IN_PLACE, ClusterState, SpeculativeDecision, without_search
from chameleon_ft.cost.transition import received_layers
from chameleon_ft.errors import ControlError, NoHolderError, NoOwnerError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.layouts import disjoint_pipelines
from chameleon_ft.plan.snapshots import Restoration
from chameleon_ft.plan.vote import Vote
from chameleon_ft.quantities import counted, in_ranges, listed
from chameleon_ft.recovery import FailureModel, largest_symmetric_layout
from chameleon_ft.recovery.generation import GenerationSpec, PlannedRest, checked_program
from chameleon_ft.recovery.transition import PlannedTransition, placement_of, plan_transition
from chameleon_ft.schedule import InFlightLimit, Program, check_program, default_limits
from chameleon_ft.transfer import Transfer, plan_transfer, remap_plan, worker_kinds


def decide(
    cluster: ClusterState,
    context: recovery.DecisionContext,
    *,
    policy: str,
    rate: FailureModel,
    prepared: recovery.Decision | None = None,
    decide_s: Callable[[], float] | None = None,
) -> tuple[GenerationSpec, recovery.Decision | None]:
    """Choose how to continue; if no proposal of the policy is feasible, return to the newest checkpoint.

    Returns the next generation, and the decision that led to it. If no worker is lost, none has joined and nothing is
    prepared, there is nothing to choose, and no decision: the current plan is retried.

    Args:
        context: the cluster in numbers: the plan in force, the live workers, and all costs.
        policy: name of a policy.
        rate: model of the next failure.
        prepared: the decision, if it was made beforehand.
        decide_s: returns the duration of the decision once the candidates are measured; see `recovery.decide`.

    Raises:
        NoHolderError: no worker holds some layers, and there is no checkpoint.
        ControlError: no plan is feasible and there is no checkpoint; or the survivors' states are inconsistent, which
            the commit protocol rules out.
    """
    if cluster.is_unloaded:
        return _reload(cluster, context), None
    if cluster.ownerless_layers:
        return _without_owners(cluster, context), None
    if not context.lost and not cluster.newcomers and prepared is None:
        return _keep(cluster, context, _Layout(cluster.plan, context.in_flight_limits), "again"), None
    decision = prepared or recovery.decide(context, policy, rate, decide_s=decide_s)
    course, chosen = decision.course, decision.chosen
    if chosen is None or course is None:
        return _fall_back(cluster, context, decision), decision
    layout = _Layout(course.plan, course.in_flight_limits, course.program, is_checked=prepared is not None)
    if course.transfer is None and cluster.source is None and context.has_checkpoints:
        # There will be checkpoints, but none is complete yet.
        context = replace(context, has_checkpoints=False)
        return decide(cluster, context, policy=policy, rate=rate, decide_s=decide_s)
    if course.transfer is None:
        return _go_back(cluster, context, layout, chosen.policy), decision
    # A prepared transfer assumes that each worker holds exactly its part of the placement in force.
    is_as_planned = prepared is None or context.held == context.placement
    transition = _transition(cluster, course.plan, context, transfer=course.transfer if is_as_planned else None)
    return _keep(cluster, context, layout, chosen.policy, transition=transition), decision


def decide_in_place(
    cluster: ClusterState,
    context: recovery.DecisionContext,
    salvaged: recovery.SalvagedStep | None,
    *,
    rate: FailureModel,
    is_reviewed: bool,
    speculative: SpeculativeDecision | None = None,
    decide_s: Callable[[], float] | None = None,
) -> tuple[GenerationSpec, recovery.Decision | None] | None:
    """Choose how to continue at once, without moving layers; None if that is not feasible. Returns as `decide`.

    Args:
        cluster, context, rate, decide_s: as for `decide`.
        salvaged: the rest of the interrupted step, if it is completed.
        is_reviewed: whether a search for a better plan follows, so that there is none now.
        speculative: a decision that was made before the survivors had reported; used if it fits what they hold.
    """
    if cluster.ownerless_layers:
        return None
    layout, policy, decision = _Layout(cluster.plan, context.in_flight_limits), "again", None
    if context.lost:
        known = speculative and speculative.rescored(context, rate, is_reviewed=is_reviewed, decide_s=decide_s)
        quick = without_search(context) if is_reviewed else context
        decision = known or recovery.decide(quick, IN_PLACE, rate, decide_s=decide_s)
        course = decision.course
        if course is None or course.transfer is None or course.transfer.messages:
            return None
        layout = _Layout(course.plan, course.in_flight_limits, course.program, is_checked=known is not None)
        policy = IN_PLACE
    spec = _keep(cluster, context, layout, policy)
    if salvaged is None:
        return spec, decision
    rest = PlannedRest(
        remaining=salvaged.rest,
        program=salvaged.scheduled.program,
        resends=salvaged.scheduled.resends,
        rest_s=salvaged.rest_s,
    )
    share = f"{salvaged.repeated_share:.1%}"
    action = f"{spec.action}, of which {'nothing' if share == '0.0%' else share} is repeated"
    return replace(spec, rest=rest, action=action), decision


@dataclass(frozen=True, slots=True)
class _Layout:
    """A plan with its limits, and its program if it is known.

    Attributes:
        is_checked: The program was checked before the workers quiesced.
    """

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    program: Program | None = None
    is_checked: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return a plan with the usual limits."""
        return cls(plan, default_limits(plan))

    def generation(self, context: recovery.DecisionContext, **fields: Any) -> GenerationSpec:
        """Return a generation of the plan, whose program is checked, with these fields."""
        program = self.program
        if program is None:
            program = checked_program(self.plan, context.costs, self.in_flight_limits)
        elif not self.is_checked:
            check_program(program, self.plan)
        return GenerationSpec(
            plan=self.plan, program=program, costs=context.costs, in_flight_limits=self.in_flight_limits, **fields
        )


def _keep(
    cluster: ClusterState,
    context: recovery.DecisionContext,
    layout: _Layout,
    policy: str,
    *,
    transition: PlannedTransition | None = None,
) -> GenerationSpec:
    """Return a generation that continues from the workers' state."""
    first_step, vote = _resume_point(cluster)
    applied = "" if vote is None else f"step {first_step - 1} applied, "
    if transition is None:
        action = _describe_reroute(cluster.plan, layout.plan, context.lost, first_step)
    else:
        moved = describe_transfer(transition.transfer, stops=True)
        action = f"{describe_pipelines(layout.plan)}; {moved}; resumes at step {first_step}"
    return layout.generation(
        context,
        first_step=first_step,
        roll_forward=vote,
        policy=policy,
        action=applied + action,
        transition=transition,
        gather=cluster.sharding is not None
        and (vote is not None or not all(report.gathered for report in cluster.quiesced.values())),
    )


def _transition(
    cluster: ClusterState, plan: Plan, context: recovery.DecisionContext, *, transfer: Transfer | None = None
) -> PlannedTransition | None:
    layers = received_layers(context.costs.workload, plan.placement)
    return plan_transition(cluster.plan.placement, plan.placement, held=cluster.held, layers=layers, transfer=transfer)


def _resume_point(cluster: ClusterState) -> tuple[int, Vote | None]:
    """Return (the next step, the vote with which lagging workers apply the step before it, if any lag)."""
    # Spares are left out, because their state may date from before a rollback.
    states = [cluster.quiesced[worker] for worker in cluster.survivors]
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


def _reload(cluster: ClusterState, context: recovery.DecisionContext) -> GenerationSpec:
    """Return the present plan, or new pipelines if it has lost workers, from the newest state that is left.

    If no step was trained, and there is none, all begin with fresh weights.
    """
    layout = _Layout(cluster.plan, context.in_flight_limits)
    if not set(cluster.plan.workers) <= set(cluster.live):
        layout = _Layout.of(_largest_layout(cluster, context))
    if cluster.source is not None:
        return _go_back(cluster, context, layout, None)
    if cluster.committed == 0 and cluster.last_vote is None:
        action = f"from the beginning, {describe_pipelines(layout.plan)}"
        return layout.generation(context, first_step=0, load="initial", policy="again", action=action)
    if cluster.disagreement is not None:
        raise ControlError(f"{cluster.disagreement}, and there is no checkpoint from before")
    raise ControlError("no checkpoint is left that can be read")


def _without_owners(cluster: ClusterState, context: recovery.DecisionContext) -> GenerationSpec:
    """Return new pipelines from an earlier state, because slices of the optimizer's state have no owner left.

    Raises:
        NoHolderError: there is no such state. It names the layers that no live worker holds at all, if there are some.
    """
    if cluster.source is None:
        if unheld := placement_of(cluster.held, len(context.costs.workload.layers)).unheld_layers:
            raise NoHolderError(unheld)
        raise NoOwnerError(cluster.ownerless_layers)
    return _go_back(cluster, context, _Layout.of(_largest_layout(cluster, context)), None)


def _largest_layout(cluster: ClusterState, context: recovery.DecisionContext) -> Plan:
    return largest_symmetric_layout(
        live=sorted(cluster.live),
        layer_costs=context.costs.workload.layer_times_s,
        micro_batches=context.costs.workload.micro_batches,
        preferred_pp=max(len(route.hops) for route in cluster.plan.routes),
        split_backward=cluster.plan.split_backward,
    )


def _fall_back(cluster: ClusterState, context: recovery.DecisionContext, decision: recovery.Decision) -> GenerationSpec:
    """Return new pipelines if no candidate is feasible, from the remaining copies or from an earlier state."""
    layers, lost_layers = context.costs.workload.layers, context.placement.unheld_layers
    plan = _largest_layout(cluster, context)
    held = placement_of(cluster.held, len(layers))
    if lost_layers and not held.unheld_layers:
        # A failed transition has left copies of layers whose other holders are all lost.
        kinds = worker_kinds(context.costs.cluster)
        plan = remap_plan(plan, plan_transfer(held, plan.placement, kinds=kinds, layers=layers).roles)
        transition = _transition(cluster, plan, context)
        return _keep(cluster, context, _Layout.of(plan), "from-copies", transition=transition)
    if cluster.source is not None or lost_layers:
        return _go_back(cluster, context, _Layout.of(plan), None)
    reasons = "; ".join(f"{each.policy}: {each.reason}" for each in decision.candidates)
    raise ControlError(f"nothing that the policy proposes can be done ({reasons}), and there is no checkpoint")


def _go_back(
    cluster: ClusterState,
    context: recovery.DecisionContext,
    layout: _Layout,
    policy: str | None,
) -> GenerationSpec:
    """Return a generation that begins with the newest state before the present one; see `ClusterState.source`.

    Args:
        policy: what has proposed the plan; None: nothing else could be done.
    """
    lost_layers, load, step = context.placement.unheld_layers, cluster.source, cluster.source_step
    if load is None:
        if lost_layers:
            raise NoHolderError(lost_layers)
        raise ControlError(
            f"{policy} begins anew from a checkpoint, and this run has no complete one: set checkpoint.every, or take "
            "another recovery.policy"
        )
    reached = [cluster.quiesced[worker].committed for worker in cluster.survivors]
    repeated = counted(max((cluster.committed, *reached)) - step, "step")
    why = f"no worker holds layers {in_ranges(lost_layers)} any more: " if lost_layers else ""
    if cluster.ownerless_layers and not lost_layers:
        why = f"the optimizer's state of layers {in_ranges(cluster.ownerless_layers)} is lost: "
    why = why if cluster.disagreement is None else f"{cluster.disagreement}: {why}"
    kind = "snapshot" if load == "snapshot" else "checkpoint"
    source = "the beginning" if load == "initial" else f"the {kind} of step {step}"
    back: dict[str, Any] = {}
    if load == "snapshot":
        layout, back["transition"], back["restoration"] = _to_snapshot(layout, cluster, context)
    return layout.generation(
        context,
        first_step=step,
        load=load,
        policy=policy or ("checkpoint" if isinstance(load, int) else "snapshot"),
        action=f"{why}back to {source}, {describe_pipelines(layout.plan)}; {repeated} repeated",
        lost_layers=lost_layers,
        **back,
    )


def _to_snapshot(
    layout: _Layout, cluster: ClusterState, context: recovery.DecisionContext
) -> tuple[_Layout, PlannedTransition, Restoration]:
    """Return the way back to the snapshot: parts are made again, then layers move as in any transition.

    Other workers may take the places of a plan that differs from the present one.
    """
    restoration = None if cluster.snapshot is None else cluster.snapshot.restoration
    assert restoration is not None
    layers, plan = context.costs.workload.layers, layout.plan
    held = {worker: restoration.held.get(worker, ()) for worker in sorted(cluster.live)}
    kept = placement_of(held, len(layers))
    if plan != cluster.plan:
        roles = plan_transfer(kept, plan.placement, kinds=worker_kinds(context.costs.cluster), layers=layers).roles
        plan = remap_plan(plan, roles)
        limits = FrozenMap({roles.get(worker, worker): limit for worker, limit in layout.in_flight_limits.items()})
        if plan != layout.plan:
            layout = _Layout(plan, limits)
    transition = plan_transition(kept, plan.placement, held=held, layers=layers, moves_slices=True)
    assert transition is not None
    participants = {*transition.participants, *restoration.senders}
    transition = replace(
        transition,
        participants=tuple(sorted(participants)),
        keep=FrozenMap({worker: transition.keep.get(worker, ()) for worker in sorted(participants)}),
    )
    return layout, transition, restoration


def describe_transfer(transfer: Transfer, *, stops: bool) -> str:
    """Describe what moves: "4 layers to 2 workers in 1 round" if training `stops`, else "... during training"."""
    if not (messages := transfer.messages):
        return "no weights move"
    layers = counted(sum(len(message.layers) for message in messages), "layer")
    workers = counted(len({message.destination for message in messages}), "worker")
    how = f"in {counted(len(transfer.rounds), 'round')}" if stops else "during training"
    return f"{layers} to {workers} {how}"


def _describe_reroute(before: Plan, plan: Plan, lost: Sequence[int], first_step: int) -> str:
    changed = [(new, old) for new, old in zip(plan.routes, before.routes, strict=True) if new.hops != old.hops]
    if not changed:
        return f"resumes at step {first_step} with the same routes"
    helpers = sorted({hop.worker for new, old in changed for hop in new.hops if hop not in old.hops})
    return (
        f"{len(changed)} micro-batches of {listed('worker', lost)} go through {listed('worker', helpers)}; "
        f"no weights move; resumes at step {first_step}"
    )


def describe_pipelines(plan: Plan) -> str:
    """Describe the pipelines: "4 pipelines of 2 stages", or "3 pipelines: 2 of 3 stages, 1 of 1 stage; 2 detours".

    A detour is any other path that micro-batches take.
    """
    pipelines = disjoint_pipelines(plan)
    depths = sorted(Counter(map(len, pipelines)).items(), key=lambda item: (-item[1], -item[0]))
    each = [f"{count} of {counted(depth, 'stage')}" for depth, count in depths]
    total = counted(len(pipelines), "pipeline")
    text = f"{total} of {counted(depths[0][0], 'stage')}" if len(depths) == 1 else f"{total}: {', '.join(each)}"
    detours = len({route.hops for route in plan.routes}) - len(pipelines)
    return f"{text}; {counted(detours, 'detour')}" if detours else text
