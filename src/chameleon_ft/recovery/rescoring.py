"""Rescoring of an earlier decision with the present figures."""

from __future__ import annotations

from chameleon_ft.recovery.decision import Decision, prospect_of
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.recovery.scoring import best_of, remeasure, score

__all__ = ["rescore"]


def rescore(
    decision: Decision, *, before: DecisionContext, now: DecisionContext, failures: FailureModel
) -> Decision | None:
    """Return the decision with predictions by present knowledge; None if another candidate is the best one now.

    Steps are longer or shorter as the times of layers and `step_factor` are, transfers as `transfer_factor` is, and
    stalls by the differences in phases and in repeated work. Memory is not checked again.

    Args:
        before: the context of the decision, except for the live workers.
        now: the present context, with the same active plan.
        failures: what is known of failures by now.
    """
    remeasured = [remeasure(each, before=before, now=now) for each in decision.candidates]
    prospect = prospect_of(now, failures)
    candidates = score(remeasured, prospect, samples=now.costs.workload.samples)
    index = best_of(candidates, prospect)
    chosen = None if index is None else candidates[index]
    if (None if chosen is None else chosen.policy) != (None if decision.chosen is None else decision.chosen.policy):
        return None
    return Decision(
        horizon_s=failures.horizon_s(len(now.live)),
        phases=now.phases,
        candidates=candidates,
        chosen=chosen,
        course=decision.course,
    )
