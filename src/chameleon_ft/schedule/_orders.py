"""From the order of each worker's operations, given as codes, to a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from chameleon_ft.plan.plan import Plan, Route
from chameleon_ft.schedule._records import PROGRAM_RECORD, Integers, Records
from chameleon_ft.schedule.components import Component, different_ways
from chameleon_ft.schedule.program import Operation, OperationKind, Program, records_from


def build_program(plan: Plan, orders: Iterable[tuple[Component, Sequence[Integers]]]) -> Program:
    """Build the program of a plan from the order of its operations.

    Args:
        plan: what to run.
        orders: of each component, by worker in the order of `component.workers`, codes of its operations; int64 each.
    """
    records = dict.fromkeys(plan.workers, np.empty(0, PROGRAM_RECORD))
    for component, own in orders:
        by_code = records_by_code(plan, component.routes)
        records.update(zip(component.workers, map(by_code.__getitem__, own), strict=True))
    return Program.of_records(records)


def records_by_code(plan: Plan, routes: Sequence[Route]) -> Records:
    """The operations of these routes by their codes, as an array of `PROGRAM_RECORD`.

    If only some of them split their backward, the B of the others has the code of I, and the plan asks for no operation
    with their codes of W.
    """
    ways, taken = different_ways(route.hops for route in routes)
    split = [plan.splits(hops[0].worker) for hops in ways]
    kinds = kinds_by_phase(split_backward=any(split))
    # The fields that do not depend on the micro-batch: by phase, and way after way by hop.
    common = [
        records_from(
            Operation.of(
                kind if is_split or phase != 1 else OperationKind.BACKWARD, Route(0, hops), hop, plan.recompute
            )
            for hops, is_split in zip(ways, split, strict=True)
            for hop in range(len(hops))
        )
        for phase, kind in enumerate(kinds)
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
