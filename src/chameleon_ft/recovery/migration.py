"""Migration: layers move to new holders while another plan trains, so that no worker waits for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chameleon_ft.recovery.courses import CourseDraft
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.scoring import Candidate
from chameleon_ft.recovery.waves import Wave, present_draft, waves_to
from chameleon_ft.schedule import CostModel
from chameleon_ft.transfer import pull_s

__all__ = ["with_migrations"]

_STEPS_BETWEEN: Final = 1
"""Steps between two waves: by the commit of one, all workers have dropped what the next wave needs memory for."""


def with_migrations(
    measured: Sequence[tuple[Candidate, CourseDraft | None]], context: DecisionContext
) -> list[tuple[Candidate, CourseDraft | None]]:
    """Return the candidates as they are if layers move during training.

    The first feasible candidate that moves nothing takes over at once: after a loss it is rerouting, with the stall and
    the rest of the interrupted step; without a loss it is the plan in force, and nothing stops. All others that move
    nothing are reached as soon as it is. Of those that move layers, each has this stall, then trains with the first
    candidate's routes to the end of the step in which the last layer arrives, and then as its own plan; if memory
    does not hold all of them during training, they move in `waves`, with other routes after each. The transfer stops
    training as before if there are no waves that fit the memory, or if no candidate moves nothing.
    """
    first = next(((own, draft) for own, draft in measured if draft is not None and _stays_in_place(draft)), None)
    if first is None:
        return list(measured)
    stall_s, present = first[0].stall_s, first[1]
    if context.leaving and len(context.lost) == len(context.leaving):
        present = present_draft(context)  # workers that leave train until then
    return [(_migrating(own, draft, stall_s, present, context), draft) for own, draft in measured]


def _stays_in_place(draft: CourseDraft) -> bool:
    return draft.transfer is not None and not draft.transfer.messages


def _migrating(
    candidate: Candidate,
    draft: CourseDraft | None,
    stall_s: float | None,
    present: CourseDraft,
    context: DecisionContext,
) -> Candidate:
    if draft is None or draft.transfer is None:
        return candidate
    if _stays_in_place(draft):
        return replace(candidate, stall_s=stall_s)
    waves = waves_to(present, draft.transfer, CostModel(context.costs.workload, context.senders))
    if not waves:
        return candidate
    stretches = [stretch for wave in waves for stretch in _stretches(wave, context)]
    migration_s = math.fsum(each for each, _ in stretches)
    steps = math.fsum(each / step_s for each, step_s in stretches)
    needs_switch = waves[0].migrating.in_flight_limits != present.in_flight_limits or any(
        message.destination not in context.placement.ranges for message in draft.transfer.messages
    )
    longer_s = waves[0].migrating.estimate.step_s - present.estimate.step_s
    return replace(
        candidate,
        stall_s=stall_s,
        transfer_s=0.0,
        delay_s=0.0 if needs_switch else max(0.0, longer_s) * context.step_factor,
        migration_s=migration_s,
        migration_step_s=migration_s / steps if len(waves) > 1 else stretches[0][1],
        waves=len(waves),
        needs_switch=needs_switch,
        reason=None,
    )


def _stretches(wave: Wave, context: DecisionContext) -> list[tuple[float, float]]:
    """Return (seconds, seconds of a step) while the layers of a wave move, and of the plan that it reaches."""
    assert wave.migrating.transfer is not None
    moves_s = pull_s(wave.migrating.transfer.messages, context.senders) * context.migration_factor
    stretches = [(moves_s, wave.migrating.estimate.step_s * context.step_factor)]
    if wave.reached is not None:
        step_s = wave.reached.estimate.step_s * context.step_factor
        stretches.append((_STEPS_BETWEEN * step_s, step_s))
    return stretches
