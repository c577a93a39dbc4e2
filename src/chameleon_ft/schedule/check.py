"""The conditions that every program must meet before it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._orders import records_by_code
from chameleon_ft.schedule._records import Booleans, Integers, Records
from chameleon_ft.schedule.program import Program, operations_from

__all__ = ["check_program"]

_FORWARD = 0  # as records have it
# By the number of a kind: F, B and I, W.
_PHASES: Final = np.array([0, 1, 1, 2])


def check_program(program: Program, plan: Plan) -> None:
    """Raise ProgramError unless `program` runs `plan` to its end, whatever the timing.

    - Every hop of every route has its F, and its B or its I and W, exactly once, on the hop's worker, with the peers
      that the route gives it; on the worker, F comes before B or I, and I before W.
    - For each directed pair of workers, activations are received in the order in which they are sent, and so are
      gradients: there are no tags to tell messages apart.
    - It does not deadlock when each such channel holds one message and a send into a full channel blocks its worker.
    """
    _check_operations(program, _Wanted.of(plan))
    sent, received = (_Messages.of(program, sent=sent) for sent in (True, False))
    _check_order(sent, received)
    _check_blocking(program, sent, received)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The operations that a plan asks for, by code: numbers of hops, phase after phase.

    Attributes:
        records: as an array of `PROGRAM_RECORD`.
        workers: the worker that runs each.
        before: in two rows, the codes of what its worker must have run before, or -1.
        first: for each route the number of its first hop.
        lengths: for each route how many it has.
        is_asked: whether the plan asks for it: not for the W of a backward that is not split.
    """

    records: Records
    workers: Integers
    before: Integers
    first: Integers
    lengths: Integers
    is_asked: Booleans

    @classmethod
    def of(cls, plan: Plan) -> _Wanted:
        records = records_by_code(plan, plan.routes)
        lengths = np.array([len(route.hops) for route in plan.routes])
        count = int(lengths.sum())
        workers = np.tile(np.array([hop.worker for route in plan.routes for hop in route.hops]), len(records) // count)
        codes = np.arange(len(records))
        phase = codes // count
        # What others must have run is a matter of messages; a tensor that is handed over on the worker must be there.
        handed_over = records["receive_from"] < 0
        comes_from = np.where(phase == 0, codes - 1, np.where(phase == 1, codes + 1, -1))
        is_end = np.where(phase == 0, records["first"], records["last"])
        return cls(
            records=records,
            workers=workers,
            before=np.stack([np.where(phase == 0, -1, codes - count), np.where(handed_over & ~is_end, comes_from, -1)]),
            first=np.cumsum(lengths) - lengths,
            lengths=lengths,
            is_asked=(phase < 2) | ~np.isin(workers, list(plan.fused_workers)),
        )

    def codes_of(self, records: Records) -> Integers:
        """The codes of these operations, or -1 for those of no hop or phase of the plan."""
        phase, micro_batch, hop = _PHASES[records["kind"]], records["micro_batch"], records["hop"]
        is_route = (micro_batch >= 0) & (micro_batch < len(self.first))
        route = np.where(is_route, micro_batch, 0)
        known = is_route & (phase < len(self.records) // self.lengths.sum()) & (hop >= 0) & (hop < self.lengths[route])
        return np.where(known, phase * int(self.lengths.sum()) + self.first[route] + hop, -1)


def _check_operations(program: Program, wanted: _Wanted) -> None:
    records, workers = program.records, _workers_of(program)
    codes = wanted.codes_of(records)
    places = np.arange(len(records))
    alike = (codes >= 0) & wanted.is_asked[codes]
    alike &= (wanted.workers[codes] == workers) & (wanted.records[codes] == records)
    place = np.full(len(wanted.records) + 1, len(records))  # the last one stands for "nothing is needed"
    np.minimum.at(place, codes[alike], places[alike])
    place[-1] = -1
    repeated = alike & (place[codes] != places)
    too_late = place[wanted.before[:, codes]] > places
    if not (wrong := ~alike | repeated | too_late.any(0)).any():
        if (missing := (place[:-1] == len(records)) & wanted.is_asked).any():
            _complain_of_missing(missing, wanted)
        return
    index = int(wrong.argmax())
    (operation,) = operations_from(records[index : index + 1])
    what = f"worker {workers[index]} runs {operation}"
    if not alike[index] or repeated[index]:
        problem = "twice" if repeated[index] else "in a form that the plan does not ask of it"
        raise ProgramError(f"{what} {problem}; make the program from the plan")
    needed = wanted.before[too_late[:, index], codes[index]][:1]
    raise ProgramError(f"{what} before {operations_from(wanted.records[needed])[0]}, which it needs")


def _complain_of_missing(missing: Booleans, wanted: _Wanted) -> NoReturn:
    """Name the first missing operation of the first hop that lacks one."""
    by_hop = missing.reshape(-1, int(wanted.lengths.sum()))
    hop = int(by_hop.any(0).argmax())
    code = hop + int(by_hop[:, hop].argmax()) * by_hop.shape[1]
    raise ProgramError(
        f"the program lacks {missing.sum()} operations of the plan, first "
        f"{operations_from(wanted.records[code : code + 1])[0]} on worker {wanted.workers[code]}"
    )


def _workers_of(program: Program) -> Integers:
    """For each record the worker that runs it."""
    return np.repeat(np.array(program.workers, np.int64), np.diff(program.starts))


@dataclass(frozen=True, slots=True)
class _Messages:
    """The messages of a program at one of their ends, channel after channel, and those of each in the worker's order.

    Attributes:
        places: of the operations that send them, or receive them.
        channels: (sender, receiver, whether it carries gradients) of each, in three rows.
        needed_by: the micro-batch and the hop that needs it, in two rows.
    """

    places: Integers
    channels: Integers
    needed_by: Integers

    @classmethod
    def of(cls, program: Program, *, sent: bool) -> _Messages:
        peers = program.records["send_to" if sent else "receive_from"]
        places = np.flatnonzero(peers >= 0)
        workers, peers, records = _workers_of(program)[places], peers[places], program.records[places]
        is_gradient = records["kind"] != _FORWARD
        channels = np.stack([workers, peers, is_gradient] if sent else [peers, workers, is_gradient])
        further = np.where(is_gradient, -1, 1) if sent else 0
        needed_by = np.stack([records["micro_batch"], records["hop"] + further])
        order = np.lexsort(channels[::-1])  # which is stable
        return cls(places[order], channels[:, order], needed_by[:, order])


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
    from chameleon_ft.schedule._kernels.blocking import run_blocking

    # Both ends have the same channels, as their order was checked.
    is_new = np.ones(len(sent.places), np.bool_)
    is_new[1:] = (sent.channels[:, 1:] != sent.channels[:, :-1]).any(0)
    numbers = np.cumsum(is_new) - 1
    sources, targets = np.full((2, len(program.records)), -1)
    sources[received.places], targets[sent.places] = numbers, numbers
    ends = np.searchsorted(program.workers, sent.channels[:2, is_new])
    starts = np.array(program.starts)
    reached, sending = run_blocking(starts, sources, targets, ends[0], ends[1])
    stuck = [
        f"worker {worker} {'sending the result of' if sending[index] else 'waiting to run'} "
        f"{operations_from(program.records[place : place + 1])[0]}"
        for index, (worker, place) in enumerate(zip(program.workers, reached, strict=True))
        if place < starts[index + 1]
    ]
    if stuck:
        raise ProgramError(f"the program deadlocks when sends block: {', '.join(stuck)}")
