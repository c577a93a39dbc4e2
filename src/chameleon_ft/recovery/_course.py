"""Weighing: what a proposal costs and yields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import NoHolderError
from chameleon_ft.estimate import PartsEstimate, TransitionEstimate, estimate_parts, state_bytes
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import data_size
from chameleon_ft.recovery.failure_rate import FailureRate
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.schedule import InFlightLimit, Program, default_limits
from chameleon_ft.schedule._pipelines import PipelineSchedule
from chameleon_ft.schedule.best import ScheduledPart, best_parts, program_of
from chameleon_ft.transfer import Transfer, missing_between, transfer_s, transfer_to

__all__ = ["Candidate", "Course", "Way", "fresh", "goes_on", "weighed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All that is needed to carry out what was chosen.

    Attributes:
        plan: what is run.
        ceiling: what its workers can keep at most.
        program: what each worker runs in a step, by `best_program` with that ceiling, or as the search has found it.
        transfer: what moves before; None where all is read from a checkpoint.
    """

    plan: Plan
    ceiling: Mapping[int, InFlightLimit]
    program: Program
    transfer: Transfer | None


@dataclass(frozen=True, slots=True)
class Way:
    """What a course is made of; most are not taken, and to make a program takes its time."""

    plan: Plan
    ceiling: Mapping[int, InFlightLimit]
    parts: Sequence[ScheduledPart]
    transfer: Transfer | None

    def course(self) -> Course:
        """The course, with its program."""
        return Course(
            plan=self.plan,
            ceiling=FrozenMap(self.ceiling),
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
        last_holders: workers that are the only ones to hold some layer, which is lost with them.
        last_hosts: hosts whose workers are the only ones to hold some layer, likewise; zero if there is one host only.
        return_s: seconds that a return to a checkpoint is to be expected to take after the next failure.
        samples: samples that are trained until the next failure, B max(0, D - stall_s - return_s) / step_s; zero if not
            feasible.
        reason: why it cannot be chosen; None if it can.
    """

    policy: str
    step_s: float | None = None
    peak_bytes: int | None = None
    stall_s: float | None = None
    transfer_s: float | None = None
    moved_bytes: int | None = None
    last_holders: int = 0
    last_hosts: int = 0
    return_s: float = 0.0
    samples: float = 0.0
    reason: str | None = None

    @property
    def feasible(self) -> bool:
        """Whether it can be chosen."""
        return self.reason is None


def weighed(proposal: Proposal, situation: Situation, rate: FailureRate) -> tuple[Candidate, Way | None]:
    """What is predicted of a proposal, and the way to carry it out if it is feasible."""
    plan = proposal.plan
    if plan is None:
        return Candidate(policy=proposal.name, reason=proposal.reason), None
    layers, cluster = situation.costs.workload.layers, situation.costs.cluster
    if gone := sorted(set(plan.workers).difference(situation.live)):
        return Candidate(policy=proposal.name, reason=f"it needs workers that are not live: {gone}"), None
    transfer: Transfer | None = None
    if not proposal.from_checkpoint:
        try:
            transfer = transfer_to(situation.held, plan.placement, live=situation.live, layers=layers)
        except NoHolderError as error:
            return Candidate(policy=proposal.name, reason=str(error)), None
    stays = goes_on(proposal, situation)
    scheduled = _under(proposal.ceiling, plan, situation) if stays else _scheduled(proposal, plan, situation)
    plan, estimate = scheduled.plan, scheduled.estimate
    step_s = estimate.step_s * situation.step_factor
    moves_s = 0.0 if transfer is None else transfer_s(transfer.rounds, cluster) * situation.transfer_factor
    stall_s = 0.0 if stays else _stall_s(proposal, situation, moves_s)
    # What is running already fits, whatever is estimated.
    reason = None if stays else _too_large(estimate, situation) or _too_large_meanwhile(transfer, situation)
    hosts = cluster.hosts
    candidate = Candidate(
        policy=proposal.name,
        step_s=step_s,
        peak_bytes=max(estimate.peak_bytes.values()),
        stall_s=stall_s,
        transfer_s=moves_s,
        moved_bytes=_all_bytes(plan, situation) if transfer is None else transfer.total_bytes,
        last_holders=len(plan.placement.indispensable({worker: worker for worker in plan.workers})),
        last_hosts=len(plan.placement.indispensable(hosts)) if len(set(hosts.values())) > 1 else 0,
        reason=reason,
    )
    if reason:
        return candidate, None
    return _until_next(candidate, situation, rate), Way(plan, scheduled.ceiling, scheduled.parts, transfer)


def fresh(candidate: Candidate, *, before: Situation, now: Situation, rate: FailureRate) -> Candidate:
    """What is predicted of a candidate by what is known now; what fits memory is not looked at again.

    Steps are longer or shorter as the times of layers and `step_factor` are, transfers as `transfer_factor` is, and
    stalls by what differs in phases and in work that is done again.

    Args:
        before: what it was weighed on, but for who is live.
        now: the situation with the same plan in force.
        rate: how soon the next failure is to be expected by now.
    """
    if candidate.step_s is None or candidate.stall_s is None or candidate.transfer_s is None:
        return candidate
    slower = now.step_factor / before.step_factor * (_work_s(now) / _work_s(before))
    slower_transfer = now.transfer_factor / before.transfer_factor
    known_s = before.phases.total_s + before.repeat_s
    later_s = now.phases.total_s + now.repeat_s - known_s
    step_s, stall_s = candidate.step_s * slower, candidate.stall_s
    # Not what comes from a checkpoint, or goes on without a stop.
    if math.isclose(stall_s, known_s + candidate.transfer_s):
        stall_s = max(0.0, stall_s + later_s + candidate.transfer_s * (slower_transfer - 1))
    later = replace(candidate, step_s=step_s, stall_s=stall_s, transfer_s=candidate.transfer_s * slower_transfer)
    return _until_next(later, now, rate) if candidate.feasible else later


def _work_s(situation: Situation) -> float:
    return math.fsum(layer.forward_s + layer.backward_s for layer in situation.costs.workload.layers)


def _until_next(candidate: Candidate, situation: Situation, rate: FailureRate) -> Candidate:
    """With what is trained until the next failure, and the return to a checkpoint that may follow it; see above."""
    assert candidate.step_s is not None
    assert candidate.stall_s is not None
    cluster = situation.costs.cluster
    return_s = situation.restart_s * rate.fatal_share(
        last_holders=candidate.last_holders, last_hosts=candidate.last_hosts, cluster=cluster
    )
    gained_s = max(0.0, rate.horizon_s(len(cluster.workers)) - candidate.stall_s - return_s)
    samples = situation.costs.workload.samples * gained_s / candidate.step_s
    return replace(candidate, return_s=return_s, samples=samples)


@dataclass(frozen=True, slots=True)
class _Scheduled:
    plan: Plan
    ceiling: Mapping[int, InFlightLimit]
    parts: Sequence[ScheduledPart]
    estimate: PartsEstimate


def _scheduled(proposal: Proposal, plan: Plan, situation: Situation) -> _Scheduled:
    """The program under the proposal's ceiling.

    Where that does not fit, the one with as few in flight as 1F1B has, and if it does not either, the same with
    recomputation on the workers that lack memory. So it is said of a plan what it would need at the least.
    """
    found = _under(proposal.ceiling, plan, situation, proposal.schedules)
    if not found.estimate.over_capacity(situation.costs):
        return found
    few = {worker: InFlightLimit(limit.in_flight, limit.in_flight) for worker, limit in default_limits(plan).items()}
    found = _under(few, plan, situation)
    if missing := found.estimate.over_capacity(situation.costs):
        return _under(few, replace(plan, recompute=plan.recompute.union(missing)), situation)
    return found


def _under(
    ceiling: Mapping[int, InFlightLimit], plan: Plan, situation: Situation, schedules: Sequence[PipelineSchedule] = ()
) -> _Scheduled:
    parts = best_parts(plan, situation.costs, ceiling=ceiling, known=schedules)
    return _Scheduled(plan, ceiling, parts, estimate_parts(plan, parts, situation.costs))


def goes_on(proposal: Proposal, situation: Situation) -> bool:
    """Whether all goes on as before, so that there is nothing to stop for."""
    if proposal.plan != situation.plan or proposal.from_checkpoint or situation.lost:
        return False
    return all(proposal.ceiling.get(worker) == situation.ceiling.get(worker) for worker in situation.plan.workers)


def _stall_s(proposal: Proposal, situation: Situation, moves_s: float) -> float:
    if proposal.from_checkpoint:
        return situation.restart_s
    return TransitionEstimate(phases=situation.phases, transfer_s=moves_s, repeat_s=situation.repeat_s).lost_s


def _too_large(estimate: PartsEstimate, situation: Situation) -> str | None:
    missing = estimate.over_capacity(situation.costs)
    return _short_of(missing, "in a step") if missing else None


def _too_large_meanwhile(transfer: Transfer | None, situation: Situation) -> str | None:
    """While state moves, a worker has what it held, gradients included, and beside it what it has received."""
    if transfer is None:
        return None
    layers, before, after = situation.costs.workload.layers, situation.placement, transfer.placement
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
        if (short := num_bytes - _capacity(situation.costs.cluster, worker)) > 0
    }
    return _short_of(missing, "while layers move") if missing else None


def _capacity(cluster: Cluster, worker: int) -> float:
    known = cluster.worker(worker).memory_bytes
    return float("inf") if known is None else known


def _short_of(missing: Mapping[int, float], when: str) -> str:
    worker = max(missing, key=lambda each: (missing[each], -each))
    others = f", and {len(missing) - 1} others need more too" if len(missing) > 1 else ""
    return f"memory: worker {worker} needs {data_size(missing[worker])} more {when}{others}"


def _all_bytes(plan: Plan, situation: Situation) -> int:
    layers = situation.costs.workload.layers
    return sum(
        state_bytes(layers[layer]) for ranges in plan.placement.ranges.values() for own in ranges for layer in own
    )
