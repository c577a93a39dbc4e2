"""Scoring: predictions for proposals, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from chameleon_ft.errors import NoHolderError
from chameleon_ft.estimate import TransitionEstimate, snapshots_fit, workload_memory
from chameleon_ft.estimate.transition import received_layers, state_bytes
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import ROUNDING, data_size
from chameleon_ft.recovery.courses import CourseDraft
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.loss_risk import LossRisk, risk_of
from chameleon_ft.recovery.proposals.proposal import Proposal
from chameleon_ft.recovery.prospect import Prospect
from chameleon_ft.transfer import Transfer, missing_between, transfer_s, transfer_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The predictions for a proposal. Without a plan, all figures but the samples are None.

    Attributes:
        policy: name of the proposal.
        step_s: seconds of a step, until all gradients are reduced, times `step_factor`.
        peak_bytes: the highest memory use of any worker.
        stall_s: seconds without progress: the phases of the stall, the transfer, and repeated work of the interrupted
            step.
        transfer_s: seconds of these in which state moves.
        migration_s: seconds after the stall in which state moves while another plan trains; zero for none.
        migration_step_s: seconds of a step of that plan, times `step_factor`; if there are several, the mean over the
            steps.
        delay_s: seconds by which the present step takes longer because layers arrive in it.
        waves: in how many waves; zero for none. See `waves_to`.
        needs_switch: whether a switch comes before the first layers move: it takes in workers without layers, or makes
            room with fewer micro-batches in flight.
        moved_bytes: parameters and optimizer state that workers receive, or read.
        risk: which workers and hosts hold the layers.
        from_checkpoint: whether the state is read from a checkpoint.
        has_snapshots: whether snapshots are taken under it, if the run takes any.
        fatal_share: probability that the next incident makes a return to a checkpoint necessary.
        return_s: expected seconds of that return, repeated work included.
        shared_s: expected seconds by which the step that the incident interrupts takes longer; see `Expected`.
        samples: expected samples until the next incident, less the expected cost of that incident: B times the steps of
            `Prospect.of_plan`. Negative if the cost is larger; zero if the candidate is not feasible.
        reason: why it cannot be chosen; None if it can.
    """

    policy: str
    step_s: float | None = None
    peak_bytes: int | None = None
    stall_s: float | None = None
    transfer_s: float | None = None
    migration_s: float = 0.0
    migration_step_s: float = math.inf
    delay_s: float = 0.0
    waves: int = 0
    needs_switch: bool = False
    moved_bytes: int | None = None
    risk: LossRisk | None = None
    from_checkpoint: bool = False
    has_snapshots: bool = True
    fatal_share: float = 0.0
    return_s: float = 0.0
    shared_s: float = 0.0
    samples: float = 0.0
    reason: str | None = None

    @property
    def feasible(self) -> bool:
        """Whether it can be chosen."""
        return self.reason is None

    @property
    def migrating_s(self) -> float:
        """Expected seconds after the stall until the candidate's own plan trains, beyond the end of the present step.

        A switch comes at the end of a step. A migration that begins in the present step and takes a fraction of a step
        makes one step more necessary with that probability; one that begins with a step takes whole steps.
        """
        if not self.needs_switch or not self.migration_s:
            return self.migration_s
        return math.ceil(self.migration_s / self.migration_step_s) * self.migration_step_s

    @property
    def worker_single_points_of_failure(self) -> int:
        """How many workers are the only holder of some layer."""
        return 0 if self.risk is None else self.risk.workers.singles

    @property
    def host_single_points_of_failure(self) -> int:
        """How many hosts have all holders of some layer; zero if there is only one host."""
        return 0 if self.risk is None or self.risk.hosts is None else self.risk.hosts.singles


