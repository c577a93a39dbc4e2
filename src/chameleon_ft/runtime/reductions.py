"""Gradient reductions beside the backward: issued once a segment is complete, waited for by a thread of their own.

That thread is there so that a reduction ends when it ends, and not when the training thread next looks: its time is
recorded, and on emulated links the next one of the same worker begins with it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

from chameleon_ft.runtime.communicators import Communicators, InFlight
from chameleon_ft.runtime.layers import GradientBuffers
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment, issue_points

__all__ = ["Reductions", "TimedReduction"]

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class TimedReduction:
    """When the all-reduce of a segment was issued and when it was done, by `time.perf_counter`."""

    segment: Segment
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Issued:
    segment: Segment
    start_s: float
    parts: tuple[InFlight, ...]


class Reductions:
    """The reductions of one worker, step after step, as long as a generation lasts; use as a context manager.

    A step is `after` no operation, then after each, then `finish`. If something is under way when the context ends, the
    generation is over, and its communicators are interrupted.

    Args:
        buffers: its gradients; their segments are in the order that all workers share.
        operations: what it runs in a step.
    """

    def __init__(self, buffers: GradientBuffers, operations: Sequence[Operation], communicators: Communicators) -> None:
        self._buffers = buffers
        self._communicators = communicators
        reduced = [s for s in buffers.segments if len(s.holders) > 1 and buffers.of(s)]
        self._due: dict[int, list[Segment]] = defaultdict(list)
        for segment, point in zip(reduced, issue_points(operations, reduced), strict=True):
            self._due[point].append(segment)
        self._issued: SimpleQueue[_Issued | None] = SimpleQueue()
        self._ended: SimpleQueue[TimedReduction | BaseException] = SimpleQueue()
        self._under_way = 0
        self._thread = threading.Thread(target=self._wait_for_all, name="reductions", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._issued.put(None)
        while self._under_way and self._thread.is_alive():
            self._communicators.interrupt()
            self._thread.join(_POLL_S)
        self._thread.join()

    def after(self, count: int) -> None:
        """Issue what is complete now that `count` operations of the step have been run. Raises CommunicationError.

        With 0, before the first, what this worker adds nothing to: its gradients are zero.
        """
        for segment in self._due.get(count, ()):
            start_s = time.perf_counter()
            parts = tuple(
                self._communicators.all_reduce(buffer, segment.holders) for buffer in self._buffers.of(segment)
            )
            self._under_way += 1
            self._issued.put(_Issued(segment, start_s, parts))

    def finish(self) -> tuple[TimedReduction, ...]:
        """Block until all segments are reduced. Raises CommunicationError."""
        found: list[TimedReduction] = []
        while self._under_way:
            ended = self._ended.get()
            if isinstance(ended, BaseException):
                raise ended
            found.append(ended)
            self._under_way -= 1
        return tuple(found)

    def _wait_for_all(self) -> None:
        while (issued := self._issued.get()) is not None:
            try:
                for part in issued.parts:
                    part.wait()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the training thread's
                self._ended.put(error.with_traceback(None))  # a traceback would keep the operation alive
                return
            self._ended.put(TimedReduction(issued.segment, issued.start_s, time.perf_counter()))
            del issued
