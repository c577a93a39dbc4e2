"""Migration: layers move to new holders while another plan trains, so that no worker waits for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from chameleon_ft.recovery.context import CourseDraft, DecisionContext
from chameleon_ft.recovery.scoring import Candidate
from chameleon_ft.recovery.waves import Wave, present_draft, waves_to
from chameleon_ft.schedule import CostModel
from chameleon_ft.transfer import pull_s, sums_s

# A vote waits until all layers have arrived; this bounds the wait for layers that never do.
_HOLD_FACTOR: Final = 2.0
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
        # Workers that leave train until the migration ends.
        present = present_draft(context)
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
    paces = [pace_of(wave, context) for wave in waves]
    stretches = [
        stretch for wave, pace in zip(waves, paces, strict=True) for stretch in _stretches(wave, pace, context)
    ]
    migration_s = math.fsum(each for each, _ in stretches)
    steps = math.fsum(each / step_s for each, step_s in stretches)
    needs_switch = waves[0].migrating.in_flight_limits != present.in_flight_limits or any(
        message.destination not in context.placement.ranges for message in draft.transfer.messages
    )
    longer_s = paces[0].step_s - present.estimate.step_s * context.step_factor
    return replace(
        candidate,
        stall_s=stall_s,
        transfer_s=0.0,
        delay_s=0.0 if needs_switch or paces[0].hold_s else max(0.0, longer_s),
        migration_s=migration_s,
        migration_step_s=migration_s / steps if len(waves) > 1 else stretches[0][1],
        waves=len(waves),
        needs_switch=needs_switch,
        reason=None,
    )


class Pace(NamedTuple):
    """How the layers of a wave move.

    Attributes:
        moves_s: Seconds that they take on their links.
        step_s: Seconds of a step meanwhile.
        seconds: Seconds until all have arrived.
        hold_s: Seconds for which the vote of the first step may wait for them; 0 if they move beside steps.
    """

    moves_s: float
    step_s: float
    seconds: float
    hold_s: float = 0.0


def pace_of(wave: Wave, context: DecisionContext) -> Pace:
    """Return how the layers of a wave move: beside steps, or while the vote of a single step waits, if that costs less.

    Beside n steps of s seconds, sources tell shadow holders sums and parameters that take u seconds for all layers, of
    those that have arrived; and a layer that takes longer than a step, l > s, holds one up. The vote waits for all
    layers, which take m seconds, and then sums are told once:

        beside: u (n + 1) / 2 + sum(max(0, l - s));    at rest: max(0, m - s) + u
    """
    transfer = wave.migrating.transfer
    assert transfer is not None
    moves_s = pull_s(transfer.messages, context.senders) * context.migration_factor
    told_s = sums_s(transfer.messages, context.costs.workload, context.senders) * context.step_factor
    with_sums_s = wave.migrating.estimate.step_s * context.step_factor
    beside = Pace(moves_s, with_sums_s, moves_s)
    step_s = with_sums_s - told_s
    if moves_s <= step_s:
        return beside
    arriving = Counter[int]()
    for message in transfer.messages:
        arriving[message.destination] += len(message.layers)
    layers = max(arriving.values())
    layer_s = moves_s / layers
    steps = math.ceil(layers / max(1.0, step_s // layer_s))
    beside_s = told_s * (steps + 1) / 2 + layers * max(0.0, layer_s - step_s)
    if moves_s - step_s + told_s >= beside_s:
        return beside
    return Pace(moves_s, moves_s + told_s, moves_s + told_s, _HOLD_FACTOR * moves_s)


def _stretches(wave: Wave, pace: Pace, context: DecisionContext) -> list[tuple[float, float]]:
    """Return (seconds, seconds of a step) while the layers of a wave move, and of the plan that it reaches."""
    stretches = [(pace.seconds, pace.step_s)]
    if wave.reached is not None:
        step_s = wave.reached.estimate.step_s * context.step_factor
        stretches.append((_STEPS_BETWEEN * step_s, step_s))
    return stretches
