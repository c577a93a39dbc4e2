"""The operations of a step, and the order in which each worker runs its own.

A program of a large job has tens of thousands of operations. So it is kept as records in arrays, which are created,
checked and remapped all at once, and become `Operation` objects only on access.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from chameleon_ft.plan import LayerRange, Plan, RecomputedLayers, Route
from chameleon_ft.plan.frames import Binary
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule.records import PROGRAM_RECORD, Records, distinct_paths, records_of_routes

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


class OperationKind(StrEnum):
    """The kinds of operations; the values are the letters used in pictures and traces."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    # Enum computes its hash in Python on every call, and kinds are parts of many keys.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation on one worker, with the message that it waits for and the message that it sends.

    F receives the activation from the worker of the previous hop and sends one to the worker of the next. B and I
    receive the gradient from the worker of the next hop and send one to the worker of the previous. W has no messages.

    Attributes:
        kind: F, B, I or W.
        micro_batch: number of the micro-batch in the global batch.
        hop: index of the hop in the micro-batch's route.
        layers: the layers of that hop.
        receive_from: worker whose message is needed; None if the route starts or turns here, or the tensor is handed
            over on the same worker.
        send_to: worker that the result goes to, or None likewise.
        first: the hop is the first of its route (F takes its input from the dataset).
        last: the hop is the last of its route (F ends in the loss; B and I start from it).
        recompute: the part of `layers` that the worker recomputes in the backward, if any.
    """

    kind: OperationKind
    micro_batch: int
    hop: int
    layers: LayerRange
    receive_from: int | None
    send_to: int | None
    first: bool
    last: bool
    recompute: RecomputedLayers | None = None

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.hop}"

    @classmethod
    def of(
        cls, kind: OperationKind, route: Route, hop: int, recompute: Mapping[int, RecomputedLayers] = FrozenMap({})
    ) -> Operation:
        """Return the operation of a kind at the hop with index `hop` of `route`; `recompute` is that of the plan."""
        hops, worker = route.hops, route.hops[hop].worker
        again = recompute.get(worker)
        before = hops[hop - 1].worker if hop else worker
        after = hops[hop + 1].worker if hop + 1 < len(hops) else worker
        if kind is OperationKind.FORWARD:
            receive_from, send_to = before, after
        elif kind is OperationKind.WEIGHT_GRAD:
            receive_from = send_to = worker
        else:
            receive_from, send_to = after, before
        return cls(
            kind,
            route.micro_batch,
            hop,
            hops[hop].layers,
            None if receive_from == worker else receive_from,
            None if send_to == worker else send_to,
            hop == 0,
            hop + 1 == len(hops),
            None if again is None else again.intersection(hops[hop].layers),
        )


def forwards_of(operations: Iterable[Operation], *, micro_batches: int, count: int) -> tuple[Operation, ...]:
    """Return the program of a worker that runs the forwards of `count` other micro-batches, on the same routes.

    It runs the forwards of the step round after round, with as many micro-batches in each as the step has. The last
    round may have fewer: their routes are spread over those of the step, of which neighbours share a pipeline. As a
    part of the step's program it receives messages in the order in which they are sent, and does not deadlock.

    Args:
        operations: those of the worker in a step.
        micro_batches: micro-batches of a step.
        count: micro-batches to run, numbered from 0.
    """
    forwards = [each for each in operations if each.kind is OperationKind.FORWARD]
    found: list[Operation] = []
    for first in range(0, count, micro_batches):
        size = min(micro_batches, count - first)
        number_of = {number * micro_batches // size: first + number for number in range(size)}
        found += (
            replace(each, micro_batch=number_of[each.micro_batch], recompute=None)
            for each in forwards
            if each.micro_batch in number_of
        )
    return tuple(found)


KINDS: Final = tuple(OperationKind)
"""Kinds by their numbers in records."""

_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}


def records_from(operations: Iterable[Operation]) -> Records:
    """Return the operations as an array of `PROGRAM_RECORD`."""
    rows = [
        (
            _NUMBERS[each.kind],
            each.micro_batch,
            each.hop,
            each.layers.start,
            each.layers.stop,
            -1 if each.receive_from is None else each.receive_from,
            -1 if each.send_to is None else each.send_to,
            each.first,
            each.last,
            *((0, 0, 0) if (own := each.recompute) is None else (own.start, own.stop, own.num_selective)),
        )
        for each in operations
    ]
    return np.array(rows, PROGRAM_RECORD)


def operations_from(records: Records) -> tuple[Operation, ...]:
    """Return the operations of records; the inverse of `records_from`."""
    layers, recomputed = cache(LayerRange), cache(RecomputedLayers)
    operations = []
    for kind, micro_batch, hop, start, stop, receive_from, send_to, first, last, *again in records.tolist():
        source, target = (None if worker < 0 else worker for worker in (receive_from, send_to))
        recompute = recomputed(*again) if any(again) else None
        operations.append(
            Operation(KINDS[kind], micro_batch, hop, layers(start, stop), source, target, first, last, recompute)
        )
    return tuple(operations)


def records_by_code(plan: Plan, routes: Sequence[Route]) -> Records:
    """Return the operations of these routes by their codes, as an array of `PROGRAM_RECORD`.

    If only some of them split their backward, the B of the others has the code of I, and the plan asks for no operation
    with their codes of W.
    """
    paths, path_of = distinct_paths(route.hops for route in routes)
    split = [plan.splits(hops[0].worker) for hops in paths]
    by_phase = [OperationKind.FORWARD, OperationKind.BACKWARD]
    if any(split):
        by_phase = [OperationKind.FORWARD, OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD]
    found: list[Records] = []
    for phase, kind in enumerate(by_phase):
        of_paths: list[Records] = []
        for hops, is_split in zip(paths, split, strict=True):
            own = kind if is_split or phase != 1 else OperationKind.BACKWARD
            route = Route(0, hops)
            of_paths.append(records_from(Operation.of(own, route, hop, plan.recompute) for hop in range(len(hops))))
        found.append(records_of_routes(of_paths, path_of)[0])
        found[-1]["micro_batch"] = np.repeat(
            [route.micro_batch for route in routes], [len(route.hops) for route in routes]
        )
    return np.concatenate(found)


class _Written(NamedTuple):
    """A program as it is written: its workers, how many operations each has, and the bytes of all records."""

    workers: tuple[int, ...]
    lengths: tuple[int, ...]
    records: Binary


class Program:
    """For each worker the operations that it runs in a step, in order; an immutable value.

    Args:
        operations: by worker; one may have none.

    Attributes:
        workers: ascending.
        records: the operations of all workers, of each in its order, as an array of `PROGRAM_RECORD`.
        starts: where in `records` the operations of each worker begin, and in the end their number.
    """

    __slots__ = ("_operations", "records", "starts", "workers")

    workers: tuple[int, ...]
    records: Records
    starts: tuple[int, ...]

    def __init__(self, operations: Mapping[int, Iterable[Operation]]) -> None:
        self._fill({worker: records_from(own) for worker, own in operations.items()})

    @classmethod
    def of_records(cls, records: Mapping[int, Records]) -> Program:
        """Return the program in which each worker has the operations of these records."""
        program = cls.__new__(cls)
        program._fill(records)
        return program

    def _fill(self, records: Mapping[int, Records]) -> None:
        self.workers = tuple(sorted(records))
        own = [records[worker] for worker in self.workers]
        # As bytes: numpy concatenates records field by field, which takes many times as long.
        whole = np.dtype(f"V{PROGRAM_RECORD.itemsize}")
        parts = [each.view(whole) for each in (np.empty(0, PROGRAM_RECORD), *own)]
        self.records = np.concatenate(parts).view(PROGRAM_RECORD)
        self.records.flags.writeable = False
        self.starts = (0, *accumulate(map(len, own)))
        self._operations: dict[int, tuple[Operation, ...]] = {}

    @property
    def operations(self) -> Mapping[int, tuple[Operation, ...]]:
        """Worker -> its operations, ascending."""
        return FrozenMap({worker: self.of(worker) for worker in self.workers})

    def of(self, worker: int) -> tuple[Operation, ...]:
        """The operations of `worker` in order; empty for a worker that is not in the program."""
        if worker not in self._operations:
            self._operations[worker] = operations_from(self.records_of(worker))
        return self._operations[worker]

    def records_of(self, worker: int) -> Records:
        """The operations of `worker` as an array of `PROGRAM_RECORD`."""
        place = bisect_left(self.workers, worker)
        if self.workers[place : place + 1] != (worker,):
            return self.records[:0]
        return self.records[self.starts[place] : self.starts[place + 1]]

    def only(self, worker: int) -> Program:
        """Return the program of one worker; it shares the records."""
        program = Program.__new__(Program)
        program.workers, program.records, program._operations = (worker,), self.records_of(worker), {}
        program.starts = (0, len(program.records))
        return program

    def remap_workers(self, workers: Mapping[int, int]) -> Program:
        """Return the program with each worker's operations run by ``workers[worker]``."""
        other = np.arange(-1, 1 + max((*workers, *self.workers), default=0))
        other[[1 + worker for worker in workers]] = list(workers.values())
        records = self.records.copy()
        for field in ("receive_from", "send_to"):
            records[field] = other[1 + records[field]]
        own = (records[begin:end] for begin, end in pairwise(self.starts))
        return Program.of_records(dict(zip(map(workers.__getitem__, self.workers), own, strict=True)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        same = (self.workers, self.starts) == (other.workers, other.starts)
        return same and bool(np.array_equal(self.records, other.records))

    def __hash__(self) -> int:
        return hash((self.workers, self.starts, self.records.tobytes()))

    def __repr__(self) -> str:
        return f"Program({dict(self.operations)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        own = {worker: self.records_of(worker) for worker in self.workers}
        return Program.of_records, (own,)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        def read(written: _Written) -> Program:
            records, ends = np.frombuffer(written.records, PROGRAM_RECORD), [0, *accumulate(written.lengths)]
            if sorted({*written.workers}) != [*written.workers] or ends != sorted(ends) or ends[-1] != len(records):
                raise ValueError("its workers have to ascend, and the operations of all to be there")
            own = (records[begin:end] for begin, end in pairwise(ends))
            return cls.of_records(dict(zip(written.workers, own, strict=True)))

        def write(program: Program) -> _Written:
            lengths = tuple(end - begin for begin, end in pairwise(program.starts))
            return _Written(program.workers, lengths, program.records.tobytes())

        written = handler.generate_schema(_Written)
        as_read = core_schema.no_info_after_validator_function(read, written)
        return core_schema.json_or_python_schema(
            json_schema=as_read,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), as_read]),
            serialization=core_schema.plain_serializer_function_ser_schema(write, return_schema=written),
        )
