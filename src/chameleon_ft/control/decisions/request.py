"""Requests for decisions, in values of the state of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.estimate import StallModel
from chameleon_ft.recovery import FailureModel

__all__ = ["DecisionRequest", "LossRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRequest:
    """The members, what runs, and what is known of failures.

    Attributes:
        in_force: whose placement the workers hold.
        live: workers that are live.
        hosts: worker -> host, of every worker that has ever joined.
        phases: what the stall will take, transfers left out.
        repeat_s: seconds of work of the interrupted step that is done again.
        rate: how soon the next failure is to be expected.
    """

    in_force: ActivePlan
    live: tuple[int, ...]
    hosts: Mapping[int, str]
    phases: StallModel
    repeat_s: float
    rate: FailureModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRequest(DecisionRequest):
    """The request when every survivor waits for the decision.

    Attributes:
        stopped_at: when the last of them had quiesced, in Unix seconds.
        hand_out_s: seconds until the orders are out once it is decided, and
        looked_up_hand_out_s: likewise, if it was prepared.
        scale_up: question of the decision on newcomers that they were stopped for; None if it is none.
    """

    stopped_at: float
    hand_out_s: float
    looked_up_hand_out_s: float
    scale_up: int | None
