"""The decision: of all proposals of a policy, the one that is expected to train the most samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.cost.step import total_work_bound_s
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.errors import PlanError
from chameleon_ft.recovery.context import Course, DecisionContext
from chameleon_ft.recovery.failure_model import FailureModel, risk_of
from chameleon_ft.recovery.migration import with_migrations
from chameleon_ft.recovery.policies import POLICIES
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.scoring import Candidate, Prospect, best_of, is_noop, measure, remeasure, score

STAY: Final = "stay"
"""Name of the candidate to continue unchanged, which exists as long as no worker is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The scored candidates, and the chosen one.

    Attributes:
        horizon_s: expected seconds until the next incident (D).
        phases: the expected stall without transfers.
        candidates: in the order of the proposals.
        chosen: the one of them that is carried out; None if none is feasible.
        course: how to carry it out; None likewise.
    """

    horizon_s: float
    phases: StallModel
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    course: Course | None

    def to_json(self) -> dict[str, object]:
        """Return the fields of the event `decision` except for the seconds that it took, which need a clock."""
        return {
            "chosen": None if self.chosen is None else self.chosen.policy,
            "horizon_s": self.horizon_s,
            "candidates": [
                {
                    "policy": each.policy,
                    "step_s": each.step_s,
                    "stall_s": each.stall_s,
                    "transfer_s": each.transfer_s,
                    "migration_s": each.migration_s,
                    "waves": each.waves,
                    "bytes": each.moved_bytes,
                    "worker_single_points_of_failure": each.worker_single_points_of_failure,
                    "host_single_points_of_failure": each.host_single_points_of_failure,
                    "fatal_share": each.fatal_share,
                    "return_s": each.return_s,
                    "shared_s": each.shared_s,
                    "samples": each.samples,
                    "feasible": each.feasible,
                    "reason": each.reason,
                }
                for each in self.candidates
            ],
        }


def decide(
    context: DecisionContext, policy: str, failures: FailureModel, *, decide_s: Callable[[], float] | None = None
) -> Decision:
    """Score the proposals of the policy, and choose the one that is expected to train the most samples.

    The score is the steps of `Prospect.of_plan` times the samples of a step: the samples until the next incident, less
    the cost of a return to a checkpoint times the probability that the incident makes one necessary, because it takes
    all holders of some layer. `best_of` chooses. A proposal that exceeds memory, in a step or while layers move, or has
    layers without a holder, is listed with the reason and never chosen. Deterministic.

    As long as no worker is lost, `STAY` is scored first, whatever the policy proposes: it is feasible and has no stall.
    If the run `migrates`, layers move while the first candidate trains that needs none of them; see `with_migrations`.

    Args:
        context: the active plan, and which workers are live.
        policy: name of one of `POLICIES`.
        failures: the failure model; the losses that led to this decision are counted already.
        decide_s: called after the measurements, returns the seconds that the decision takes in all, for a decision that
            all workers wait for. None: as in `context.phases`.

    Raises:
        ConfigError: no policy has this name.
        PlanError: no worker is live, or the workload has another number of layers than the plan.
    """
    propose = POLICIES[policy]
    if not context.live:
        raise PlanError("no worker is live; start at least one")
    horizon_s = failures.horizon_s(len(context.live))
    proposals = list(propose(context, horizon_s))
    if not context.lost:
        stay = Proposal(name=STAY, plan=context.plan, in_flight_limits=context.in_flight_limits)
        proposals = [stay, *(each for each in proposals if not is_noop(each, context))]
    measured = [measure(proposal, context) for proposal in proposals]
    if context.migrates:
        measured = with_migrations(measured, context)
    now = context
    if decide_s is not None:
        now = replace(context, phases=replace(context.phases, decide_s=decide_s()))
    candidates, index = _choose([candidate for candidate, _ in measured], before=context, now=now, failures=failures)
    draft = None if index is None else measured[index][1]
    return Decision(
        horizon_s=horizon_s,
        phases=now.phases,
        candidates=candidates,
        chosen=None if index is None else candidates[index],
        course=None if draft is None else draft.course(),
    )


def rescore(
    decision: Decision, *, before: DecisionContext, now: DecisionContext, failures: FailureModel
) -> Decision | None:
    """Return the decision with current predictions; None if another candidate is the best one now.

    See `remeasure` for what changes. Memory is not checked again.

    Args:
        decision: an earlier decision.
        before: the context of that decision, except for the live workers.
        now: the present context, with the same active plan.
        failures: the present failure model.
    """
    candidates, index = _choose(decision.candidates, before=before, now=now, failures=failures)
    chosen = None if index is None else candidates[index]
    if (chosen and chosen.policy) != (decision.chosen and decision.chosen.policy):
        return None
    horizon_s = failures.horizon_s(len(now.live))
    return replace(decision, horizon_s=horizon_s, phases=now.phases, candidates=candidates, chosen=chosen)


def _choose(
    measured: Sequence[Candidate], *, before: DecisionContext, now: DecisionContext, failures: FailureModel
) -> tuple[tuple[Candidate, ...], int | None]:
    """Return the candidates with current times and scores, and the index of the best; None if none is feasible."""
    prospect = prospect_of(now, failures)
    remeasured = [remeasure(each, before=before, now=now) for each in measured]
    candidates = score(remeasured, prospect, samples=now.costs.workload.samples)
    return candidates, best_of(candidates, prospect)


def prospect_of(context: DecisionContext, failures: FailureModel) -> Prospect:
    """Return the prospect of the live workers of a context."""
    held = context.held
    return Prospect.of(
        failures,
        workers=len(context.live),
        after_incident=len(context.lost) > len(context.leaving),
        held=None if held.unheld_layers else risk_of(held, context.senders.hosts, context.costs.workload.owners),
        restart_cost_s=context.restart_cost_s,
        checkpoints=context.checkpoints,
        reference_step_s=total_work_bound_s(context.costs) * context.step_factor,
        has_checkpoints=context.has_checkpoints,
        salvages=context.salvages,
        snapshots=context.snapshots,
    )
