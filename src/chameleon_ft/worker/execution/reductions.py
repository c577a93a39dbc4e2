"""The reductions of gradients over their holders, beside the operations of the step."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, Self

import torch
from torch import Tensor

from chameleon_ft.plan.rest import GradientKey
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment, issue_points
from chameleon_ft.worker.communicators.base import InFlight
from chameleon_ft.worker.device import side_stream
from chameleon_ft.worker.execution.bad_steps import Contributions
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.steps import TimedReduction
from chameleon_ft.worker.mover import Mover

# Of a bucket, unless a single key has more. Copies of 8 MiB reuse memory of the allocator; those of 32 MiB and more get
# new pages from the kernel each time, and take four times as long.
_BUCKET_BYTES: Final = 8 << 20
# The bytes of all copies, unless a single bucket has more.
_COPIED_BYTES: Final = 2 * _BUCKET_BYTES


class Reductions:
    """The gradient reductions of one worker, step after step, through a generation; use as a context manager.

    In each step call `after` before the first operation and after each, then `finish`. A task of the mover reduces the
    segments bucket by bucket: it copies a bucket, reduces the copy and writes the sum back when it is complete. So
    whenever the generation ends, every gradient is either the worker's own contribution or the total, and
    `GradientBuffers.totals` tells which. If a reduction is in flight when the context ends, the generation is over, and
    the mover is closed. All workers share the order of the segments.

    Args:
        zeros: Keys to which this worker contributes zeros, because another one contributes their total.
    """

    def __init__(
        self,
        buffers: GradientBuffers,
        operations: Sequence[Operation],
        mover: Mover,
        *,
        zeros: Collection[GradientKey] = (),
    ) -> None:
        self._buffers = buffers
        self._mover = mover
        self._zeros = zeros
        reduced = [s for s in buffers.segments if len(s.holders) > 1 and buffers.of(s)]
        self._due: dict[int, list[Segment]] = defaultdict(list)
        for segment, point in zip(reduced, issue_points(operations, reduced), strict=True):
            self._due[point].append(segment)
        self._buckets = {segment: tuple(self._buckets_of(segment)) for segment in reduced}
        self._stream = next((side_stream(buffers.of(segment)[0].device) for segment in reduced), None)
        self._own_sums: dict[str, Tensor] = {}
        self._issued: SimpleQueue[_Issued | None] = SimpleQueue()
        # Those of this step; tasks and training share what has ended, under `Mover.changed`.
        self._num_issued = 0
        self._ended: list[TimedReduction] = []

    def __enter__(self) -> Self:
        self._mover.start(self._reduce_all)
        return self

    def __exit__(self, *error: object) -> None:
        self._issued.put(None)
        if len(self._ended) < self._num_issued:
            self._mover.close()

    def after(self, count: int) -> None:
        """Issue the segments that are complete after `count` operations of the step.

        Before the first operation, those are the segments to which this worker adds nothing.
        """
        if count == 0:
            self._own_sums.clear()
        due = self._due.get(count, ())
        self._buffers.set_flags(due)
        for segment in due:
            ready = None if self._stream is None else torch.accelerator.current_stream().record_event()
            self._num_issued += 1
            self._issued.put(_Issued(segment, time.perf_counter(), ready))

    def finish(self) -> tuple[TimedReduction, ...]:
        """Block until all segments are reduced. Raises CommunicationError."""
        with self._mover.changed:
            self._mover.wait_for(lambda: len(self._ended) == self._num_issued)
            ended, self._ended, self._num_issued = tuple(self._ended), [], 0
        self._buffers.set_flags()
        return ended

    def contributions(self) -> Contributions:
        """Return the sums of this worker's own contributions to the gradients of the step, which are all reduced."""
        alone = (segment for segment in self._buffers.segments if len(segment.holders) == 1)
        own = {f"{each.keys[0]} {i}": b for each in alone for i, b in enumerate(self._buffers.of(each))}
        sums = {place: buffer.sum(dtype=torch.float32) for place, buffer in own.items()} | self._own_sums
        return {place: float(value) for place, value in sums.items()}

    def _buckets_of(self, segment: Segment) -> Iterator[tuple[GradientKey, ...]]:
        """Cut the keys of a segment into buckets, equal on all its holders."""
        bucket: list[GradientKey] = []
        num_bytes = 0
        for key in segment.keys:
            own_bytes = self._bytes_of([key])
            if bucket and num_bytes + own_bytes > _BUCKET_BYTES:
                yield tuple(bucket)
                bucket, num_bytes = [], 0
            bucket.append(key)
            num_bytes += own_bytes
        yield tuple(bucket)

    def _bytes_of(self, keys: Iterable[GradientKey]) -> int:
        return sum(buffer.nbytes for key in keys for buffer in self._buffers.of_key(key))

    def _reduce_all(self) -> None:
        while (issued := self._issued.get()) is not None:
            with nullcontext() if self._stream is None else self._stream:
                self._reduce(issued)
            with self._mover.changed:
                self._ended.append(TimedReduction(issued.segment, issued.start_s, time.perf_counter()))
                self._mover.changed.notify_all()

    def _reduce(self, issued: _Issued) -> None:
        if self._stream is not None and issued.ready is not None:
            self._stream.wait_event(issued.ready)
        reducing: deque[_Reducing] = deque()
        for bucket in self._buckets[issued.segment]:
            own_bytes = self._bytes_of(bucket)
            while reducing and own_bytes + sum(self._bytes_of(each.keys) for each in reducing) > _COPIED_BYTES:
                self._complete(reducing.popleft())
            reducing.append(self._start(bucket, issued.segment.holders))
        for started in reducing:
            self._complete(started)

    def _start(self, bucket: tuple[GradientKey, ...], group: tuple[int, ...]) -> _Reducing:
        by_type: dict[torch.dtype, list[tuple[GradientKey, Tensor]]] = defaultdict(list)
        for key in bucket:
            for buffer in self._buffers.of_key(key):
                by_type[buffer.dtype].append((key, buffer))
        started = _Reducing(bucket)
        for own in by_type.values():
            copy = torch.cat([torch.zeros_like(buffer) if key in self._zeros else buffer for key, buffer in own])
            # The copy is in the cache.
            self._own_sums[f"{own[0][0]} {copy.dtype}"] = copy.sum(dtype=torch.float32)
            started.parts.append(
                (self._mover.communicators.all_reduce(copy, group), copy, [buffer for _, buffer in own])
            )
        return started

    def _complete(self, reducing: _Reducing) -> None:
        for in_flight, _, _ in reducing.parts:
            in_flight.wait()
        for _, total, buffers in reducing.parts:
            torch._foreach_copy_(buffers, total.split([buffer.numel() for buffer in buffers]))
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers.totals.update(reducing.keys)


@dataclass(frozen=True, slots=True)
class _Issued:
    """A segment to be reduced, the time, and on an accelerator the event after its last backward."""

    segment: Segment
    start_s: float
    ready: torch.Event | None


@dataclass(frozen=True, slots=True)
class _Reducing:
    """A bucket that is being reduced: for each element type the reduction, the copy and the buffers it is a copy of."""

    keys: tuple[GradientKey, ...]
    parts: list[tuple[InFlight, Tensor, list[Tensor]]] = field(default_factory=list)
