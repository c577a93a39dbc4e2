"""Schedules as trace files, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.lanes import Lane, WorkerReduction
from chameleon_ft.plan import Plan
from chameleon_ft.plan.detours import detoured_hops
from chameleon_ft.schedule import Operation, OperationKind, TimedOperation

__all__ = ["write_trace"]

_WORDS: Final = {
    OperationKind.FORWARD: "forward",
    OperationKind.BACKWARD: "backward",
    OperationKind.INPUT_GRAD: "input gradient",
    OperationKind.WEIGHT_GRAD: "weight gradient",
}

_Event = dict[str, Any]
# Whether it is a gradient, micro-batch, and the hop that makes it.
_Message = tuple[bool, int, int]


def write_trace(path: Path, *, plan: Plan, pipelines: Sequence[Sequence[int]], lanes: Sequence[Lane]) -> None:
    """Write timelines of one step in the Trace Event Format of Chrome, which Perfetto reads too.

    Each timeline is a process and each of its workers a thread, with further threads for its gradient reductions, which
    run beside its operations. An operation is a complete event ("X", microseconds) named by kind and micro-batch, such
    as F12, with its category ("detour" among them where it is one) and what is known of it; a message between two
    workers is a flow from the end of the operation that makes it to the start of the one that needs it. The same input
    gives the same file.

    Args:
        path: file to write; what is there is replaced.
        plan: what is run.
        pipelines: the workers of each pipeline before anything failed; see `detoured_hops`.
        lanes: the timelines, of the same plan.

    Raises:
        ConfigError: the file cannot be written.
        PlanError: a worker is in two pipelines.
    """
    detours = detoured_hops(plan, pipelines)
    numbers = count(len(lanes) + 1)
    processes = [_Process(pid, lane, plan, detours, numbers) for pid, lane in enumerate(lanes, start=1)]
    events = chain.from_iterable(process.events() for process in processes)
    lines = ",\n".join(json.dumps(event) for event in events)
    try:
        path.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: the trace cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from None


class _Process:
    """One timeline, as a process."""

    def __init__(
        self, pid: int, lane: Lane, plan: Plan, detours: frozenset[tuple[int, int]], numbers: Iterator[int]
    ) -> None:
        self._pid = pid
        self._lane = lane
        self._plan = plan
        self._detours = detours
        self._operations = lane.operations()
        reductions: dict[int, list[WorkerReduction]] = defaultdict(list)
        for reduction in lane.reductions:
            reductions[reduction.worker].append(reduction)
        # Threads and flows have numbers of their own over all processes: Perfetto looks threads up by theirs alone.
        self._thread: dict[int, int] = {}
        self._reducing: dict[int, list[tuple[int, list[WorkerReduction]]]] = {}
        for worker in sorted({*plan.workers, *self._operations, *reductions}):
            self._thread[worker] = next(numbers)
            self._reducing[worker] = [(next(numbers), row) for row in _rows(reductions[worker])]
        sent = {_sent(timed.operation) for timed in lane.timeline.operations}
        needed = [_needed(timed.operation) for timed in lane.timeline.operations]
        self._flow_number = {message: next(numbers) for message in needed if message is not None and message in sent}

    def events(self) -> Iterator[_Event]:
        """Names first, then each worker's operations with their messages, and its reductions."""
        yield from self._names()
        for worker in self._thread:
            for timed in self._operations.get(worker, ()):
                yield self._operation(timed)
                # Right behind their operation: among events of one time, readers bind a flow to the last one before it.
                yield from self._flows(timed)
            for tid, row in self._reducing[worker]:
                yield from (self._reduction(tid, reduction) for reduction in row)

    def _names(self) -> Iterator[_Event]:
        yield self._metadata("process_name", name=self._lane.name)
        yield self._metadata("process_sort_index", sort_index=self._pid)
        for worker, operations in self._thread.items():
            threads = {operations: f"worker {worker}"}
            threads |= {tid: f"worker {worker}, gradient all-reduce" for tid, _ in self._reducing[worker]}
            for tid, name in threads.items():
                yield self._metadata("thread_name", tid, name=name)
                yield self._metadata("thread_sort_index", tid, sort_index=tid)

    def _metadata(self, what: str, tid: int = 0, **args: object) -> _Event:
        return {"name": what, "ph": "M", "pid": self._pid, "tid": tid, "args": args}

    def _slice(self, name: str, category: str, tid: int, start_s: float, end_s: float, **args: object) -> _Event:
        # Both ends are rounded, and not start and length, so that neighbours do not come to overlap.
        start_us, end_us = _microseconds(start_s), _microseconds(end_s)
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "pid": self._pid,
            "tid": tid,
            "args": args,
        }

    def _operation(self, timed: TimedOperation) -> _Event:
        operation = timed.operation
        word = _WORDS[operation.kind]
        detour = (operation.micro_batch, operation.hop) in self._detours
        return self._slice(
            f"{operation.kind}{operation.micro_batch}",
            f"{word},detour" if detour else word,
            self._thread[timed.worker],
            timed.start_s,
            timed.end_s,
            kind=word,
            worker=timed.worker,
            micro_batch=operation.micro_batch,
            hop=operation.hop,
            layers=_layers(operation.layers.start, operation.layers.stop),
            receive_from=operation.receive_from,
            send_to=operation.send_to,
            detour=detour,
        )

    def _reduction(self, tid: int, reduction: WorkerReduction) -> _Event:
        layers = _layers(reduction.layers.start, reduction.layers.stop)
        return self._slice(
            f"all-reduce {layers}",
            "gradient all-reduce",
            tid,
            reduction.start_s,
            reduction.end_s,
            worker=reduction.worker,
            layers=layers,
            holders=self._plan.placement.holders(reduction.layers.start),
        )

    def _flows(self, timed: TimedOperation) -> Iterator[_Event]:
        start_us, end_us = _microseconds(timed.start_s), _microseconds(timed.end_s)
        needed, sent = _needed(timed.operation), _sent(timed.operation)
        if needed in self._flow_number:
            yield self._flow("f", needed, timed.worker, start_us, bp="e")
        if sent in self._flow_number:
            # Inside the operation, for at its end the next may begin; a nanosecond is the finest that is kept.
            yield self._flow("s", sent, timed.worker, max(start_us, round(end_us - 0.001, 3)))

    def _flow(self, phase: str, message: _Message, worker: int, ts: float, **binding: str) -> _Event:
        return {
            "name": "gradient" if message[0] else "activation",
            "cat": "message",
            "ph": phase,
            "id": self._flow_number[message],
            "ts": ts,
            "pid": self._pid,
            "tid": self._thread[worker],
            **binding,
        }


def _rows(reductions: Sequence[WorkerReduction]) -> list[list[WorkerReduction]]:
    """The fewest rows, none with two reductions at once: those that were measured may all have begun together."""
    rows: list[list[WorkerReduction]] = []
    for reduction in sorted(reductions, key=lambda each: each.start_s):
        free = next((row for row in rows if row[-1].end_s <= reduction.start_s), None)
        if free is None:
            rows.append([reduction])
        else:
            free.append(reduction)
    return rows


def _sent(operation: Operation) -> _Message | None:
    """The message that an operation makes for another worker, None where it makes none."""
    if operation.send_to is None:
        return None
    return (operation.kind is not OperationKind.FORWARD, operation.micro_batch, operation.hop)


def _needed(operation: Operation) -> _Message | None:
    """The message from another worker that an operation waits for, None where it needs none."""
    if operation.receive_from is None:
        return None
    if operation.kind is OperationKind.FORWARD:
        return (False, operation.micro_batch, operation.hop - 1)
    return (True, operation.micro_batch, operation.hop + 1)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _layers(start: int, stop: int) -> str:
    return f"{start}-{stop - 1}"
