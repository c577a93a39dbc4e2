"""A decision that was made some time ago, with the figures of now."""

from __future__ import annotations

from chameleon_ft.recovery._course import fresh
from chameleon_ft.recovery.decision import Decision, best_of
from chameleon_ft.recovery.failure_rate import FailureRate
from chameleon_ft.recovery.situation import Situation

__all__ = ["refreshed"]


def refreshed(decision: Decision, *, before: Situation, now: Situation, rate: FailureRate) -> Decision | None:
    """The decision with what is predicted of its candidates by what is known now; None if another is the best now.

    Steps are longer or shorter as the times of layers and `step_factor` are, transfers as `transfer_factor` is, and
    stalls by what differs in phases and in work that is done again. What fits memory is not looked at again.

    Args:
        before: what it was decided on, but for who is live.
        now: the situation with the same plan in force.
        rate: how soon the next failure is to be expected by now.
    """
    candidates = tuple(fresh(each, before=before, now=now, rate=rate) for each in decision.candidates)
    index = best_of(candidates, now, rate)
    chosen = None if index is None else candidates[index]
    if (None if chosen is None else chosen.policy) != (None if decision.chosen is None else decision.chosen.policy):
        return None
    return Decision(
        horizon_s=rate.horizon_s(len(now.live)),
        phases=now.phases,
        candidates=candidates,
        chosen=chosen,
        course=decision.course,
    )