def measure(proposal: Proposal, context: DecisionContext) -> tuple[Candidate, CourseDraft | None]:
    """Return the predictions for a proposal except for its samples, and a draft of its course if it fits the memory.

    There is a draft too if only a transfer that stops training does not fit, because layers may move in waves.
    """
    plan = proposal.plan
    if plan is None:
        return Candidate(policy=proposal.name, reason=proposal.reason), None
    cluster = context.costs.cluster
    if gone := sorted(set(plan.workers).difference(context.live)):
        return Candidate(policy=proposal.name, reason=f"it needs workers that are not live: {gone}"), None
    transfer: Transfer | None = None
    if not proposal.from_checkpoint:
        try:
            layers = received_layers(context.costs.workload, plan.placement)
            transfer = transfer_to(context.held, plan.placement, live=context.senders.hosts, layers=layers)
        except NoHolderError as error:
            return Candidate(policy=proposal.name, reason=str(error)), None
    stays = is_noop(proposal, context)
    draft = CourseDraft.of(plan, proposal.in_flight_limits, context.costs, proposal.schedules)
    if not stays and draft.estimate.over_capacity(context.costs):
        draft = CourseDraft.lean(plan, context.costs)
    plan, estimate = draft.plan, draft.estimate
    moves_s = 0.0 if transfer is None else transfer_s(transfer.rounds, context.senders) * context.transfer_factor
    if stays:
        stall_s = 0.0
    elif proposal.from_checkpoint:
        stall_s = context.return_s
    else:
        stall_s = TransitionEstimate(phases=context.phases, transfer_s=moves_s, repeat_s=context.repeat_s).lost_s
    # The running plan fits, whatever the estimate.
    missing = None if stays else _describe_missing(estimate.over_capacity(context.costs), "in a step")
    candidate = Candidate(
        policy=proposal.name,
        step_s=estimate.step_s * context.step_factor,
        peak_bytes=max(estimate.peak_bytes.values()),
        stall_s=stall_s,
        transfer_s=moves_s,
        moved_bytes=_state_bytes(plan, context) if transfer is None else transfer.total_bytes,
        risk=risk_of(plan.placement, cluster.hosts, context.costs.workload.owners),
        from_checkpoint=proposal.from_checkpoint,
        has_snapshots=_has_snapshots(plan, context),
        reason=missing or _describe_missing(missing_in_transfer(transfer, context), "while layers move"),
    )
    return candidate, None if missing else replace(draft, transfer=transfer)


def _has_snapshots(plan: Plan, context: DecisionContext) -> bool:
    if context.snapshots is None:
        return True
    costs = context.costs
    return snapshots_fit(plan.placement, costs.workload, costs.cluster.hosts, context.snapshots.rule)


def remeasure(candidate: Candidate, *, before: DecisionContext, now: DecisionContext) -> Candidate:
    """Return the candidate with current times; neither memory nor samples are updated.

    Steps change as the times of layers and `step_factor` do, transfers as `transfer_factor` does, migrations as both
    factors do, and stalls by the difference in phases and repeated work.

    Args:
        candidate: the earlier predictions.
        before: the context of these, except for the live workers.
        now: the present context, with the same active plan.
    """
    if candidate.step_s is None or candidate.stall_s is None or candidate.transfer_s is None:
        return candidate
    work_s, work_before_s = (math.fsum(each.costs.workload.layer_times_s) for each in (now, before))
    slower = now.step_factor / before.step_factor * (work_s / work_before_s)
    slower_transfer = now.transfer_factor / before.transfer_factor
    known_s = before.phases.total_s + before.repeat_s
    later_s = now.phases.total_s + now.repeat_s - known_s
    step_s, stall_s = candidate.step_s * slower, candidate.stall_s
    is_switch = now.migrates and not now.lost and not candidate.transfer_s
    if candidate.from_checkpoint:
        stall_s = now.return_s
    # A plan that continues unchanged has no stall, nor has a switch.
    elif not is_switch and math.isclose(stall_s, known_s + candidate.transfer_s):
        stall_s = max(0.0, stall_s + later_s + candidate.transfer_s * (slower_transfer - 1))
    return replace(
        candidate,
        step_s=step_s,
        stall_s=stall_s,
        transfer_s=candidate.transfer_s * slower_transfer,
        migration_s=candidate.migration_s * now.migration_factor / before.migration_factor,
        migration_step_s=candidate.migration_step_s * slower,
        delay_s=candidate.delay_s * slower,
    )


