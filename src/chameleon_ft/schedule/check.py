"""What must hold of a program before it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple, NoReturn

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan.plan import Plan, Route
from chameleon_ft.schedule._components import different_ways
from chameleon_ft.schedule.program import Operation, OperationKind, Program

__all__ = ["check_program"]

# Kind, micro-batch and hop of an operation.
_Key = tuple[OperationKind, int, int]
# All else that there is of an operation.
_form: Final = attrgetter("layers", "receive_from", "send_to", "first", "last", "recompute")


def check_program(program: Program, plan: Plan) -> None:
    """Raise ProgramError unless `program` runs `plan` to its end, whatever the timing.

    - Every hop of every route has its F, and its B or its I and W, exactly once, on the hop's worker, with the peers
      that the route gives it; on the worker, F comes before B or I, and I before W.
    - For each directed pair of workers, activations are received in the order in which they are sent, and so are
      gradients: there are no tags to tell messages apart.
    - It does not deadlock when each such channel holds one message and a send into a full channel blocks its worker.
    """
    _check_operations(program, plan)
    messages = _Messages(program)
    _check_order(messages)
    _check_blocking(program, messages)


class _Channel(NamedTuple):
    """What carries messages of one kind from one worker to another."""

    sender: int
    receiver: int
    gradient: bool

    def __str__(self) -> str:
        return f"{'gradients' if self.gradient else 'activations'} from worker {self.sender} to worker {self.receiver}"


def _check_operations(program: Program, plan: Plan) -> None:
    backward = (
        (OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD) if plan.split_backward else (OperationKind.BACKWARD,)
    )
    kinds = (OperationKind.FORWARD, *backward)
    ways, taken = different_ways(route.hops for route in plan.routes)
    # What operations have to be, whatever their micro-batch, by way, hop and kind.
    wanted = [
        [
            {kind: _form(Operation.of(kind, Route(0, hops), hop, plan.recompute)) for kind in kinds}
            for hop in range(len(hops))
        ]
        for hops in ways
    ]
    count = 0
    for worker in program.workers:
        seen: set[_Key] = set()
        for operation in program.of(worker):
            kind, micro_batch, hop = key = operation.kind, operation.micro_batch, operation.hop
            known = 0 <= micro_batch < len(taken) and 0 <= hop < len(wanted[taken[micro_batch]])
            way = taken[micro_batch] if known else 0
            if (
                not known
                or ways[way][hop].worker != worker
                or wanted[way][hop].get(kind) != _form(operation)
                or key in seen
            ):
                problem = "twice" if key in seen else "in a form that the plan does not ask of it"
                raise ProgramError(f"worker {worker} runs {operation} {problem}; make the program from the plan")
            for needed in _needed_on_worker(operation):
                if needed not in seen:
                    before = f"{needed[0]}{needed[1]}.{needed[2]}"
                    raise ProgramError(f"worker {worker} runs {operation} before {before}, which it needs")
            seen.add(key)
        count += len(seen)
    if count < len(kinds) * sum(len(route.hops) for route in plan.routes):
        _complain_of_missing(program, plan, kinds)


def _complain_of_missing(program: Program, plan: Plan, kinds: Sequence[OperationKind]) -> NoReturn:
    there = {(each.kind, each.micro_batch, each.hop) for worker in program.workers for each in program.of(worker)}
    every = ((kind, route, hop) for route in plan.routes for hop in range(len(route.hops)) for kind in kinds)
    missing = [each for each in every if (each[0], each[1].micro_batch, each[2]) not in there]
    kind, route, hop = missing[0]
    raise ProgramError(
        f"the program lacks {len(missing)} operations of the plan, first "
        f"{Operation.of(kind, route, hop, plan.recompute)} on worker {route.hops[hop].worker}"
    )


def _needed_on_worker(operation: Operation) -> tuple[_Key, ...]:
    """The operations of the same worker that must come before; what others must have run is a matter of messages."""
    kind, micro_batch, hop = operation.kind, operation.micro_batch, operation.hop
    if kind is OperationKind.WEIGHT_GRAD:
        return ((OperationKind.INPUT_GRAD, micro_batch, hop),)
    if kind is OperationKind.FORWARD:
        return ((kind, micro_batch, hop - 1),) if not operation.first and operation.receive_from is None else ()
    forward = OperationKind.FORWARD, micro_batch, hop
    if not operation.last and operation.receive_from is None:
        return forward, (kind, micro_batch, hop + 1)
    return (forward,)


class _Messages:
    """What the operations of a program receive and send.

    Attributes:
        channels: what carries messages, each with its number.
        sent, received: by number of the channel, the messages in order, each a micro-batch and the hop that needs it.
        of_worker: for each operation of a worker the channels that it receives from and sends into, or -1.
    """

    def __init__(self, program: Program) -> None:
        # Plain tuples, which are made sooner, of all but the channels that are complained of.
        self.channels: dict[tuple[int, int, bool], int] = {}
        self.sent: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.received: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.of_worker: dict[int, list[tuple[int, int]]] = {}
        for worker in program.workers:
            own = self.of_worker[worker] = []
            for operation in program.of(worker):
                gradient = operation.kind is not OperationKind.FORWARD
                source = target = -1
                if operation.receive_from is not None:
                    source = self._number(operation.receive_from, worker, gradient)
                    self.received[source].append((operation.micro_batch, operation.hop))
                if operation.send_to is not None:
                    target = self._number(worker, operation.send_to, gradient)
                    self.sent[target].append((operation.micro_batch, operation.hop + (-1 if gradient else 1)))
                own.append((source, target))

    def _number(self, sender: int, receiver: int, gradient: bool) -> int:
        return self.channels.setdefault((sender, receiver, gradient), len(self.channels))


def _check_order(messages: _Messages) -> None:
    for channel, number in messages.channels.items():
        sent, received = messages.sent[number], messages.received[number]
        for place, (out, taken) in enumerate(zip(sent, received, strict=True)):
            if out != taken:
                raise ProgramError(
                    f"{_Channel(*channel)} arrive in another order than they are taken: message {place} is for "
                    f"micro-batch {out[0]}, and micro-batch {taken[0]} is expected"
                )


@dataclass(slots=True)
class _Walker:
    """A worker on its way through its operations; `sending` while the result of the present one cannot be sent."""

    worker: int
    moves: list[tuple[int, int]]
    position: int = 0
    sending: bool = False


def _check_blocking(program: Program, messages: _Messages) -> None:
    walkers = {worker: _Walker(worker, moves) for worker, moves in messages.of_worker.items()}
    ends = list(messages.channels)
    full = [False] * len(ends)
    active = list(walkers)
    while active:
        walker = walkers[active.pop()]
        while walker.position < len(walker.moves):
            source, target = walker.moves[walker.position]
            if not walker.sending:
                if source >= 0:
                    if not full[source]:
                        break
                    full[source] = False
                    active.append(ends[source][0])
                walker.sending = True
            if target >= 0:
                if full[target]:
                    break
                full[target] = True
                active.append(ends[target][1])
            walker.sending = False
            walker.position += 1
    stuck = [
        f"worker {walker.worker} {'sending the result of' if walker.sending else 'waiting to run'} "
        f"{program.of(walker.worker)[walker.position]}"
        for walker in walkers.values()
        if walker.position < len(walker.moves)
    ]
    if stuck:
        raise ProgramError(f"the program deadlocks when sends block: {', '.join(stuck)}")
