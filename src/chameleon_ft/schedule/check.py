"""What must hold of a program before it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule.program import Operation, OperationKind, Program

__all__ = ["check_program"]

# Kind, micro-batch and hop of an operation.
_Key = tuple[OperationKind, int, int]


def check_program(program: Program, plan: Plan) -> None:
    """Raise ProgramError unless `program` runs `plan` to its end, whatever the timing.

    - Every hop of every route has its F, and its B or its I and W, exactly once, on the hop's worker, with the peers
      that the route gives it; on the worker, F comes before B or I, and I before W.
    - For each directed pair of workers, activations are received in the order in which they are sent, and so are
      gradients: there are no tags to tell messages apart.
    - It does not deadlock when each such channel holds one message and a send into a full channel blocks its worker.
    """
    _check_operations(program, plan)
    _check_channels(program)
    _check_blocking(program)


class _Channel(NamedTuple):
    """What carries messages of one kind from one worker to another."""

    sender: int
    receiver: int
    gradient: bool

    def __str__(self) -> str:
        return f"{'gradients' if self.gradient else 'activations'} from worker {self.sender} to worker {self.receiver}"


class _Message(NamedTuple):
    """A tensor by what needs it: the F, or the B or I, of a micro-batch at a hop."""

    micro_batch: int
    hop: int


def _check_operations(program: Program, plan: Plan) -> None:
    backward = (
        (OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD) if plan.split_backward else (OperationKind.BACKWARD,)
    )
    # A dict for its order, so that the first operation missing is the first of the plan.
    missing = {
        (Operation.of(kind, route, index, plan.recompute), hop.worker): None
        for route in plan.routes
        for index, hop in enumerate(route.hops)
        for kind in (OperationKind.FORWARD, *backward)
    }
    for worker in program.workers:
        seen: set[_Key] = set()
        for operation in program.of(worker):
            key = (operation.kind, operation.micro_batch, operation.hop)
            if (operation, worker) not in missing:
                problem = "twice" if key in seen else "in a form that the plan does not ask of it"
                raise ProgramError(f"worker {worker} runs {operation} {problem}; make the program from the plan")
            for needed in _needed_on_worker(operation):
                if needed not in seen:
                    kind, micro_batch, hop = needed
                    raise ProgramError(
                        f"worker {worker} runs {operation} before {kind}{micro_batch}.{hop}, which it needs"
                    )
            del missing[operation, worker]
            seen.add(key)
    if missing:
        operation, worker = next(iter(missing))
        raise ProgramError(
            f"the program lacks {len(missing)} operations of the plan, first {operation} on worker {worker}"
        )


def _needed_on_worker(operation: Operation) -> Iterator[_Key]:
    """The operations of the same worker that must come before; what others must have run is a matter of messages."""
    kind, micro_batch, hop = operation.kind, operation.micro_batch, operation.hop
    if kind is OperationKind.WEIGHT_GRAD:
        yield OperationKind.INPUT_GRAD, micro_batch, hop
    elif kind is OperationKind.FORWARD:
        if not operation.first and operation.receive_from is None:
            yield kind, micro_batch, hop - 1
    else:
        yield OperationKind.FORWARD, micro_batch, hop
        if not operation.last and operation.receive_from is None:
            yield kind, micro_batch, hop + 1


def _received(operation: Operation, worker: int) -> tuple[_Channel, _Message] | None:
    if operation.receive_from is None:
        return None
    gradient = operation.kind is not OperationKind.FORWARD
    return _Channel(operation.receive_from, worker, gradient), _Message(operation.micro_batch, operation.hop)


def _sent(operation: Operation, worker: int) -> tuple[_Channel, _Message] | None:
    if operation.send_to is None:
        return None
    gradient = operation.kind is not OperationKind.FORWARD
    hop = operation.hop + (-1 if gradient else 1)
    return _Channel(worker, operation.send_to, gradient), _Message(operation.micro_batch, hop)


def _check_channels(program: Program) -> None:
    sent: dict[_Channel, list[_Message]] = defaultdict(list)
    received: dict[_Channel, list[_Message]] = defaultdict(list)
    for worker in program.workers:
        for operation in program.of(worker):
            if (message := _received(operation, worker)) is not None:
                received[message[0]].append(message[1])
            if (message := _sent(operation, worker)) is not None:
                sent[message[0]].append(message[1])
    for channel in [*sent, *received]:
        for number, (out, taken) in enumerate(zip(sent[channel], received[channel], strict=True)):
            if out != taken:
                raise ProgramError(
                    f"{channel} arrive in another order than they are taken: message {number} is for micro-batch "
                    f"{out.micro_batch}, and micro-batch {taken.micro_batch} is expected"
                )


@dataclass(slots=True)
class _Walker:
    """A worker on its way through its operations; `sending` while the result of the present one cannot be sent."""

    worker: int
    operations: tuple[Operation, ...]
    position: int = 0
    sending: bool = False


def _check_blocking(program: Program) -> None:
    walkers = {worker: _Walker(worker, program.of(worker)) for worker in program.workers}
    full: set[_Channel] = set()
    active = list(walkers)
    while active:
        walker = walkers[active.pop()]
        while walker.position < len(walker.operations):
            operation = walker.operations[walker.position]
            if not walker.sending:
                received = _received(operation, walker.worker)
                if received is not None:
                    if received[0] not in full:
                        break
                    full.remove(received[0])
                    active.append(received[0].sender)
                walker.sending = True
            sent = _sent(operation, walker.worker)
            if sent is not None:
                if sent[0] in full:
                    break
                full.add(sent[0])
                active.append(sent[0].receiver)
            walker.sending = False
            walker.position += 1
    stuck = [
        f"worker {walker.worker} {'sending the result of' if walker.sending else 'waiting to run'} "
        f"{walker.operations[walker.position]}"
        for walker in walkers.values()
        if walker.position < len(walker.operations)
    ]
    if stuck:
        raise ProgramError(f"the program deadlocks when sends block: {', '.join(stuck)}")
