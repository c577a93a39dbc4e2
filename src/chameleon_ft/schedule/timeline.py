"""When each operation starts and ends, predicted by replaying a program under a cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chameleon_ft.errors import ProgramError
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.program import Operation, OperationKind, Program

__all__ = ["TimedOperation", "Timeline", "replay"]


@dataclass(frozen=True, slots=True)
class TimedOperation:
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
        """The operations of one worker, in its order."""
        return tuple(timed for timed in self.operations if timed.worker == worker)

    def busy_s(self, worker: int) -> float:
        """Seconds that one worker computes."""
        return math.fsum(timed.end_s - timed.start_s for timed in self.of(worker))


def replay(program: Program, costs: CostModel) -> Timeline:
    """Run `program` under `costs`: an operation starts when its worker is free and what it needs is there.

    That is the longest path over the operations, exact for the cost model: messages take their time but hold up neither
    end, and a receive matches the operation that makes the tensor, wherever that is in the sender's order
    (`check_program` holds the orders to each other).

    Raises:
        ProgramError: operations wait for each other for ever, or for one that no worker runs.
    """
    # Tensors are named by (is gradient, micro-batch, hop that makes it).
    arrival_s: dict[tuple[bool, int, int], tuple[float, int]] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    orders = list(program.operations.items())
    position = [0] * len(orders)
    clock_s = [0.0] * len(orders)
    timed: list[list[TimedOperation]] = [[] for _ in orders]
    durations: dict[tuple[int, OperationKind, int, int], float] = {}
    messages: dict[tuple[int, int, int], float] = {}
    runnable = list(range(len(orders)))
    while runnable:
        index = runnable.pop()
        worker, operations = orders[index]
        now_s = clock_s[index]
        while position[index] < len(operations):
            operation = operations[position[index]]
            needs = _needs(operation)
            start_s = now_s
            if needs is not None:
                made = arrival_s.get(needs)
                if made is None:
                    waiting[needs] = index
                    break
                end_s, maker = made
                if maker != worker:
                    boundary = operation.layers.start if operation.kind is OperationKind.FORWARD else operation.layers.stop
                    key = (maker, worker, boundary)
                    message_s = messages.get(key)
                    if message_s is None:
                        message_s = costs.message_s(maker, worker, costs.message_bytes(boundary - 1))
                        messages[key] = message_s
                    end_s += message_s
                if end_s > start_s:
                    start_s = end_s
            layers = operation.layers
            cost_key = (worker, operation.kind, layers.start, layers.stop)
            duration_s = durations.get(cost_key)
            if duration_s is None:
                duration_s = durations[cost_key] = costs.operation_s(worker, operation)
            now_s = start_s + duration_s
            timed[index].append(TimedOperation(worker, operation, start_s, now_s))
            position[index] += 1
            if (makes := _makes(operation)) is not None:
                arrival_s[makes] = (now_s, worker)
                if (woken := waiting.pop(makes, None)) is not None:
                    runnable.append(woken)
        clock_s[index] = now_s
    stuck = [
        f"worker {worker} at {operations[position[index]]}"
        for index, (worker, operations) in enumerate(orders)
        if position[index] < len(operations)
    ]
    if stuck:
        raise ProgramError(f"the program never ends; waiting for what no one is going to make: {', '.join(stuck)}")
    return Timeline(tuple(timed_operation for of_worker in timed for timed_operation in of_worker))


# The tensors: ("activation" False, micro-batch, hop that makes it), ("gradient" True, micro-batch, hop that makes it),
# and for W what I left, which is a tensor of the same worker and named by the gradient that I made.


def _needs(operation: Operation) -> tuple[bool, int, int] | None:
    match operation.kind:
        case OperationKind.FORWARD:
            return None if operation.first else (False, operation.micro_batch, operation.hop - 1)
        case OperationKind.WEIGHT_GRAD:
            return (True, operation.micro_batch, operation.hop)
        case _ if operation.last:
            return (False, operation.micro_batch, operation.hop)
        case _:
            return (True, operation.micro_batch, operation.hop + 1)


def _makes(operation: Operation) -> tuple[bool, int, int] | None:
    match operation.kind:
        case OperationKind.FORWARD:
            return (False, operation.micro_batch, operation.hop)
        case OperationKind.WEIGHT_GRAD:
            return None
        case _:
            return (True, operation.micro_batch, operation.hop)
