"""When each operation starts and ends, predicted by replaying a program under a cost model."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

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
    end. Whether sends and receives match in order is left to `check_program`.

    Raises:
        ProgramError: operations wait for each other for ever, or for one that no worker runs.
    """
    workers = [_Worker(worker, program.of(worker)) for worker in program.workers]
    made: dict[_Tensor, tuple[float, int]] = {}
    waiting: dict[_Tensor, list[_Worker]] = defaultdict(list)
    times = _Times(costs)
    runnable = list(workers)
    while runnable:
        worker = runnable.pop()
        for operation in worker.operations[len(worker.done) :]:
            start_s = worker.free_s
            needs = _needs(operation)
            if needs is not None:
                if needs not in made:
                    waiting[needs].append(worker)
                    break
                end_s, maker = made[needs]
                if maker != worker.id:
                    end_s += times.message_s(maker, worker.id, operation)
                start_s = max(start_s, end_s)
            worker.free_s = start_s + times.operation_s(worker.id, operation)
            worker.done.append(TimedOperation(worker.id, operation, start_s, worker.free_s))
            makes = _makes(operation)
            if makes is not None:
                made[makes] = worker.free_s, worker.id
                runnable += waiting.pop(makes, ())
    stuck = [
        f"worker {worker.id} at {worker.operations[len(worker.done)]}"
        for worker in workers
        if len(worker.done) < len(worker.operations)
    ]
    if stuck:
        raise ProgramError(f"the program never ends: nobody will ever make what is needed by {', '.join(stuck)}")
    return Timeline(tuple(timed for worker in workers for timed in worker.done))


# What an operation makes, or needs from another: whether it is a gradient, micro-batch, and index of the hop that makes
# it. What I leaves for W goes by the name of the gradient that I makes.
_Tensor = tuple[bool, int, int]


def _needs(operation: Operation) -> _Tensor | None:
    if operation.kind is OperationKind.FORWARD:
        return None if operation.first else (False, operation.micro_batch, operation.hop - 1)
    if operation.kind is OperationKind.WEIGHT_GRAD:
        return (True, operation.micro_batch, operation.hop)
    if operation.last:
        return (False, operation.micro_batch, operation.hop)
    return (True, operation.micro_batch, operation.hop + 1)


def _makes(operation: Operation) -> _Tensor | None:
    if operation.kind is OperationKind.WEIGHT_GRAD:
        return None
    return (operation.kind is not OperationKind.FORWARD, operation.micro_batch, operation.hop)


@dataclass(slots=True)
class _Worker:
    """A worker on its way through its operations; free from `free_s` on."""

    id: int
    operations: tuple[Operation, ...]
    free_s: float = 0.0
    done: list[TimedOperation] = field(default_factory=list)


class _Times:
    """Remembers the few different times that a program has."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._operation_s: dict[tuple[int, OperationKind, int, int], float] = {}
        self._message_s: dict[tuple[int, int, int], float] = {}

    def operation_s(self, worker: int, operation: Operation) -> float:
        key = (worker, operation.kind, operation.layers.start, operation.layers.stop)
        found = self._operation_s.get(key)
        if found is None:
            found = self._operation_s[key] = self._costs.operation_s(worker, operation)
        return found

    def message_s(self, maker: int, worker: int, operation: Operation) -> float:
        """Of the message that `operation` on `worker` needs."""
        layers = operation.layers
        last_before = (layers.start if operation.kind is OperationKind.FORWARD else layers.stop) - 1
        key = (maker, worker, last_before)
        found = self._message_s.get(key)
        if found is None:
            found = self._costs.message_s(maker, worker, self._costs.message_bytes(last_before))
            self._message_s[key] = found
        return found
