"""Gradient reductions beside the backward."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from chameleon_ft.plan import Hop, LayerRange, Route
from chameleon_ft.runtime.communicators import CommunicationError, Communicators
from chameleon_ft.runtime.execution.commit import Reductions
from chameleon_ft.runtime.execution.layers import GradientBuffers, HeldLayers
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.sync import Segment
from tests.runtime.toy import SEED, toy_job

LOW, MIDDLE, NOTHING, HIGH = LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3), LayerRange(3, 5)
ROUTE = Route(0, (Hop(0, LOW), Hop(0, LayerRange(1, 3)), Hop(0, HIGH)))
OPERATIONS = tuple(
    Operation.of(kind, ROUTE, hop)
    for kind, hops in ((OperationKind.FORWARD, (0, 1, 2)), (OperationKind.BACKWARD, (2, 1, 0)))
    for hop in hops
)
SEGMENTS = (Segment(HIGH, (0, 1)), Segment(NOTHING, (0, 3)), Segment(MIDDLE, (0, 2)), Segment(LOW, (0, 4)))


class Ring:
    """Communicators in which a reduction ends when it is told to, or when it is interrupted."""

    def __init__(self) -> None:
        self.issued: list[tuple[int, ...]] = []
        self.works: list[_Work] = []
        self.interrupts = 0

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> _Work:
        self.issued.append(group)
        self.works.append(_Work())
        return self.works[-1]

    def end(self) -> None:
        for work in self.works:
            work.over.set()

    def interrupt(self) -> None:
        self.interrupts += 1
        for work in self.works:
            work.error = CommunicationError(None, "the generation is over")
            work.over.set()


class _Work:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error


def reductions(
    ring: Ring, segments: Sequence[Segment] = SEGMENTS, operations: Sequence[Operation] = OPERATIONS
) -> Reductions:
    held = HeldLayers(toy_job(5), range(5), seed=SEED, device=torch.device("cpu"))
    communicators: Communicators = ring  # type: ignore[assignment]
    return Reductions(GradientBuffers(held, segments), operations, communicators)


def test_each_segment_is_issued_when_its_gradients_are_complete_and_waited_for_at_the_end() -> None:
    ring = Ring()
    with reductions(ring) as reducing:
        issued_after = []
        for step in range(2):
            for count in range(len(OPERATIONS) + 1):
                reducing.after(count)
                issued_after.append(len(set(ring.issued)))
            ring.end()
            done = reducing.finish()
            # A layer without parameters has nothing to reduce; HIGH has gradients of one element type, MIDDLE of two.
            assert [timed.segment.layers for timed in done] == [HIGH, MIDDLE, LOW]
            assert all(timed.start_s <= timed.end_s for timed in done)
            assert ring.issued[5 * step :] == [(0, 1)] * 2 + [(0, 2)] * 2 + [(0, 4)]
    assert issued_after[: len(OPERATIONS) + 1] == [0, 0, 0, 0, 1, 2, 3]
    assert ring.interrupts == 0


def test_a_worker_that_has_nothing_to_run_takes_part_from_the_start() -> None:
    ring = Ring()
    with reductions(ring, operations=()) as reducing:
        reducing.after(0)
        assert len(set(ring.issued)) == 3
        ring.end()
        assert len(reducing.finish()) == 3


def test_a_reduction_is_recorded_with_its_own_end() -> None:
    ring = Ring()
    with reductions(ring, [Segment(HIGH, (0, 1))]) as reducing:
        reducing.after(4)
        ring.end()
        for _ in range(1000):  # until the thread has recorded the end, before any call of `finish`
            if not reducing._ended.empty():
                break
            time.sleep(0.01)
        before_finish_s = time.perf_counter()
        (timed,) = reducing.finish()
        assert timed.end_s <= before_finish_s


def test_the_error_of_a_reduction_is_the_training_threads() -> None:
    ring = Ring()
    with reductions(ring) as reducing:
        for count in range(len(OPERATIONS) + 1):
            reducing.after(count)
        ring.works[2].error = CommunicationError(None, "connection reset")
        ring.end()
        with pytest.raises(CommunicationError, match="connection reset"):
            reducing.finish()


def test_what_is_under_way_when_a_step_fails_is_interrupted() -> None:
    ring = Ring()

    def step() -> None:
        with reductions(ring) as reducing:
            reducing.after(4)
            raise CommunicationError(5, "a message is lost")

    with pytest.raises(CommunicationError, match="worker 5"):
        step()
    assert ring.interrupts > 0
    assert not any(thread.name == "reductions" for thread in threading.enumerate())
