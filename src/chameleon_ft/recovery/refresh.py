"""A decision that was made some time ago, with the figures of now."""

from __future__ import annotations

import math
from dataclasses import replace

from chameleon_ft.recovery._course import Candidate, samples_until
from chameleon_ft.recovery.decision import Decision, best_of
from chameleon_ft.recovery.situation import Situation

__all__ = ["refreshed"]


def refreshed(decision: Decision, *, before: Situation, now: Situation, horizon_s: float) -> Decision | None:
    """The decision with what is predicted of its candidates by what is known now; None if another is the best now.

    Steps are longer or shorter as the times of layers and `step_factor` are, transfers as `transfer_factor` is, and
    stalls by what differs in phases and in work that is done again. What fits memory is not looked at again.

    Args:
        before: what it was decided on, but for who is live.
        now: the situation with the same plan in force.
        horizon_s: seconds until the next failure, as they are to be expected now.
    """
    slower = now.step_factor / before.step_factor * (_work_s(now) / _work_s(before))
    slower_transfer = now.transfer_factor / before.transfer_factor
    known_s = before.phases.total_s + before.repeat_s
    later_s = now.phases.total_s + now.repeat_s - known_s

    def fresh(each: Candidate) -> Candidate:
        if each.step_s is None or each.stall_s is None or each.transfer_s is None:
            return each
        stall_s = each.stall_s
        # Not what comes from a checkpoint, or goes on without a stop.
        if math.isclose(stall_s, known_s + each.transfer_s):
            stall_s = max(0.0, stall_s + later_s + each.transfer_s * (slower_transfer - 1))
        step_s = each.step_s * slower
        samples = samples_until(horizon_s, now, step_s=step_s, stall_s=stall_s, last_holders=each.last_holders)
        return replace(
            each,
            step_s=step_s,
            stall_s=stall_s,
            transfer_s=each.transfer_s * slower_transfer,
            samples=samples if each.feasible else 0.0,
        )

    candidates = tuple(map(fresh, decision.candidates))
    index = best_of(candidates)
    chosen = None if index is None else candidates[index]
    if (None if chosen is None else chosen.policy) != (None if decision.chosen is None else decision.chosen.policy):
        return None
    return Decision(horizon_s=horizon_s, candidates=candidates, chosen=chosen, course=decision.course)


def _work_s(situation: Situation) -> float:
    return math.fsum(layer.forward_s + layer.backward_s for layer in situation.costs.workload.layers)
