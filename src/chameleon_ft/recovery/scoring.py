"""Scoring: what a proposal costs and yields."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import NoHolderError
from chameleon_ft.estimate import PartsEstimate, TransitionEstimate, estimate_parts, peak_bytes_of, state_bytes
from chameleon_ft.plan import Plan, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import ROUNDING, data_size
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.loss_risk import LossRisk, risk_of
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.prospect import Prospect
from chameleon_ft.schedule import InFlightLimit, PipelineSchedule, Program, default_limits
from chameleon_ft.schedule.best import ScheduledPart, best_parts, program_of
from chameleon_ft.transfer import Transfer, missing_between, transfer_s, transfer_to
from chameleon_ft.workload import Workload

__all__ = ["Candidate", "Course", "CourseDraft", "best_of", "is_noop", "measure", "remeasure", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All that is needed to carry out what was chosen.

    Attributes:
        plan: what is run.
        in_flight_limits: what its workers can keep at most.
        program: what each worker runs in a step, by `best_program` with those limits, or as the search has found it.
        transfer: what moves before; None where all is read from a checkpoint.
    """

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    program: Program
    transfer: Transfer | None


@dataclass(frozen=True, slots=True)
class CourseDraft:
    """Parts of a course. Most are not taken, and assembling a program takes time."""

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    parts: Sequence[ScheduledPart]
    transfer: Transfer | None

    def course(self) -> Course:
        """The course, with its program."""
        return Course(
            plan=self.plan,
            in_flight_limits=FrozenMap(self.in_flight_limits),
            program=program_of(self.plan, self.parts),
            transfer=self.transfer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is predicted of a proposal. Without a plan, all figures but the samples are None.

    Attributes:
        policy: name of the proposal.
        step_s: seconds of a step, until all gradients are reduced, times `step_factor`.
        peak_bytes: what the worker that needs most holds at its worst moment.
        stall_s: seconds in which nothing is gained: the phases of the stall, the transfer, and work of the interrupted
            step that is done again.
        transfer_s: seconds of these in which state moves; zero if it is read from a checkpoint.
        moved_bytes: parameters and optimizer state that workers receive, or read.
        risk: which workers and hosts hold the layers.
        from_checkpoint: whether the state is read from a checkpoint.
        fatal_share: probability that the next incident makes a return to a checkpoint necessary.
        return_s: expected seconds of that return, work that is done again included.
        samples: expected samples until the next incident, less those that it is expected to cost: B times the steps of
            `Prospect.of_plan`. Negative if the cost is larger; zero if the candidate is not feasible.
        reason: why it cannot be chosen; None if it can.
    """

    policy: str
    step_s: float | None = None
    peak_bytes: int | None = None
    stall_s: float | None = None
    transfer_s: float | None = None
    moved_bytes: int | None = None
    risk: LossRisk | None = None
    from_checkpoint: bool = False
    fatal_share: float = 0.0
    return_s: float = 0.0
    samples: float = 0.0
    reason: str | None = None

    @property
    def feasible(self) -> bool:
        """Whether it can be chosen."""
        return self.reason is None

    @property
    def worker_single_points_of_failure(self) -> int:
        """How many workers are the only ones to hold some layer, which is lost with them."""
        return 0 if self.risk is None else self.risk.workers.singles

    @property
    def host_single_points_of_failure(self) -> int:
        """How many hosts are the only ones to hold some layer; zero if there is one host only."""
        return 0 if self.risk is None or self.risk.hosts is None else self.risk.hosts.singles


def measure(proposal: Proposal, context: DecisionContext) -> tuple[Candidate, CourseDraft | None]:
    """Return what is predicted of a proposal but for its samples, and the way to carry it out if it is feasible."""
    plan = proposal.plan
    if plan is None:
        return Candidate(policy=proposal.name, reason=proposal.reason), None
    layers, cluster = context.costs.workload.layers, context.costs.cluster
    if gone := sorted(set(plan.workers).difference(context.live)):
        return Candidate(policy=proposal.name, reason=f"it needs workers that are not live: {gone}"), None
    transfer: Transfer | None = None
    if not proposal.from_checkpoint:
        try:
            transfer = transfer_to(context.held, plan.placement, live=context.live, layers=layers)
        except NoHolderError as error:
            return Candidate(policy=proposal.name, reason=str(error)), None
    stays = is_noop(proposal, context)
    scheduled = _under(proposal.in_flight_limits, plan, context) if stays else _scheduled(proposal, plan, context)
    plan, estimate = scheduled.plan, scheduled.estimate
    moves_s = 0.0 if transfer is None else transfer_s(transfer.rounds, cluster) * context.transfer_factor
    # What is running already fits, whatever is estimated.
    reason = None if stays else _too_large(estimate, context) or _too_large_meanwhile(transfer, context)
    candidate = Candidate(
        policy=proposal.name,
        step_s=estimate.step_s * context.step_factor,
        peak_bytes=max(estimate.peak_bytes.values()),
        stall_s=0.0 if stays else _stall_s(proposal, context, moves_s),
        transfer_s=moves_s,
        moved_bytes=_all_bytes(plan, context) if transfer is None else transfer.total_bytes,
        risk=risk_of(plan.placement, cluster.hosts),
        from_checkpoint=proposal.from_checkpoint,
        reason=reason,
    )
    if reason:
        return candidate, None
    return candidate, CourseDraft(plan, scheduled.in_flight_limits, scheduled.parts, transfer)


def remeasure(candidate: Candidate, *, before: DecisionContext, now: DecisionContext) -> Candidate:
    """Return the candidate with the times of now; what fits memory is not looked at again, samples are not updated.

    Steps are longer or shorter as the times of layers and `step_factor` are, transfers as `transfer_factor` is, and
    stalls by what differs in phases and in work that is done again.

    Args:
        before: what it was measured on, but for who is live.
        now: the context with the same plan in force.
    """
    if candidate.step_s is None or candidate.stall_s is None or candidate.transfer_s is None:
        return candidate
    slower = now.step_factor / before.step_factor * (_work_s(now) / _work_s(before))
    slower_transfer = now.transfer_factor / before.transfer_factor
    known_s = before.phases.total_s + before.repeat_s
    later_s = now.phases.total_s + now.repeat_s - known_s
    step_s, stall_s = candidate.step_s * slower, candidate.stall_s
    if candidate.from_checkpoint:
        stall_s = now.return_s
    # Not what continues without a stop.
    elif math.isclose(stall_s, known_s + candidate.transfer_s):
        stall_s = max(0.0, stall_s + later_s + candidate.transfer_s * (slower_transfer - 1))
    return replace(candidate, step_s=step_s, stall_s=stall_s, transfer_s=candidate.transfer_s * slower_transfer)


def _work_s(context: DecisionContext) -> float:
    return math.fsum(layer.forward_s + layer.backward_s for layer in context.costs.workload.layers)


def score(candidates: Sequence[Candidate], prospect: Prospect, *, samples: int) -> tuple[Candidate, ...]:
    """Return the candidates with what they are expected to train; see `Prospect.of_plan` for the rule.

    Args:
        candidates: those that are feasible have a step time, a stall and a risk.
        prospect: what lies ahead, whichever is taken.
        samples: of a step.
    """

    def scored(candidate: Candidate) -> Candidate:
        if not candidate.feasible or candidate.step_s is None or candidate.stall_s is None or candidate.risk is None:
            return candidate
        expected = prospect.of_plan(
            step_s=candidate.step_s,
            stall_s=candidate.stall_s,
            fatal=prospect.failures.fatal_probability(candidate.risk),
            from_checkpoint=candidate.from_checkpoint,
            total_loss=prospect.failures.total_loss_probability(candidate.risk),
        )
        return replace(
            candidate,
            fatal_share=expected.fatal_share,
            return_s=expected.return_s,
            samples=samples * expected.steps,
        )

    return tuple(map(scored, candidates))


def best_of(candidates: Sequence[Candidate], prospect: Prospect) -> int | None:
    """Return the index of the candidate that is chosen; None if none is feasible. See `decide` for the rule."""
    feasible = [index for index, candidate in enumerate(candidates) if candidate.feasible]
    if not feasible:
        return None
    if not prospect.has_checkpoints:
        feasible = [index for index in feasible if not candidates[index].worker_single_points_of_failure] or feasible
        if prospect.failures.host_share:
            feasible = [
                i for i in feasible if candidates[i].samples > 0 and not candidates[i].host_single_points_of_failure
            ] or feasible
    most = max(candidates[index].samples for index in feasible)
    equals = [index for index in feasible if candidates[index].samples >= most - abs(most) * ROUNDING]
    return min(equals, key=lambda index: (candidates[index].moved_bytes or 0, index))


@dataclass(frozen=True, slots=True)
class _Scheduled:
    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    parts: Sequence[ScheduledPart]
    estimate: PartsEstimate


def _scheduled(proposal: Proposal, plan: Plan, context: DecisionContext) -> _Scheduled:
    """The program under the limits of the proposal.

    If that does not fit, the one with as few in flight as 1F1B has. If that does not fit either, the workers that lack
    memory recompute as many layers as they need to. So the memory of a plan that cannot be chosen is what it needs at
    the least.
    """
    found = _under(proposal.in_flight_limits, plan, context, proposal.schedules)
    if not found.estimate.over_capacity(context.costs):
        return found
    few = {worker: InFlightLimit(limit.in_flight, limit.in_flight) for worker, limit in default_limits(plan).items()}
    found = _under(few, plan, context)
    while (recompute := _more_recomputed(found, context)) is not None:
        found = _under(few, replace(plan, recompute=recompute), context)
    return found


def _more_recomputed(found: _Scheduled, context: DecisionContext) -> dict[int, RecomputedLayers] | None:
    """Recomputation under which the workers that lack memory have enough, or recompute all their layers.

    Of each worker the fewest layers, selectively before in full, lowest first: backward goes downwards, so when it gets
    to them the activations of the layers above are freed. The present order of operations is assumed. None if there is
    nothing to change: no worker lacks memory, or all that do recompute everything already.
    """
    costs, parts = context.costs, found.parts
    recompute = dict(found.plan.recompute)
    wider = {worker: _wider(found.plan, worker, costs.workload) for worker in found.estimate.over_capacity(costs)}
    while wider := {worker: ranges for worker, ranges in wider.items() if ranges}:
        for worker, ranges in wider.items():
            recompute[worker] = ranges.popleft()
        parts = [part for part in parts if not wider.keys().isdisjoint(part.component.workers)]
        peak_bytes = peak_bytes_of(replace(found.plan, recompute=recompute), parts, costs)
        wider = {
            worker: left for worker, left in wider.items() if peak_bytes[worker] > _capacity(costs.cluster, worker)
        }
    return recompute if recompute != found.plan.recompute else None


def _wider(plan: Plan, worker: int, workload: Workload) -> deque[RecomputedLayers]:
    """Recomputation from the lowest layer that `worker` holds on, each of one held layer more, that adds to its own."""
    own, span = plan.recompute.get(worker), plan.placement.span(worker)
    stops = [layer + 1 for layers in plan.placement.ranges_of(worker) for layer in layers]
    if any(workload.layers[layer].selective_bytes is not None for layer in span):
        ways = [RecomputedLayers(span.start, stop, stop - span.start) for stop in stops]
        ways += [RecomputedLayers(span.start, span.stop, span.stop - stop) for stop in stops]
    else:
        ways = [RecomputedLayers(span.start, stop) for stop in stops]
    return deque(
        layers
        for layers in ways
        if own is None or (layers != own and layers.covers(own) and layers.full.stop >= own.full.stop)
    )


def _under(
    in_flight_limits: Mapping[int, InFlightLimit],
    plan: Plan,
    context: DecisionContext,
    schedules: Sequence[PipelineSchedule] = (),
) -> _Scheduled:
    parts = best_parts(plan, context.costs, in_flight_limits=in_flight_limits, known=schedules)
    return _Scheduled(plan, in_flight_limits, parts, estimate_parts(plan, parts, context.costs))


def is_noop(proposal: Proposal, context: DecisionContext) -> bool:
    """Return whether the proposal is what runs already, so that there is nothing to stop for."""
    if proposal.plan != context.plan or proposal.from_checkpoint or context.lost:
        return False
    return all(
        proposal.in_flight_limits.get(worker) == context.in_flight_limits.get(worker) for worker in context.plan.workers
    )


def _stall_s(proposal: Proposal, context: DecisionContext, moves_s: float) -> float:
    if proposal.from_checkpoint:
        return context.return_s
    return TransitionEstimate(phases=context.phases, transfer_s=moves_s, repeat_s=context.repeat_s).lost_s


def _too_large(estimate: PartsEstimate, context: DecisionContext) -> str | None:
    missing = estimate.over_capacity(context.costs)
    return _short_of(missing, "in a step") if missing else None


def _too_large_meanwhile(transfer: Transfer | None, context: DecisionContext) -> str | None:
    """While state moves, a worker has what it held, gradients included, and beside it what it has received."""
    if transfer is None:
        return None
    layers, before, after = context.costs.workload.layers, context.placement, transfer.placement
    state = list(accumulate(map(state_bytes, layers), initial=0))
    gradients = list(accumulate((layer.gradient_bytes for layer in layers), initial=0))
    numbers = range(len(layers) + 1)
    needed: dict[int, int] = {}
    for worker, ranges in after.ranges.items():
        had = before.ranges_of(worker)
        if missing_between(had, ranges, numbers):
            held = sum(each[own.stop] - each[own.start] for own in had for each in (state, gradients))
            needed[worker] = held + missing_between(had, ranges, state)
    missing = {
        worker: short
        for worker, num_bytes in needed.items()
        if (short := num_bytes - _capacity(context.costs.cluster, worker)) > 0
    }
    return _short_of(missing, "while layers move") if missing else None


def _capacity(cluster: Cluster, worker: int) -> float:
    known = cluster.worker(worker).memory_bytes
    return float("inf") if known is None else known


def _short_of(missing: Mapping[int, float], when: str) -> str:
    worker = max(missing, key=lambda each: (missing[each], -each))
    others = f", and {len(missing) - 1} others need more too" if len(missing) > 1 else ""
    return f"memory: worker {worker} needs {data_size(missing[worker])} more {when}{others}"


def _all_bytes(plan: Plan, context: DecisionContext) -> int:
    layers = context.costs.workload.layers
    return sum(
        state_bytes(layers[layer]) for ranges in plan.placement.ranges.values() for own in ranges for layer in own
    )
