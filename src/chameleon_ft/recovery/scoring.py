"""Scoring: predictions for proposals, and the rule that ranks them.

A plan is worth its expected steps until the next incident, less the expected cost of that incident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from chameleon_ft.cost.memory import workload_memory
from chameleon_ft.cost.snapshots import snapshots_fit
from chameleon_ft.cost.transition import TransitionEstimate, received_layers, state_bytes
from chameleon_ft.errors import NoHolderError
from chameleon_ft.quantities import ROUNDING, data_size
from chameleon_ft.recovery.checkpoints import Checkpoints, Snapshots, expected_unsaved_s
from chameleon_ft.recovery.context import CourseDraft, DecisionContext
from chameleon_ft.recovery.failure_model import FailureModel, Gap, LossRisk, risk_of
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.transfer import Transfer, missing_between, transfer_s, transfer_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected outcome of a plan until the next incident.

    Attributes:
        fatal_share: probability that the incident makes a return to a checkpoint, or to a snapshot, necessary.
        return_s: expected seconds of that return, repeated work included.
        shared_s: expected seconds by which the step that the incident interrupts takes longer, because peers do the
            work of the lost worker.
        steps: expected steps, less those that both cost.
    """

    fatal_share: float
    return_s: float
    shared_s: float
    steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Everything that the score of a plan depends on except for the plan.

    Attributes:
        failures: the failure model.
        gap: distribution of the seconds until the next incident (G).
        restart_cost_s: seconds of a return to a checkpoint without the steps since that checkpoint.
        checkpoints: how often they are written.
        reference_step_s: seconds of a step at which lost time is charged, whatever the plan.
        exposed: probability that the incident takes all holders of some layer if it comes during the stall, while the
            present placement is in force.
        has_checkpoints: True if there is a checkpoint to return to; if not, the run ends.
        salvages: True if a step that a loss interrupts is completed.
        snapshots: that take the place of checkpoints as long as some workers are left; None if there are none.
    """

    failures: FailureModel
    gap: Gap
    restart_cost_s: float
    checkpoints: Checkpoints
    reference_step_s: float
    exposed: float
    has_checkpoints: bool
    salvages: bool = False
    snapshots: Snapshots | None = None

    @classmethod
    def of(
        cls,
        failures: FailureModel,
        *,
        workers: int,
        after_incident: bool,
        held: LossRisk | None,
        restart_cost_s: float,
        checkpoints: Checkpoints,
        reference_step_s: float,
        has_checkpoints: bool,
        salvages: bool = False,
        snapshots: Snapshots | None = None,
    ) -> Prospect:
        """Return the prospect of a number of live workers. Without checkpoints, a return loses all training so far.

        Args:
            failures: the failure model; the latest failures are counted.
            workers: number of live workers.
            after_incident: True if some have just been lost.
            held: which workers and hosts hold the layers now; None if some layer has no holder, so that there is
                nothing to lose.
            restart_cost_s, checkpoints, reference_step_s, has_checkpoints, salvages, snapshots: The attributes.
        """
        return cls(
            failures=failures,
            gap=failures.gap(workers, after_incident=after_incident),
            restart_cost_s=restart_cost_s + (0.0 if has_checkpoints else failures.worker_s / workers),
            checkpoints=checkpoints if has_checkpoints else Checkpoints(),
            reference_step_s=reference_step_s,
            exposed=0.0 if held is None else failures.fatal_probability(held),
            has_checkpoints=has_checkpoints,
            salvages=salvages,
            snapshots=snapshots,
        )

    def of_plan(
        self,
        *,
        step_s: float,
        stall_s: float,
        fatal: float,
        from_checkpoint: bool,
        has_snapshots: bool = True,
        total_loss: float = 0.0,
        share_per_peer: float = 0.0,
        migration_s: float = 0.0,
        migration_step_s: float = math.inf,
    ) -> Expected:
        """Return the expected outcome of a plan, with the expected number of steps

            E[integral from 0 to G of dt / (step time)] / (1 + w / I) - (lost seconds) / (reference step time),

        where no step is trained in the stall, and those of the migration take `migration_step_s` each. With L(t) =
        E[max(0, G - t)], the integral is (L(stall) - L(reached)) / migration step + L(reached) / step. Without a
        migration this is Eq. 8 of arXiv 2508.21613, samples(D) = B max(0, D - stall) / step time, with the expected
        value over G in place of its value at the mean: an incident before the plan is reached wastes the transition,
        and its transfers are repeated. w / I is the time that checkpoints and snapshots take, each w seconds after I
        seconds of steps. Lost seconds are charged at the same step time for all plans, because otherwise a slow plan
        would make them cheap. They are those of a return and, if interrupted steps are completed, those by which such a
        step takes longer because peers do the work of the lost worker: once the plan is reached, step time times
        `share_per_peer`.

        A plan that is read from a checkpoint has no unsaved work, but an incident before it is reached means another
        return.

        Args:
            step_s: seconds of a step.
            stall_s: seconds until training resumes, repeated work of the interrupted step included.
            fatal: probability that the next incident takes all holders of some layer once the plan is reached.
            from_checkpoint: True if its state is read from a checkpoint.
            has_snapshots: True if snapshots are taken once it is reached, if there are any.
            total_loss: probability that the incident takes all workers. The restart after it is the same for all plans
                and left out, unlike the repeated steps.
            share_per_peer: see `HolderSets.share_per_peer`.
            migration_s: seconds after the stall in which layers move while another plan trains.
            migration_step_s: seconds of a step of that plan.
        """
        mean_gap_s = self.gap.left_after(0.0)
        reached_s = stall_s + migration_s
        during = self.gap.within(reached_s)
        before, after = during * (1.0 if from_checkpoint else self.exposed), (1 - during) * fatal

        def repeated(saved: Checkpoints, returns: float, before: float, after: float) -> tuple[float, float]:
            """Return the expected seconds of repeated steps, and seconds of saving for each second of steps."""
            interval_s = saved.interval_s(step_s=step_s, return_gap_s=mean_gap_s / returns if returns else math.inf)
            unsaved_s = 0.0 if from_checkpoint else saved.unsaved_s
            repeat_s = before * unsaved_s + after * expected_unsaved_s(unsaved_s, interval_s, mean_gap_s)
            return repeat_s, (saved.write_s or 0.0) / interval_s

        last = during * total_loss, (1 - during) * total_loss
        if self.snapshots is None:
            repeat_s, share = repeated(self.checkpoints, fatal + total_loss, before + last[0], after + last[1])
            return_s = (before + after) * self.restart_cost_s + repeat_s
        else:
            # Under a plan without snapshots, the way back leads to a checkpoint.
            near, far = (after, 0.0) if has_snapshots else (0.0, after)
            far_share = total_loss + (0.0 if has_snapshots else fatal)
            repeat_s, share = repeated(self.checkpoints, far_share, last[0], last[1] + far)
            near_s, own_share = repeated(self.snapshots.taken, fatal, before, near)
            return_s = (before + near) * self.snapshots.return_s + far * self.restart_cost_s + repeat_s + near_s
            share += own_share if has_snapshots else 0.0
        shared_s = (1 - during) * share_per_peer * step_s if self.salvages else 0.0
        left_s = self.gap.left_after(reached_s)
        steps = left_s / step_s
        if migration_s:
            steps += (self.gap.left_after(stall_s) - left_s) / migration_step_s
        return Expected(
            fatal_share=before + after,
            return_s=return_s,
            shared_s=shared_s,
            steps=steps / (1 + share) - (return_s + shared_s) / self.reference_step_s,
        )


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
        needs_switch: True if a switch comes before the first layers move: it takes in workers without layers, or makes
            room with fewer micro-batches in flight.
        moved_bytes: parameters and optimizer state that workers receive, or read.
        risk: which workers and hosts hold the layers.
        from_checkpoint: True if the state is read from a checkpoint.
        has_snapshots: True if snapshots are taken under it, if the run takes any.
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
    workload, snapshots = context.costs.workload, context.snapshots
    if transfer is None:
        held = (own for ranges in plan.placement.ranges.values() for own in ranges)
        moved_bytes = sum(state_bytes(workload.layers[layer]) for own in held for layer in own)
    else:
        moved_bytes = transfer.total_bytes
    candidate = Candidate(
        policy=proposal.name,
        step_s=estimate.step_s * context.step_factor,
        peak_bytes=max(estimate.peak_bytes.values()),
        stall_s=stall_s,
        transfer_s=moves_s,
        moved_bytes=moved_bytes,
        risk=risk_of(plan.placement, cluster.hosts, workload.owners),
        from_checkpoint=proposal.from_checkpoint,
        has_snapshots=snapshots is None or snapshots_fit(plan.placement, workload, cluster.hosts, snapshots.rule),
        reason=missing or _describe_missing(missing_in_transfer(transfer, context), "while layers move"),
    )
    return candidate, None if missing else replace(draft, transfer=transfer)


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
        samples: The samples of a step.
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