def score(candidates: Sequence[Candidate], prospect: Prospect, *, samples: int) -> tuple[Candidate, ...]:
    """Return the candidates with their expected samples; see `Prospect.of_plan` for the rule.

    Args:
        candidates: the feasible ones have a step time, a stall and a risk.
        prospect: what lies ahead, whichever is chosen.
        samples: of a step.
    """

    def scored(candidate: Candidate) -> Candidate:
        if not candidate.feasible or candidate.step_s is None or candidate.stall_s is None or candidate.risk is None:
            return candidate
        expected = prospect.of_plan(
            step_s=candidate.step_s,
            stall_s=candidate.stall_s + candidate.delay_s,
            fatal=prospect.failures.fatal_probability(candidate.risk),
            from_checkpoint=candidate.from_checkpoint,
            has_snapshots=candidate.has_snapshots,
            total_loss=prospect.failures.total_loss_probability(candidate.risk),
            share_per_peer=candidate.risk.share_per_peer,
            migration_s=candidate.migrating_s,
            migration_step_s=candidate.migration_step_s,
        )
        return replace(
            candidate,
            fatal_share=expected.fatal_share,
            return_s=expected.return_s,
            shared_s=expected.shared_s,
            samples=samples * expected.steps,
        )

    return tuple(map(scored, candidates))


def best_of(candidates: Sequence[Candidate], prospect: Prospect) -> int | None:
    """Return the index of the candidate to choose; None if none is feasible.

    The most samples win; of equals the fewest moved bytes, then the earliest. If losing a layer ends the run, because
    there are no checkpoints, and no snapshots under a plan, one with workers that are the only holder is chosen only if
    there is no other, and of the others one with such hosts only if no host is expected to fail, or the plans without
    them train nothing.
    """
    feasible = [index for index, candidate in enumerate(candidates) if candidate.feasible]
    if not feasible:
        return None
    if not prospect.has_checkpoints:
        goes_back = {i for i in feasible if prospect.snapshots is not None and candidates[i].has_snapshots}
        feasible = [
            i for i in feasible if i in goes_back or not candidates[i].worker_single_points_of_failure
        ] or feasible
        if prospect.failures.host_failure_fraction:
            feasible = [
                i
                for i in feasible
                if i in goes_back or (candidates[i].samples > 0 and not candidates[i].host_single_points_of_failure)
            ] or feasible
    most = max(candidates[index].samples for index in feasible)
    equals = [index for index in feasible if candidates[index].samples >= most - abs(most) * ROUNDING]
    return min(equals, key=lambda index: (candidates[index].moved_bytes or 0, index))


def is_noop(proposal: Proposal, context: DecisionContext) -> bool:
    """Return whether the proposal is what runs already, so that there is nothing to stop for."""
    if proposal.plan != context.plan or proposal.from_checkpoint or context.lost:
        return False
    limits, present = proposal.in_flight_limits, context.in_flight_limits
    return all(limits.get(worker) == present.get(worker) for worker in context.plan.workers)


def _describe_missing(missing: Mapping[int, float], when: str) -> str | None:
    """Return why a plan does not fit the memory, from the bytes that workers lack; None if it does."""
    if not missing:
        return None
    worker = max(missing, key=lambda each: (missing[each], -each))
    others = f", and {len(missing) - 1} others need more too" if len(missing) > 1 else ""
    return f"memory: worker {worker} needs {data_size(missing[worker])} more {when}{others}"


def missing_in_transfer(transfer: Transfer | None, context: DecisionContext) -> dict[int, float]:
    """Return the bytes that each worker lacks to hold its old layers, with gradients, beside those that it receives."""
    if transfer is None:
        return {}
    workload, cluster = context.costs.workload, context.costs.cluster
    memory, placements = workload_memory(workload), (context.placement, transfer.placement)
    uses = [memory.state_of(((layer,),), *placements) for layer in range(len(workload.layers))]
    held_bytes = list(accumulate((use.total_bytes - use.sample_bytes for use in uses), initial=0))
    gradient_bytes = accumulate((use.gradient_bytes for use in uses), initial=0)
    without_gradients = [held - gradients for held, gradients in zip(held_bytes, gradient_bytes, strict=True)]
    missing: dict[int, float] = {}
    for worker, ranges in transfer.placement.ranges.items():
        had = context.placement.ranges_of(worker)
        if received := missing_between(had, ranges, without_gradients):
            held = sum(held_bytes[own.stop] - held_bytes[own.start] for own in had)
            if (short := held + received - cluster.capacity_bytes(worker)) > 0:
                missing[worker] = short
    return missing


def _state_bytes(plan: Plan, context: DecisionContext) -> int:
    """Return the bytes of parameters and optimizer state of all copies of the layers."""
    layers = context.costs.workload.layers
    return sum(
        state_bytes(layers[layer]) for ranges in plan.placement.ranges.values() for own in ranges for layer in own
    )
