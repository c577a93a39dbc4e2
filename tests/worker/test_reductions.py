"""Gradient reductions beside the backward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import pytest
import torch
from torch import Tensor

from chameleon_ft.plan import Hop, LayerRange, Route
from chameleon_ft.plan.rest import GradientKey
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.sync import Segment
from chameleon_ft.worker.communicators.base import CommunicationError, Communicators
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.mover import Mover
from tests.worker.toy import SEED, toy_job

LOW, MIDDLE, NOTHING, HIGH = LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3), LayerRange(3, 5)
ROUTE = Route(0, (Hop(0, LOW), Hop(0, LayerRange(1, 3)), Hop(0, HIGH)))
OPERATIONS = tuple(
    Operation.of(kind, ROUTE, hop)
    for kind, hops in ((OperationKind.FORWARD, (0, 1, 2)), (OperationKind.BACKWARD, (2, 1, 0)))
    for hop in hops
)
SEGMENTS = (Segment(HIGH, (0, 1)), Segment(NOTHING, (0, 3)), Segment(MIDDLE, (0, 2)), Segment(LOW, (0, 4)))


class Ring:
    """Communicators in which reductions end, doubling the tensor, while the ring is open, or when interrupted."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.issued: list[tuple[int, ...]] = []
        self.works: list[_Work] = []
        self.fails_at: int | None = None
        self.interrupts = 0
        self.over = threading.Event()
        if is_open:
            self.over.set()

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> _Work:
        self.issued.append(group)
        self.works.append(_Work(self, tensor, fails=len(self.works) == self.fails_at))
        return self.works[-1]

    def interrupt(self) -> None:
        self.interrupts += 1
        self.over.set()


class _Work:
    def __init__(self, ring: Ring, tensor: Tensor, *, fails: bool) -> None:
        self.ring, self.tensor, self.fails = ring, tensor, fails

    def wait(self) -> None:
        self.ring.over.wait()
        if self.fails:
            raise CommunicationError(None, "connection reset")
        if self.ring.interrupts:
            raise CommunicationError(None, "the generation is over")
        self.tensor.mul_(2)


def gradient_buffers(segments: Sequence[Segment] = SEGMENTS) -> GradientBuffers:
    held = HeldLayers(toy_job(5), range(5), seed=SEED, device=torch.device("cpu"))
    buffers = GradientBuffers(held, segments)
    for segment in buffers.segments:
        for number, buffer in enumerate(buffers.of(segment), start=1):
            buffer.fill_(number)
    return buffers


def reductions(
    ring: Ring,
    buffers: GradientBuffers | None = None,
    *,
    operations: Sequence[Operation] = OPERATIONS,
    zeros: Collection[GradientKey] = (),
) -> Reductions:
    communicators: Communicators = ring  # type: ignore[assignment]
    return Reductions(buffers or gradient_buffers(), operations, Mover(communicators), zeros=zeros)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_each_segment_is_issued_when_its_gradients_are_complete_and_waited_for_at_the_end() -> None:
    ring = Ring(is_open=True)
    with reductions(ring) as reducing:
        issued_after = []
        for step in range(2):
            for count in range(len(OPERATIONS) + 1):
                reducing.after(count)
                wait_for(lambda: len(reducing._ended) == reducing._num_issued)
                issued_after.append(len(set(ring.issued)))
            done = reducing.finish()
            # A layer without parameters has nothing to reduce; HIGH has gradients of two element types, MIDDLE too.
            assert [timed.segment.layers for timed in done] == [HIGH, MIDDLE, LOW]
            assert all(timed.start_s <= timed.end_s for timed in done)
            assert ring.issued[5 * step :] == [(0, 1)] * 2 + [(0, 2)] * 2 + [(0, 4)]
    assert issued_after[: len(OPERATIONS) + 1] == [0, 0, 0, 0, 1, 2, 3]
    assert ring.interrupts == 0


def test_a_worker_that_has_nothing_to_run_takes_part_from_the_start() -> None:
    ring = Ring(is_open=True)
    with reductions(ring, operations=()) as reducing:
        reducing.after(0)
        assert len(reducing.finish()) == 3
        assert len(set(ring.issued)) == 3


def test_a_segment_is_issued_only_when_the_one_before_it_is_reduced() -> None:
    ring = Ring()
    with reductions(ring, operations=()) as reducing:
        reducing.after(0)
        wait_for(lambda: len(ring.issued) == 2)
        time.sleep(0.02)
        assert ring.issued == [(0, 1)] * 2
        ring.over.set()
        reducing.finish()


def test_a_reduction_is_recorded_with_its_own_end() -> None:
    ring = Ring(is_open=True)
    with reductions(ring, gradient_buffers([Segment(HIGH, (0, 1))])) as reducing:
        reducing.after(4)
        wait_for(lambda: bool(reducing._ended))
        before_finish_s = time.perf_counter()
        (timed,) = reducing.finish()
        assert timed.end_s <= before_finish_s


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_gradient_is_a_contribution_until_its_bucket_is_complete(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chameleon_ft.worker.execution.reductions._BUCKET_BYTES", bucket_bytes)
    whole = Segment(LayerRange(0, 5), (0, 1))
    messages = 6 if bucket_bytes == 1 else 2  # of layers with one or two element types; of two element types
    for fails_at in range(messages):
        ring = Ring(is_open=True)
        ring.fails_at = fails_at
        buffers = gradient_buffers([whole])
        before = {key: [buffer.clone() for buffer in buffers.of_key(key)] for key in whole.keys}
        with reductions(ring, buffers) as reducing:
            reducing.after(len(OPERATIONS))
            with pytest.raises(CommunicationError, match="connection reset"):
                reducing.finish()

        types = [len(buffers.of_key(key)) for key in whole.keys]
        complete = 0 if bucket_bytes > 1 else sum(sum(types[: n + 1]) <= fails_at for n in whole.layers)
        assert buffers.totals == set(whole.keys[:complete])
        for key in whole.keys:
            factor = 2 if key in buffers.totals else 1
            for buffer, own in zip(buffers.of_key(key), before[key], strict=True):
                assert torch.equal(buffer, factor * own)


def test_zeros_are_contributed_where_another_worker_has_the_total() -> None:
    buffers = gradient_buffers()
    with reductions(Ring(is_open=True), buffers, operations=(), zeros={(3,), (0,)}) as reducing:
        reducing.after(0)
        reducing.finish()
    assert buffers.totals == {(0,), (1,), (3,), (4,)}
    for key in buffers.totals:
        assert all((buffer == 0).all() == (key in {(3,), (0,)}) for buffer in buffers.of_key(key))

    buffers.zero()

    assert buffers.totals == set()


def test_the_error_of_a_reduction_is_the_training_threads() -> None:
    ring = Ring(is_open=True)
    ring.fails_at = 2
    with reductions(ring) as reducing:
        for count in range(len(OPERATIONS) + 1):
            reducing.after(count)
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
