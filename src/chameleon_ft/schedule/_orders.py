"""From the order of each worker's operations, given as codes, to a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from chameleon_ft.plan.placement import RecomputedLayers
from chameleon_ft.plan.plan import Plan, Route
from chameleon_ft.schedule._records import Integers, Records
from chameleon_ft.schedule.components import different_ways
from chameleon_ft.schedule.program import Operation, OperationKind, Program, records_from


def build_program(plan: Plan, orders: Iterable[Integers]) -> Program:
    """The program whose operations have these codes, by worker in ascending order of ids."""
    by_code = records_by_code(plan.routes, split_backward=plan.split_backward, recompute=plan.recompute)
    return Program.of_records(dict(zip(plan.workers, map(by_code.__getitem__, orders), strict=True)))


def records_by_code(
    routes: Sequence[Route], *, split_backward: bool, recompute: Mapping[int, RecomputedLayers]
) -> Records:
    """The operations of these routes by their codes, as an array of `PROGRAM_RECORD`."""
    kinds = kinds_by_phase(split_backward=split_backward)
    ways, taken = different_ways(route.hops for route in routes)
    # The fields that do not depend on the micro-batch: by phase, and way after way by hop.
    common = [
        records_from(Operation.of(kind, Route(0, hops), hop, recompute) for hops in ways for hop in range(len(hops)))
        for kind in kinds
    ]
    lengths = np.array([len(hops) for hops in ways])
    begins = np.cumsum(lengths) - lengths
    way = np.array(taken)
    hops_of_route = lengths[way]
    before = np.cumsum(hops_of_route) - hops_of_route
    slots = np.arange(hops_of_route.sum()) + np.repeat(begins[way] - before, hops_of_route)
    records = np.concatenate([own[slots] for own in common])
    records["micro_batch"] = np.tile(np.repeat([route.micro_batch for route in routes], hops_of_route), len(kinds))
    return records


def kinds_by_phase(*, split_backward: bool) -> tuple[OperationKind, ...]:
    """The kind of operation of each phase: codes are numbers of slots, phase after phase."""
    if split_backward:
        return OperationKind.FORWARD, OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD
    return OperationKind.FORWARD, OperationKind.BACKWARD
