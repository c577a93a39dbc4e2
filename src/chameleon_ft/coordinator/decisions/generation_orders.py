"""The orders of a generation: what each of its workers runs, holds and moves."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft import recovery
from chameleon_ft.coordinator.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.coordinator.state.active_plan import ActivePlan, moves_of
from chameleon_ft.plan import Placement
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.plan.snapshots import SnapshotShare
from chameleon_ft.protocol.messages import Migrate, StartGeneration
from chameleon_ft.protocol.parts import Rest, pack_operations, pack_shards
from chameleon_ft.schedule import CostModel, Program, best_program, check_program
from chameleon_ft.storage.plans import CostsFrom, GenerationPlan
from chameleon_ft.sync import Segment, gradient_rounds, gradient_segments, tied_segments
from chameleon_ft.workload import Workload


def generation_orders(
    plan: RecoveryPlan, costs: CostModel, *, generation: int, costs_from: CostsFrom
) -> tuple[GenerationPlan, dict[int, StartGeneration]]:
    """Return the record of a generation, whose program is checked, and the orders of each of its workers.

    Raises ProgramError if the program breaks a rule; no worker may run it.
    """
    program = plan.program or best_program(plan.plan, costs, in_flight_limits=plan.in_flight_limits).program
    if not plan.is_checked:
        check_program(program, plan.plan)
    reduced = plan.plan.placement
    if plan.migration is not None:
        reduced = recovery.without_shadow_holders(reduced, plan.migration)
    record = GenerationPlan(
        generation=generation,
        first_step=plan.first_step,
        plan=replace(plan.plan, placement=reduced),
        program=program,
        costs=costs,
        costs_from=costs_from,
    )
    common = StartGeneration(
        generation=generation,
        members=plan.plan.workers,
        first_step=plan.first_step,
        operations="",
        segments=tuple(
            (segment.layers.start, segment.layers.stop, segment.holders, segment.tied)
            for segment in _segments(reduced, costs.workload.tied_layers)
        ),
        roll_forward=plan.roll_forward,
        load=plan.load,
        shards=plan.sharding and pack_shards(plan.sharding),
        gather=plan.gather,
        rebuilt=() if plan.restoration is None else plan.restoration.rebuilt,
    )
    return record, _orders_of_workers(plan, common, program, costs.workload)


def _segments(reduced: Placement, tied: tuple[tuple[int, ...], ...]) -> tuple[Segment, ...]:
    """Return the segments of gradients in the order of their reduction, followed by those with a single holder."""
    every = (*gradient_segments(reduced), *tied_segments(reduced, tied))
    alone = (segment for segment in every if len(segment.holders) == 1)
    return (*gradient_rounds(reduced, tied).order, *alone)


def _orders_of_workers(
    plan: RecoveryPlan, common: StartGeneration, program: Program, workload: Workload
) -> dict[int, StartGeneration]:
    """Return the orders of all participants.

    They are copies of `common`, because its fields grow with the number of workers and are encoded once for all copies;
    see `encode_alike`.
    """
    rests: dict[int, Rest] = {}
    if (rest := plan.salvaged) is not None:
        rests = Rest.of(rest.rest, rest.scheduled, plan.participants, rest_s=rest.rest_s)
    parts = {} if plan.transition is None else plan.transition.parts(workload.moving_layers)
    shares = None if plan.snapshots is None else plan.snapshots.shares()
    return {
        worker: common.model_copy(
            update={
                "operations": pack_operations(program.records_of(worker)),
                "transition": parts.get(worker),
                # A worker whose layers are still arriving has no share, but it votes for snapshots, too.
                "snapshots": None if shares is None else shares.get(worker, SnapshotShare()),
                "rest": rests.get(worker),
            }
        )
        for worker in plan.participants
    }


def migration_order(plan: ActivePlan, workload: Workload, *, generation: int) -> Migrate:
    """Return the order, the same for all workers of a generation, to move the layers and slices of a migration."""
    assert plan.migration is not None
    divided = workload.divided_bytes
    slices = tuple(
        (move.source, move.destination, move.layer, move.start, move.stop, divided[move.layer] * len(move) // UNITS)
        for move in plan.migrating_slices
    )
    return Migrate(
        generation=generation,
        moves=tuple(move for _, *move in moves_of(plan.migration, workload.moving_layers)),
        slices=slices,
        step_s=plan.predicted_step_s,
        hold_s=plan.hold_s,
    )
