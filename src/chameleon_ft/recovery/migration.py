"""Migration: layers move to new holders while another plan trains, so that no worker waits for them.

If memory does not hold all moving layers during training, they move in parts, waves, and others are dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from chameleon_ft.cost.memory import workload_memory
from chameleon_ft.cost.step import peak_bytes_of
from chameleon_ft.cost.transition import received_layers
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.recovery.context import CourseDraft, DecisionContext
from chameleon_ft.recovery.scoring import Candidate
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import reroute
from chameleon_ft.transfer import Transfer, pull_s, sums_s, transfer_to

_Layers: TypeAlias = dict[int, set[int]]
"""Worker -> the layers that it holds, or is to hold."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Layers that move together while the run trains.

    Attributes:
        migrating: the plan under which they move, with their transfer: the routes of the plan before it, with each
            receiver as a shadow holder. It receives the sums of gradients and applies updates, but runs no operation of
            these layers.
        reached: the plan to switch to once they have arrived; None for the last wave, because the plan follows then
            for which the layers move.
    """

    migrating: CourseDraft
    reached: CourseDraft | None


def present_draft(context: DecisionContext) -> CourseDraft:
    """Return the plan in force as it trains, with the workers that leave, which train until they are out of it."""
    return CourseDraft.of(context.plan, context.in_flight_limits, CostModel(context.costs.workload, context.senders))


def waves_to(present: CourseDraft, transfer: Transfer, costs: CostModel) -> tuple[Wave, ...]:
    """Return the waves in which layers move during training; none if memory does not hold them.

    One wave if all layers fit beside the present plan. Otherwise each wave moves as many layers as each receiver has
    memory for. Then the run switches to a plan in which workers drop layers that they hold for the last time, so that
    there is memory for the next wave: a worker that still lacks layers drops what others hold, and any other worker
    drops a layer once as many others hold it as in the end. Other holders run what is dropped, see `reroute`. In these
    plans, as few micro-batches are in flight as in 1F1B, and if that is not enough, workers that still lack layers
    recompute all of theirs. If possible, every layer keeps two holders, or as many as it has.

    Greedy, so there may be fewer waves, or some where none is found. Deterministic. The program of each plan fits the
    memory of every worker, and every wave brings a layer that is wanted in the end and dropped by no later plan.

    Args:
        present: the plan in force, without lost workers.
        transfer: leads to the placement that is wanted.
        costs: with the workers of both placements.
    """
    whole = migration_of(present, transfer, costs)
    if not whole.estimate.over_capacity(costs):
        return (Wave(whole, None),)
    for recomputes in (False, True):
        lean = _lean(present.plan, transfer.placement, costs, recomputes=recomputes)
        for copies in (2, 1):
            if waves := _waves(lean, transfer.placement, costs, copies=copies, recomputes=recomputes):
                return waves
    return ()


def _lean(plan: Plan, target: Placement, costs: CostModel, *, recomputes: bool) -> CourseDraft:
    """Draft a plan with little memory; with `recomputes`, workers that lack layers recompute all that they have."""
    if recomputes:
        held, wanted = _layers_of(plan.placement), _layers_of(target)
        lacking = [worker for worker, own in held.items() if wanted.get(worker, set()) - own]
        spans = {worker: plan.placement.span(worker) for worker in lacking}
        full = {worker: RecomputedLayers(span.start, span.stop) for worker, span in spans.items()}
        plan = replace(plan, recompute={**plan.recompute, **full})
    return CourseDraft.lean(plan, costs)


def migration_of(draft: CourseDraft, transfer: Transfer, costs: CostModel) -> CourseDraft:
    """Return the plan under which layers move from the placement of a plan, with the schedules of that plan."""
    plan = with_shadow_holders(draft.plan, transfer.placement)
    estimate = replace(
        draft.estimate,
        step_s=draft.estimate.step_s + sums_s(transfer.messages, costs.workload, costs.cluster),
        peak_bytes=peak_bytes_of(plan, draft.parts, costs, draft.plan.placement, transfer.placement),
    )
    return replace(draft, plan=plan, estimate=estimate, transfer=transfer)


def with_shadow_holders(plan: Plan, target: Placement) -> Plan:
    """Return the plan with each worker as a holder of the layers of `target` too, and its routes as they are."""
    held, wanted = _layers_of(plan.placement), _layers_of(target)
    both = {worker: held.get(worker, set()) | wanted.get(worker, set()) for worker in held.keys() | wanted.keys()}
    return replace(plan, placement=_placement(both, target.num_layers))


def without_shadow_holders(placement: Placement, transfer: Transfer) -> Placement:
    """Return the placement of the plan in force, from that of the plan under which the layers of `transfer` move."""
    held = _layers_of(placement)
    for message in transfer.messages:
        held[message.destination] -= set(message.layers)
    return _placement(held, placement.num_layers)


def _waves(
    draft: CourseDraft, target: Placement, costs: CostModel, *, copies: int, recomputes: bool
) -> tuple[Wave, ...]:
    """Return the waves from a plan to a placement; while layers are on their way, each has so many copies if it had."""
    waves: list[Wave] = []
    wanted = _layers_of(target)
    while True:
        held = _layers_of(draft.plan.placement)
        missing = {worker: own - held.get(worker, set()) for worker, own in wanted.items()}
        arriving = _arriving(draft, held, missing, target, costs)
        if not any(arriving.values()):
            return ()
        holding = {worker: held.get(worker, set()) | arriving.get(worker, set()) for worker in held.keys() | arriving}
        placement = _placement(holding, target.num_layers)
        layers = received_layers(costs.workload, placement)
        transfer = transfer_to(draft.plan.placement, placement, live=costs.cluster.hosts, layers=layers)
        migrating = migration_of(draft, transfer, costs)
        if migrating.estimate.over_capacity(costs):
            return ()
        if arriving == missing:
            return (*waves, Wave(migrating, None))
        kept = _kept(holding, wanted, costs, copies=copies)
        if kept == holding:
            return ()
        draft = _lean(_with_dropped(migrating.plan, kept, costs), target, costs, recomputes=recomputes)
        if draft.estimate.over_capacity(costs):
            return ()
        waves.append(Wave(migrating, draft))


def _arriving(draft: CourseDraft, held: _Layers, missing: _Layers, target: Placement, costs: CostModel) -> _Layers:
    """Return the missing layers that fit the memory of their receivers beside a step.

    Layers of workers that lack others come first, because with another holder these workers can drop them.
    """
    memory, placements = workload_memory(costs.workload), (draft.plan.placement, target)
    droppable = Counter(layer for worker, own in missing.items() if own for layer in held.get(worker, ()))
    arriving: _Layers = {}
    for worker, lacking in missing.items():
        own, arriving[worker] = held.get(worker, set()), set()
        room = costs.cluster.capacity_bytes(worker)
        room -= draft.estimate.peak_bytes.get(worker, 0) - memory.state_of([own], *placements).total_bytes
        for layer in sorted(lacking, key=lambda layer: (-droppable[layer], layer)):
            if memory.state_of([own | arriving[worker] | {layer}], *placements).total_bytes <= room:
                arriving[worker].add(layer)
    return arriving


def _kept(holding: _Layers, wanted: _Layers, costs: CostModel, *, copies: int) -> _Layers:
    """Return what workers hold after a wave, of what they held in it."""
    kept = {worker: set(own) for worker, own in holding.items()}
    holders = Counter(layer for own in holding.values() for layer in own)
    final = Counter(layer for own in wanted.values() for layer in own)
    num_bytes = [layer.held_bytes for layer in costs.workload.layers]
    lacks = {worker: sum(num_bytes[each] for each in wanted.get(worker, set()) - own) for worker, own in kept.items()}
    for worker in sorted(kept, key=lambda worker: (-lacks[worker], worker)):
        for layer in sorted(kept[worker] - wanted.get(worker, set()), key=lambda layer: (-holders[layer], layer)):
            if holders[layer] > (copies if lacks[worker] > 0 else final[layer]):
                kept[worker].remove(layer)
                holders[layer] -= 1
                lacks[worker] -= num_bytes[layer]
    return kept


def _with_dropped(plan: Plan, kept: _Layers, costs: CostModel) -> Plan:
    """Return the plan in which workers hold no more than `kept`, and others run what they drop.

    For `reroute`, dropped layers are those of lost workers, one for each worker that drops some.
    """
    held = _layers_of(plan.placement)
    first = 1 + max(max(held), *(worker.id for worker in costs.cluster.workers))
    dropped = {first + worker: own - kept[worker] for worker, own in held.items() if own - kept[worker]}

    def pieces(hop: Hop) -> Iterable[Hop]:
        for is_kept, layers in groupby(hop.layers, key=kept[hop.worker].__contains__):
            own = tuple(layers)
            yield Hop(hop.worker + (0 if is_kept else first), LayerRange(own[0], own[-1] + 1))

    cut = {hops: tuple(piece for hop in hops for piece in pieces(hop)) for hops in {r.hops for r in plan.routes}}
    recompute: dict[int, RecomputedLayers] = {}
    for worker, layers in plan.recompute.items():
        own = kept[worker].intersection(layers)
        again = layers.intersection(LayerRange(min(own), max(own) + 1)) if own else None
        if again is not None:
            recompute[worker] = again
    fused = plan.fused_workers
    return reroute(
        Plan(
            placement=_placement(kept | dropped, plan.placement.num_layers),
            routes=tuple(Route(route.micro_batch, cut[route.hops]) for route in plan.routes),
            split_backward=plan.split_backward,
            recompute=recompute,
            fused_workers=frozenset(
                each for worker in fused for each in (worker, first + worker) if kept.get(each) or each in dropped
            ),
        ),
        dropped,
        costs,
        searches=False,
    )


def _layers_of(placement: Placement) -> _Layers:
    return {worker: {layer for own in ranges for layer in own} for worker, ranges in placement.ranges.items()}


def _placement(held: Mapping[int, set[int]], num_layers: int) -> Placement:
    """Return the placement of these layers, without workers that hold none."""
    ranges: dict[int, tuple[LayerRange, ...]] = {}
    for worker, layers in held.items():
        runs = [
            [layer for _, layer in run]
            for _, run in groupby(enumerate(sorted(layers)), key=lambda each: each[1] - each[0])
        ]
        if runs:
            ranges[worker] = tuple(LayerRange(run[0], run[-1] + 1) for run in runs)
    return Placement(num_layers, ranges)


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
