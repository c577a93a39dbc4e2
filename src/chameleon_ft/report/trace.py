"""Schedules as trace files, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.plan.layouts import detoured_hops
from chameleon_ft.report.picture import Lane, WorkerReduction
from chameleon_ft.schedule import Operation, OperationKind, TimedOperation

_KIND_NAMES: Final = {
    OperationKind.FORWARD: "forward",
    OperationKind.BACKWARD: "backward",
    OperationKind.INPUT_GRAD: "input gradient",
    OperationKind.WEIGHT_GRAD: "weight gradient",
}
_REDUCTION: Final = "gradient all-reduce"

_Event = dict[str, Any]
# "gradient" or "activation", micro-batch, index of the sending hop.
_Message = tuple[str, int, int]


def write_trace(path: Path, *, plan: Plan, pipelines: Sequence[Sequence[int]], lanes: Sequence[Lane]) -> None:
    """Write timelines of one step in the Trace Event Format of Chrome, which Perfetto reads too.

    Each timeline is a process and each of its workers a thread, with further threads for its gradient reductions, which
    overlap with its operations. An operation is a complete event ("X", microseconds), named by kind and micro-batch,
    such as F12, with the category "detour" if it is one. A message between two workers is a flow from the end of the
    sending operation to the start of the receiving one. The file is a deterministic function of the arguments.

    Args:
        path: file to write or replace.
        plan: plan of the step.
        pipelines: the workers of each pipeline before any failure; see `detoured_hops`.
        lanes: timelines of this plan.

    Raises:
        ConfigError: the file cannot be written.
        PlanError: a worker is in two pipelines.
    """
    detours = detoured_hops(plan, pipelines)
    # Threads and flows are numbered over all processes, because Perfetto finds threads by these numbers alone.
    numbers = count(len(lanes) + 1)
    processes = [_Process(pid, lane, plan, detours, numbers) for pid, lane in enumerate(lanes, start=1)]
    lines = ",\n".join(json.dumps(event) for event in chain.from_iterable(process.events() for process in processes))
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
        self._name = lane.name
        self._plan = plan
        self._detours = detours
        self._operations = lane.operations()
        reductions: dict[int, list[WorkerReduction]] = defaultdict(list)
        for reduction in lane.reductions:
            reductions[reduction.worker].append(reduction)
        self._thread: dict[int, int] = {}
        self._reduction_threads: dict[int, list[tuple[int, list[WorkerReduction]]]] = {}
        for worker in sorted({*plan.workers, *self._operations, *reductions}):
            self._thread[worker] = next(numbers)
            self._reduction_threads[worker] = [(next(numbers), row) for row in _disjoint_rows(reductions[worker])]
        sent = {_sent(timed.operation) for timed in lane.timeline.operations}
        received = (_received(timed.operation) for timed in lane.timeline.operations)
        self._flow_number = {message: next(numbers) for message in received if message is not None and message in sent}

    def events(self) -> Iterator[_Event]:
        """Yield the names, then each worker's operations with their messages, and its reductions."""
        yield self._metadata("process_name", name=self._name)
        yield self._metadata("process_sort_index", sort_index=self._pid)
        for worker, thread in self._thread.items():
            names = {thread: f"worker {worker}"}
            names |= {tid: f"worker {worker}, {_REDUCTION}" for tid, _ in self._reduction_threads[worker]}
            for tid, name in names.items():
                yield self._metadata("thread_name", tid, name=name)
                yield self._metadata("thread_sort_index", tid, sort_index=tid)
        for worker in self._thread:
            for timed in self._operations.get(worker, ()):
                yield self._operation(timed)
                # After their operation, because of several events at one time a flow binds to the last one before it.
                yield from self._flows(timed)
            for tid, row in self._reduction_threads[worker]:
                yield from (self._reduction(tid, reduction) for reduction in row)

    def _metadata(self, name: str, tid: int = 0, /, **args: object) -> _Event:
        return {"name": name, "ph": "M", "pid": self._pid, "tid": tid, "args": args}

    def _slice(self, name: str, category: str, tid: int, start_s: float, end_s: float, **args: object) -> _Event:
        # The ends are rounded, not start and duration, so that adjacent slices do not overlap.
        ts, end = _microseconds(start_s), _microseconds(end_s)
        times = {"ts": ts, "dur": round(end - ts, 3)}
        return {"name": name, "cat": category, "ph": "X", **times, "pid": self._pid, "tid": tid, "args": args}

    def _operation(self, timed: TimedOperation) -> _Event:
        operation = timed.operation
        kind = _KIND_NAMES[operation.kind]
        detour = (operation.micro_batch, operation.hop) in self._detours
        return self._slice(
            f"{operation.kind}{operation.micro_batch}",
            f"{kind},detour" if detour else kind,
            self._thread[timed.worker],
            timed.start_s,
            timed.end_s,
            kind=kind,
            worker=timed.worker,
            micro_batch=operation.micro_batch,
            hop=operation.hop,
            layers=_describe_layers(operation.layers),
            receive_from=operation.receive_from,
            send_to=operation.send_to,
            detour=detour,
        )

    def _reduction(self, tid: int, reduction: WorkerReduction) -> _Event:
        layers = _describe_layers(reduction.layers)
        return self._slice(
            f"all-reduce {layers}",
            _REDUCTION,
            tid,
            reduction.start_s,
            reduction.end_s,
            worker=reduction.worker,
            layers=layers,
            holders=self._plan.placement.holders(reduction.layers.start),
        )

    def _flows(self, timed: TimedOperation) -> Iterator[_Event]:
        start, end = _microseconds(timed.start_s), _microseconds(timed.end_s)
        received, sent = _received(timed.operation), _sent(timed.operation)
        if received in self._flow_number:
            yield {**self._flow("f", received, timed.worker, start), "bp": "e"}
        if sent in self._flow_number:
            # A nanosecond, the resolution, before the end, where the next operation may begin.
            yield self._flow("s", sent, timed.worker, max(start, round(end - 0.001, 3)))

    def _flow(self, phase: str, message: _Message, worker: int, ts: float) -> _Event:
        place = {"ts": ts, "pid": self._pid, "tid": self._thread[worker]}
        return {"name": message[0], "cat": "message", "ph": phase, "id": self._flow_number[message], **place}


def _disjoint_rows(reductions: Sequence[WorkerReduction]) -> list[list[WorkerReduction]]:
    """Return the fewest rows without overlap in any of them; measured reductions often start together."""
    rows: list[list[WorkerReduction]] = []
    for reduction in sorted(reductions, key=lambda each: each.start_s):
        free = next((row for row in rows if row[-1].end_s <= reduction.start_s), None)
        if free is None:
            rows.append([reduction])
        else:
            free.append(reduction)
    return rows


def _sent(operation: Operation) -> _Message | None:
    """Return the message that an operation sends to another worker; None if it sends none."""
    if operation.send_to is None:
        return None
    return _content(operation), operation.micro_batch, operation.hop


def _received(operation: Operation) -> _Message | None:
    """Return the message from another worker that an operation waits for; None if it needs none."""
    if operation.receive_from is None:
        return None
    sender = operation.hop + (-1 if operation.kind is OperationKind.FORWARD else 1)
    return _content(operation), operation.micro_batch, sender


def _content(operation: Operation) -> str:
    return "activation" if operation.kind is OperationKind.FORWARD else "gradient"


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _describe_layers(layers: LayerRange) -> str:
    return f"{layers.start}-{layers.stop - 1}"
