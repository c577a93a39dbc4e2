"""What must hold of a program before it runs."""

from __future__ import annotations

from collections import defaultdict

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule.program import Operation, OperationKind, Program

__all__ = ["check_program"]

_Channel = tuple[int, int, bool]
_Message = tuple[int, int]


def check_program(program: Program, plan: Plan) -> None:
    """Raise ProgramError unless `program` runs `plan` to its end, whatever the timing.

    - Every hop of every route has its F, and its B or I and W, exactly once, on the hop's worker, with the peers that the
      route gives it, in the order F, I, W.
    - For each directed pair of workers, activations are received in the order in which they are sent, and so are
      gradients: there are no tags to tell messages apart.
    - It does not deadlock when each such channel holds one message and a send blocks until the one before is received.
    """
    _check_operations(program, plan)
    _check_channels(program)
    _check_blocking(program)


def _check_operations(program: Program, plan: Plan) -> None:
    backward = (
        (OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD) if plan.split_backward else (OperationKind.BACKWARD,)
    )
    wanted: dict[tuple[int, int, OperationKind], tuple[int, Operation]] = {}
    for route in plan.routes:
        for position, hop in enumerate(route.hops):
            before = route.hops[position - 1].worker if position else None
            after = route.hops[position + 1].worker if position + 1 < len(route.hops) else None
            before = None if before == hop.worker else before
            after = None if after == hop.worker else after
            for kind in (OperationKind.FORWARD, *backward):
                receive_from, send_to = {
                    OperationKind.FORWARD: (before, after),
                    OperationKind.WEIGHT_GRAD: (None, None),
                }.get(kind, (after, before))
                wanted[route.micro_batch, position, kind] = (
                    hop.worker,
                    Operation(
                        kind,
                        route.micro_batch,
                        position,
                        hop.layers,
                        receive_from,
                        send_to,
                        position == 0,
                        position + 1 == len(route.hops),
                    ),
                )
    for worker in program.workers:
        seen: set[tuple[int, int, OperationKind]] = set()
        for operation in program.of(worker):
            key = (operation.micro_batch, operation.hop, operation.kind)
            if wanted.get(key) != (worker, operation):
                raise ProgramError(f"worker {worker} runs {operation}, which the plan does not ask of it in that form")
            if key in seen:
                raise ProgramError(f"worker {worker} runs {operation} twice")
            needed = {
                OperationKind.FORWARD: None,
                OperationKind.WEIGHT_GRAD: OperationKind.INPUT_GRAD,
            }.get(operation.kind, OperationKind.FORWARD)
            if needed is not None and (operation.micro_batch, operation.hop, needed) not in seen:
                raise ProgramError(f"worker {worker} runs {operation} before the {needed} of the same micro-batch")
            seen.add(key)
    run = sum(len(program.of(worker)) for worker in program.workers)
    if run != len(wanted):
        present = {(o.micro_batch, o.hop, o.kind) for worker in program.workers for o in program.of(worker)}
        missing = next(wanted[key] for key in wanted if key not in present)
        raise ProgramError(f"{len(wanted) - run} operations are missing, first {missing[1]} on worker {missing[0]}")


def _check_channels(program: Program) -> None:
    sent: dict[_Channel, list[_Message]] = defaultdict(list)
    received: dict[_Channel, list[_Message]] = defaultdict(list)
    for worker in program.workers:
        for operation in program.of(worker):
            gradient = operation.kind is not OperationKind.FORWARD
            step = -1 if gradient else 1
            if operation.receive_from is not None:
                received[operation.receive_from, worker, gradient].append((operation.micro_batch, operation.hop))
            if operation.send_to is not None:
                sent[worker, operation.send_to, gradient].append((operation.micro_batch, operation.hop + step))
    for channel in sent.keys() | received.keys():
        if sent[channel] != received[channel]:
            source, target, gradient = channel
            raise ProgramError(
                f"worker {target} does not receive {'gradients' if gradient else 'activations'} from worker {source} "
                "in the order in which they are sent"
            )


def _check_blocking(program: Program) -> None:
    orders = list(program.operations.items())
    position = [0] * len(orders)
    sending = [False] * len(orders)
    index_of = {worker: index for index, (worker, _) in enumerate(orders)}
    full: set[_Channel] = set()
    made: set[tuple[int, int, bool]] = set()
    runnable = list(range(len(orders)))
    while runnable:
        index = runnable.pop()
        worker, operations = orders[index]
        while position[index] < len(operations):
            operation = operations[position[index]]
            gradient = operation.kind is not OperationKind.FORWARD
            if not sending[index]:
                if operation.receive_from is not None:
                    channel = (operation.receive_from, worker, gradient)
                    if channel not in full:
                        break
                    full.remove(channel)
                    runnable.append(index_of[operation.receive_from])
                elif not gradient and not operation.first:
                    if (operation.micro_batch, operation.hop - 1, False) not in made:
                        break
                elif operation.kind in (OperationKind.BACKWARD, OperationKind.INPUT_GRAD) and not operation.last:
                    if (operation.micro_batch, operation.hop + 1, True) not in made:
                        break
                sending[index] = True
            if operation.send_to is not None:
                channel = (worker, operation.send_to, gradient)
                if channel in full:
                    break
                full.add(channel)
                runnable.append(index_of[operation.send_to])
            elif operation.kind is not OperationKind.WEIGHT_GRAD:
                made.add((operation.micro_batch, operation.hop, gradient))
            sending[index] = False
            position[index] += 1
    stuck = [
        f"worker {worker} at {operations[position[index]]}"
        for index, (worker, operations) in enumerate(orders)
        if position[index] < len(operations)
    ]
    if stuck:
        raise ProgramError(f"the program deadlocks with blocking sends: {', '.join(stuck)}")
