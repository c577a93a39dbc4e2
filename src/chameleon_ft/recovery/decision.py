"""The decision: of all that policies propose, what is expected to train the most samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import StallModel, total_work_bound_s
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.recovery.loss_risk import risk_of
from chameleon_ft.recovery.policies import policy_named
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.prospect import Prospect
from chameleon_ft.recovery.scoring import Candidate, Course, best_of, is_noop, measure, remeasure, score

__all__ = ["STAY", "Candidate", "Course", "Decision", "decide", "prospect_of"]

STAY: Final = "stay"
"""Name of the candidate to go on as before, which there is as long as nobody is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The scored candidates, and the chosen one.

    Attributes:
        horizon_s: expected seconds until the next incident (D).
        phases: what the stall was taken to be, transfers left out.
        candidates: all that were scored, in the order of the proposals.
        chosen: the one of them that is carried out; None if none is feasible.
        course: how to carry it out; None likewise.
    """

    horizon_s: float
    phases: StallModel
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    course: Course | None

    def to_json(self) -> dict[str, object]:
        """The fields of the event `decision`, but for the seconds that it took, which is for whoever has a clock."""
        return {
            "chosen": None if self.chosen is None else self.chosen.policy,
            "horizon_s": self.horizon_s,
            "candidates": [
                {
                    "policy": each.policy,
                    "step_s": each.step_s,
                    "stall_s": each.stall_s,
                    "transfer_s": each.transfer_s,
                    "bytes": each.moved_bytes,
                    "last_holders": each.worker_single_points_of_failure,
                    "last_hosts": each.host_single_points_of_failure,
                    "fatal_share": each.fatal_share,
                    "return_s": each.return_s,
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
    """Score what the policy proposes, and choose what is expected to train the most samples.

    The score is the steps of `Prospect.of_plan` times the samples of a step: what is trained until the next incident,
    less what a return to a checkpoint costs times the probability that the incident makes one necessary, because it
    takes all holders of some layer. If there is no checkpoint, such a loss ends the run: a plan with workers that are
    the only ones to hold some layer is chosen only if there is no other; and of those without them one with such hosts
    only if no host is expected to fail, or the others train nothing. Of equals, that which moves the fewest bytes; of
    equals still, what was proposed first. What does not fit the memory, in a step or while layers move, or has layers
    without a holder, is listed with the reason and never chosen. Deterministic.

    As long as no worker is lost, to continue as before is scored first, whatever the policy proposes: it costs no
    stall, and can be done.

    Args:
        context: what was running, and which workers are live.
        policy: name of one of `POLICIES`.
        failures: what is known of failures; the losses that led here are counted already.
        decide_s: asked when all is measured what that phase of the stall takes, now that most of it is over; for a
            decision that all workers wait for. None: as the context has it.

    Raises:
        ConfigError: no policy has this name.
        PlanError: no worker is live, or the workload has another number of layers than the plan.
    """
    propose = policy_named(policy)
    if not context.live:
        raise PlanError("no worker is live; start at least one")
    horizon_s = failures.horizon_s(len(context.live))
    proposals = list(propose(context, horizon_s))
    if not context.lost:
        stay = Proposal(name=STAY, plan=context.plan, in_flight_limits=context.in_flight_limits)
        proposals = [stay, *(each for each in proposals if not is_noop(each, context))]
    measured = [measure(proposal, context) for proposal in proposals]
    now = context
    if decide_s is not None:
        now = replace(context, phases=replace(context.phases, decide_s=decide_s()))
    prospect = prospect_of(now, failures)
    remeasured = [remeasure(each, before=context, now=now) for each, _ in measured]
    candidates = score(remeasured, prospect, samples=context.costs.workload.samples)
    index = best_of(candidates, prospect)
    return Decision(
        horizon_s=horizon_s,
        phases=now.phases,
        candidates=candidates,
        chosen=None if index is None else candidates[index],
        course=None if index is None or (draft := measured[index][1]) is None else draft.course(),
    )


def prospect_of(context: DecisionContext, failures: FailureModel) -> Prospect:
    """Return what lies ahead of a context."""
    held = context.held
    return Prospect.of(
        failures,
        workers=len(context.live),
        after_incident=bool(context.lost),
        held=None if held.unheld_layers else risk_of(held, context.costs.cluster.hosts),
        restart_s=context.restart_s,
        checkpoints=context.checkpoints,
        reference_step_s=total_work_bound_s(context.costs) * context.step_factor,
        has_checkpoints=context.has_checkpoints,
    )
