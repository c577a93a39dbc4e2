"""The conditions that every program must meet before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.schedule.program import KINDS, OperationKind, Program, operations_from, records_by_code
from chameleon_ft.schedule.records import Booleans, Integers, Records
from chameleon_ft.schedule.rest import Resend, RestOperations, rest_operations

_FORWARD: Final = KINDS.index(OperationKind.FORWARD)
# By the number of a kind: F, B and I, W.
_PHASES: Final = np.array([0, 1, 1, 2])


def check_program(program: Program, plan: Plan) -> None:
    """Raise ProgramError unless `program` runs `plan` to its end, whatever the timing.

    - Every hop of every route has its F, and its B or its I and W, exactly once, on the hop's worker, with the peers
      that the route gives it; on the worker, F comes before B or I, and I before W.
    - For each directed pair of workers, activations are received in the order in which they are sent, and so are
      gradients: not all backends can tell messages apart otherwise.
    - It does not deadlock when each such channel holds one message and a send into a full channel blocks its worker.
    """
    records = records_by_code(plan, plan.routes)
    worker = np.array([hop.worker for route in plan.routes for hop in route.hops])
    is_asked = np.ones((len(records) // len(worker), len(worker)), np.bool_)
    # There is no W of a backward that is not split.
    is_asked[2:] = ~np.isin(worker, list(plan.fused_workers))
    _check_operations(program, records, worker, is_asked.ravel())
    _check_messages(program, _messages(program, sent=False))


def check_rest(program: Program, resends: Mapping[int, Sequence[Resend]], rest: RestOfStep) -> None:
    """Raise ProgramError unless `program` runs `rest` to its end, whatever the timing.

    The conditions are those of `check_program`, for the operations that remain. `resends` has exactly those messages
    that the rest asks for. They block no sender, and may be taken in any order: a backend that runs a rest can tell
    messages apart.
    """
    asked = rest_operations(rest)
    if len(asked.worker):
        _check_operations(program, asked.records, asked.worker, asked.remains.ravel())
    elif len(program.records):
        raise ProgramError("there are operations in the program, but nothing of the step remains to be run")
    _check_resends(resends, asked)
    received, takers = _messages(program, sent=False), asked.records[asked.resends["taker"]]
    if len(takers):
        base = 1 + max(asked.records["micro_batch"].max(), asked.records["hop"].max())
        is_new = ~np.isin(_keys(program.records[received.places], base), _keys(takers, base))
        received = _Messages(*(each[..., is_new] for each in received))
    _check_messages(program, received)


def _check_operations(program: Program, wanted: Records, worker: Integers, is_asked: Booleans) -> None:
    """Check that each operation is there once, on its worker, after the operations there that it needs.

    Args:
        program: what is checked.
        wanted: the operations by code; `PROGRAM_RECORD` [operations].
        worker: worker of each slot; int64 [slots].
        is_asked: operations that the program is to have, by code; bool [operations].
    """
    count = len(worker)
    numbers = np.arange(len(wanted))
    phase = numbers // count
    runs_on = np.tile(worker, len(wanted) // count)
    records, workers = program.records, _workers_of(program)
    # Codes ascend by phase, micro-batch and hop.
    base = 1 + max(wanted["micro_batch"].max(), wanted["hop"].max())
    codes = np.searchsorted(_keys(wanted, base), _keys(records, base)).clip(max=len(wanted) - 1)
    is_wanted = is_asked[codes] & (runs_on[codes] == workers) & (wanted[codes] == records)
    codes = np.where(is_wanted, codes, -1)

    # The first place of each operation; past the end if it is missing. The last element stands for "none".
    places = np.arange(len(codes))
    place = np.full(len(wanted) + 1, len(codes))
    np.minimum.at(place, codes, places)
    place[-1] = -1
    # Inputs from other workers are left to the check of messages; one that is handed over on a worker must be there.
    needs_no_tensor = np.where(phase == 0, wanted["first"], wanted["last"] | (phase == 2))
    is_handed_over = (wanted["receive_from"] < 0) & ~needs_no_tensor
    needed = np.stack(
        [np.maximum(numbers - count, -1), np.where(is_handed_over, numbers + np.where(phase == 0, -1, 1), -1)]
    )
    # Operations that ran before an interruption are not in the program, and need not be.
    needed[~is_asked[needed]] = -1
    too_late = place[needed[:, codes]] > places
    is_repeated = place[codes] != places
    if (wrong := (codes < 0) | is_repeated | too_late.any(0)).any():
        index = int(wrong.argmax())
        what = f"worker {workers[index]} runs {_name(records, index)}"
        if codes[index] < 0:
            raise ProgramError(f"{what} in a form that the plan does not ask of it; make the program from the plan")
        if is_repeated[index]:
            raise ProgramError(f"{what} twice; make the program from the plan")
        before = needed[too_late[:, index], codes[index]][0]
        raise ProgramError(f"{what} before {_name(wanted, before)}, which it needs")
    if missing := np.flatnonzero(is_asked & (place[:-1] == len(codes))).tolist():
        first = min(missing, key=lambda code: (code % count, code))
        raise ProgramError(
            f"the program lacks {len(missing)} operations of the plan, first {_name(wanted, first)} "
            f"on worker {runs_on[first]}"
        )


def _keys(records: Records, base: int) -> Integers:
    """Numbers that ascend by phase, micro-batch and hop; the latter two are below `base`."""
    keys: Integers = (_PHASES[records["kind"]] * base + records["micro_batch"]) * base + records["hop"]
    return keys


def _name(records: Records, index: int) -> str:
    return str(*operations_from(records[index : index + 1]))


def _workers_of(program: Program) -> Integers:
    """For each record the worker that runs it."""
    return np.repeat(np.array(program.workers, np.int64), np.diff(program.starts))


class _Messages(NamedTuple):
    """The messages of a program at one of their ends, channel after channel, and those of each in the worker's order.

    Attributes:
        places: operations that send them, or receive them.
        channels: (sender, receiver, whether it carries gradients) of each, in three rows.
        needed_by: the micro-batch and the hop that needs it, in two rows.
    """

    places: Integers
    channels: Integers
    needed_by: Integers


def _messages(program: Program, *, sent: bool) -> _Messages:
    peers = program.records["send_to" if sent else "receive_from"]
    places = np.flatnonzero(peers >= 0)
    workers, peers, records = _workers_of(program)[places], peers[places], program.records[places]
    is_gradient = records["kind"] != _FORWARD
    channels = np.stack([workers, peers, is_gradient] if sent else [peers, workers, is_gradient])
    further = np.where(is_gradient, -1, 1) if sent else 0
    needed_by = np.stack([records["micro_batch"], records["hop"] + further])
    # This sort is stable.
    order = np.lexsort(channels[::-1])
    return _Messages(places[order], channels[:, order], needed_by[:, order])


def _check_resends(resends: Mapping[int, Sequence[Resend]], asked: RestOperations) -> None:
    """Check that all messages that are asked for are sent again, once."""
    counts = Counter((sender, *resend) for sender, own in resends.items() for resend in own)
    counts.subtract((sender, *resend) for *resend, sender, _ in asked.resends.tolist())
    for (sender, micro_batch, layer, forward, receiver), count in counts.items():
        if count:
            raise ProgramError(
                f"worker {sender} is to send the {'output' if forward else 'input gradient'} of layer {layer} of "
                f"micro-batch {micro_batch} again to worker {receiver} "
                f"{'once less' if count > 0 else 'as well'}; make the resends from the rest"
            )


def _check_messages(program: Program, received: _Messages) -> None:
    sent = _messages(program, sent=True)
    _check_order(sent, received)
    _check_blocking(program, sent, received)


def _check_order(sent: _Messages, received: _Messages) -> None:
    differs = (sent.needed_by != received.needed_by).any(0)
    if not differs.any():
        return
    index = int(differs.argmax())
    sender, receiver, is_gradient = channel = sent.channels[:, index]
    place = index - int((sent.channels == channel[:, None]).all(0).argmax())
    raise ProgramError(
        f"{'gradients' if is_gradient else 'activations'} from worker {sender} to worker {receiver} arrive in another "
        f"order than they are taken: message {place} is for micro-batch {sent.needed_by[0, index]}, and micro-batch "
        f"{received.needed_by[0, index]} is expected"
    )


def _check_blocking(program: Program, sent: _Messages, received: _Messages) -> None:
    # Imported here: importing a kernel loads numba, and most users of this module check nothing.
    from chameleon_ft.schedule._kernels.replay import run_blocking

    # Both ends have the same channels, as their order was checked.
    is_new = np.ones(len(sent.places), np.bool_)
    is_new[1:] = (sent.channels[:, 1:] != sent.channels[:, :-1]).any(0)
    numbers = np.cumsum(is_new) - 1
    sources, targets = np.full((2, len(program.records)), -1)
    sources[received.places] = numbers
    targets[sent.places] = numbers
    ends = np.searchsorted(program.workers, sent.channels[:2, is_new])
    starts = np.array(program.starts)
    reached, sending = run_blocking(starts, sources, targets, ends[0], ends[1])
    stuck = [
        f"worker {worker} {'sending the result of' if sending[index] else 'waiting to run'} "
        f"{_name(program.records, place)}"
        for index, (worker, place) in enumerate(zip(program.workers, reached, strict=True))
        if place < starts[index + 1]
    ]
    if stuck:
        raise ProgramError(f"the program deadlocks when sends block: {', '.join(stuck)}")
