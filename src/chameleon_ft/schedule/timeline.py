"""When each operation starts and ends, predicted by replaying a program under a cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from chameleon_ft.errors import ProgramError
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.program import Operation, OperationKind, Program
from chameleon_ft.schedule.records import OPERATION, Records


class TimedOperation(NamedTuple):
    """An operation on a worker with its start and end, in seconds since the start of the step."""

    worker: int
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The operations of a step with their times, worker by worker, each worker's in the order it runs them."""

    operations: tuple[TimedOperation, ...]

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of its last operation; zero when there are none."""
        return max((timed.end_s for timed in self.operations), default=0.0)

    def of(self, worker: int) -> tuple[TimedOperation, ...]:
        """Return the operations of one worker, in its order."""
        return tuple(timed for timed in self.operations if timed.worker == worker)

    def busy_s(self, worker: int) -> float:
        """Return the seconds that one worker computes."""
        return math.fsum(timed.end_s - timed.start_s for timed in self.of(worker))


def replay(program: Program, costs: CostModel) -> Timeline:
    """Replay `program` under `costs`: an operation starts when its worker is free and its input is there.

    The result is the longest path over the operations, exact for the cost model: messages take time but delay neither
    end. `check_program` checks whether sends and receives match in order.

    Raises:
        ProgramError: operations wait for each other forever, or for one that no worker runs.
    """
    by_worker = program.operations
    operations = [*chain.from_iterable(by_worker.values())]
    workers = [worker for worker, own in by_worker.items() for _ in own]
    if not operations:
        return Timeline(())
    # Imported here: importing a kernel loads numba, and most users of this module run none.
    from chameleon_ft.schedule._kernels.replay import longest_path

    found = longest_path(_needs(workers, operations, costs), np.arange(len(operations)), np.array(program.starts))
    starts_s, ends_s = (times_s.tolist() for times_s in found)
    if min(ends_s) < 0:
        orders = (range(*own) for own in pairwise(program.starts))
        never = (next((number for number in order if ends_s[number] < 0), None) for order in orders)
        stuck = ", ".join(f"worker {workers[number]} at {operations[number]}" for number in never if number is not None)
        raise ProgramError(f"the program never ends: no operation will make what is needed by {stuck}")
    return Timeline(tuple(map(TimedOperation, workers, operations, starts_s, ends_s)))


def _needs(workers: list[int], operations: list[Operation], costs: CostModel) -> Records:
    """`OPERATION` of each operation, of which `workers` has the worker.

    An output is identified by whether it is a gradient, its micro-batch, and its hop. W needs the output of I, because
    what I leaves for it is there at the same time.
    """
    forward, weight_grad = OperationKind.FORWARD, OperationKind.WEIGHT_GRAD
    makers = {
        (operation.kind is not forward, operation.micro_batch, operation.hop): number
        for number, operation in enumerate(operations)
        if operation.kind is not weight_grad
    }
    # Operations and messages have few different times.
    compute_s = cache(costs.compute_s)

    @cache
    def message_s(maker: int, worker: int, layer: int) -> float:
        return costs.message_s(maker, worker, costs.message_bytes(layer))

    needs, delay_s, duration_s = [-1] * len(operations), [0.0] * len(operations), [0.0] * len(operations)
    for number, (worker, operation) in enumerate(zip(workers, operations, strict=True)):
        kind, layers, micro_batch, hop = operation.kind, operation.layers, operation.micro_batch, operation.hop
        duration_s[number] = compute_s(worker, kind, layers, recompute=operation.recompute)
        if kind is forward:
            if operation.first:
                continue
            made_by = (False, micro_batch, hop - 1)
        elif kind is weight_grad:
            made_by = (True, micro_batch, hop)
        else:
            made_by = (False, micro_batch, hop) if operation.last else (True, micro_batch, hop + 1)
        needs[number] = needed = makers.get(made_by, number)
        if workers[needed] != worker:
            delay_s[number] = message_s(workers[needed], worker, (layers.start if kind is forward else layers.stop) - 1)
    found = np.empty(len(operations), OPERATION)
    found["needs"], found["delay_s"], found["duration_s"] = needs, delay_s, duration_s
    return found
