"""Speculative decisions: a plan is chosen before the survivors have reported, and used if their reports fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.recovery import Decision, DecisionContext, FailureModel, decide, rescore
from chameleon_ft.schedule import check_program

IN_PLACE: Final = "reroute"
"""Name of the policy that chooses a plan under which no layer moves."""


@dataclass(frozen=True, slots=True)
class SpeculativeDecision:
    """The plan of the steps after a loss, chosen while the survivors stop, with a program that is checked.

    The survivors need some tens of milliseconds for their reports, which contain what remains of the interrupted step
    and what each of them holds. That rarely differs from its part of the plan.

    Attributes:
        context: what was known; the layers that survivors hold were taken for those of the plan.
        decision: by the policy `IN_PLACE`.
    """

    context: DecisionContext
    decision: Decision

    @classmethod
    def of(cls, context: DecisionContext, rate: FailureModel, *, is_reviewed: bool) -> Self | None:
        """Choose a plan; None if no worker of the present one is lost. `is_reviewed` as in `decide_in_place`."""
        if not context.lost or not context.live or context.held.unheld_layers:
            return None
        context = without_search(context) if is_reviewed else context
        decision = decide(context, IN_PLACE, rate)
        if decision.course is not None:
            check_program(decision.course.program, decision.course.plan)
        return cls(context, decision)

    def rescored(
        self,
        now: DecisionContext,
        rate: FailureModel,
        *,
        is_reviewed: bool,
        decide_s: Callable[[], float] | None,
    ) -> Decision | None:
        """Return the decision with what is known once the survivors have reported; None if it does not fit."""
        now = without_search(now) if is_reviewed else now
        if self._asked != _asked(now) or now.held != now.placement:
            return None
        if decide_s is not None:
            now = replace(now, phases=replace(now.phases, decide_s=decide_s()))
        return rescore(self.decision, before=self.context, now=now, failures=rate)

    @property
    def _asked(self) -> object:
        return _asked(self.context)


def _asked(context: DecisionContext) -> object:
    """Return all that the plans of a policy depend on."""
    return context.plan, context.in_flight_limits, context.costs, context.effort, context.leaving


def without_search(context: DecisionContext) -> DecisionContext:
    """Return the context of a decision that a search for a better plan follows, so that it does not search itself."""
    return replace(context, effort=0)
