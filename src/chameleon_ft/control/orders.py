"""From a decision to the orders that carry it out."""

from __future__ import annotations

from collections.abc import Mapping

from chameleon_ft.control.decision import Decision
from chameleon_ft.control.messages import Run
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program, check_program
from chameleon_ft.sync import gradient_segments

__all__ = ["orders"]


def orders(
    decision: Decision,
    costs: CostModel,
    *,
    ceiling: Mapping[int, InFlightLimit],
    generation: int,
    store_port: int,
) -> dict[int, Run]:
    """Return what each worker of the plan is told, having checked that the program can be run.

    Args:
        ceiling: micro-batches that each worker can keep at most.
        generation: the generation to form.
        store_port: port of the rendezvous store.

    Raises:
        ProgramError: the program breaks a rule; nobody must be told to run it.
    """
    plan = decision.plan
    program = best_program(plan, costs, ceiling=ceiling).program
    check_program(program, plan)
    segments = tuple(
        (segment.layers.start, segment.layers.stop, segment.holders) for segment in gradient_segments(plan.placement)
    )
    return {
        worker: Run(
            generation=generation,
            members=plan.workers,
            store_port=store_port,
            first_step=decision.first_step,
            operations=Run.pack_operations(program.of(worker)),
            segments=segments,
            roll_forward=decision.roll_forward,
            load=decision.load,
        )
        for worker in plan.workers
    }
