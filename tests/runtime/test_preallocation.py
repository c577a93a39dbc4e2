"""Room for layers, made by a thread before they arrive."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from chameleon_ft.job import Job
from chameleon_ft.runtime import room
from chameleon_ft.runtime.preallocation import LayerAllocator, Memory
from tests.runtime.toy import SEED, toy_job

CPU = torch.device("cpu")
PATIENCE_S = 20.0
PARAM_BYTES = 4 * 40


class Builds:
    """A job that notes which of its layers are built; `gate` holds the building of the first one up."""

    def __init__(self, layers: int = 4) -> None:
        self.begun: list[int] = []
        self.first_has_begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        factories = [partial(self._built, layer) for layer in range(layers)]
        self.job: Job = dataclasses.replace(toy_job(layers), layers=factories, tied=())

    def _built(self, layer: int) -> nn.Module:
        self.begun.append(layer)
        self.first_has_begun.set()
        assert self.gate.wait(PATIENCE_S)
        return nn.Linear(7, 5)

    def rooms(self, *, ahead: bool = True) -> LayerAllocator:
        return LayerAllocator(self.job, seed=SEED, device=CPU, ahead=ahead)


def expected(rooms: LayerAllocator, layers: dict[int, int]) -> None:
    """Preallocate layers, and wait until there is room for them."""
    made = threading.Event()
    rooms.expect(layers, then=made.set)
    assert made.wait(PATIENCE_S)


# --- memory ----------------------------------------------------------------------------------------------------------


@given(
    num_bytes=st.integers(0, 100_000),
    wanted=st.lists(
        st.tuples(
            st.lists(st.integers(0, 200), max_size=3).map(tuple),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]),
        ),
        max_size=8,
    ),
)
def test_parts_of_memory_are_apart_and_begin_where_the_allocator_would_begin(
    num_bytes: int, wanted: list[tuple[tuple[int, ...], torch.dtype]]
) -> None:
    memory = Memory(num_bytes)
    given_out = 0
    spans: list[tuple[int, int]] = []
    for shape, dtype in wanted:
        size = torch.Size(shape).numel() * dtype.itemsize
        part = memory.part(shape, dtype)
        assert (part is None) == (size < 4096 or size > num_bytes - given_out)
        if part is None:
            continue
        assert (part.shape, part.dtype, part.is_contiguous()) == (shape, dtype, True)
        assert part.data_ptr() % 64 == 0
        assert part.untyped_storage().nbytes() == num_bytes
        assert all(part.data_ptr() >= stop or part.data_ptr() + size <= start for start, stop in spans)
        spans.append((part.data_ptr(), part.data_ptr() + size))
        given_out += size + -size % 64


def test_touching_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PIECE_BYTES", 1000)
    memory = Memory(10_000)
    whole = memory.part((10_000,), torch.uint8)
    assert whole is not None
    whole.fill_(1)
    answers = iter([False, False, False, True])
    memory.touch(unless=lambda: next(answers))
    assert int(whole.sum()) == 7000, "three pieces are cleared"
    memory.touch(unless=lambda: False)
    assert not whole.any()


# --- rooms -----------------------------------------------------------------------------------------------------------


def test_a_room_has_a_module_and_memory_for_the_rest_of_the_state() -> None:
    rooms = Builds().rooms()
    rooms.expect({2: PARAM_BYTES + 8192, 1: PARAM_BYTES})
    two, one = rooms.take(2), rooms.take(1)
    assert isinstance(two.module, nn.Linear)
    assert two.module.training
    assert two.memory is not None
    assert two.memory.part((8192,), torch.uint8) is not None
    assert one.memory is None, "its state is no more than its parameters"


def test_room_is_made_in_the_order_that_is_asked_for() -> None:
    builds = Builds()
    rooms = builds.rooms()
    expected(rooms, {3: 0, 0: 0, 2: 0})
    assert builds.begun == [3, 0, 2]
    assert rooms.take(0).module is not rooms.take(0).module, "the second time it is made anew"
    assert builds.begun == [3, 0, 2, 0]


def test_where_nothing_is_made_ahead_it_is_made_when_it_is_taken() -> None:
    builds = Builds()
    rooms = builds.rooms(ahead=False)
    expected(rooms, {0: 10**15, 1: 10**15})
    assert builds.begun == []
    assert rooms.take(1).memory is None
    assert builds.begun == [1]
    rooms.drop()


def test_what_has_been_made_for_another_plan_is_used_where_it_fits() -> None:
    builds = Builds()
    rooms = builds.rooms()
    expected(rooms, {0: 0, 1: 0, 2: 0})
    expected(rooms, {3: 0, 1: 0})
    assert builds.begun == [0, 1, 2, 3]
    rooms.take(1)
    rooms.take(3)
    assert builds.begun == [0, 1, 2, 3], "both were there"
    rooms.take(0)
    assert builds.begun == [0, 1, 2, 3, 0], "this one was let go of"


def under_way(builds: Builds, rooms: LayerAllocator, layers: dict[int, int], then: Callable[[], object]) -> None:
    """Do something while the first of these layers is being built, which ends only after that has begun."""
    builds.gate.clear()
    rooms.expect(layers)
    assert builds.first_has_begun.wait(PATIENCE_S)
    doing = threading.Thread(target=then)
    doing.start()
    doing.join(0.05)
    assert doing.is_alive(), "nobody else makes layers meanwhile: they draw from one generator"
    builds.gate.set()
    doing.join(PATIENCE_S)
    assert not doing.is_alive()


def test_dropping_waits_for_what_is_being_made_and_nothing_is_made_after_it() -> None:
    builds = Builds()
    rooms = builds.rooms()
    under_way(builds, rooms, {0: 0, 1: 0, 2: 0}, rooms.drop)
    assert builds.begun == [0]
    expected(rooms, {1: 0})
    assert builds.begun == [0, 1], "and it can go on with something else"


def test_another_plan_while_room_is_made() -> None:
    builds = Builds()
    rooms = builds.rooms()
    under_way(builds, rooms, {0: 0, 1: 0, 2: 0}, lambda: expected(rooms, {2: 0, 3: 0}))
    assert builds.begun == [0, 2, 3]


def test_in_a_hurry_no_more_memory_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[bool] = []
    monkeypatch.setattr(Memory, "touch", lambda self, *, unless: touched.append(not unless()))
    builds = Builds()
    rooms = builds.rooms()
    builds.gate.clear()
    rooms.expect({0: 9000, 1: 9000})
    assert builds.first_has_begun.wait(PATIENCE_S)
    rooms.hurry()
    builds.gate.set()
    assert rooms.take(0).memory is not None, "whoever waits for it gets it all the same"
    rooms.take(1)
    assert touched == [False, False]
    expected(rooms, {2: 9000})
    assert touched == [False, False, True]


def test_a_layer_that_cannot_be_made_is_said_to_whoever_needs_it() -> None:
    def fails() -> nn.Module:
        raise ValueError("no such layer")

    job = dataclasses.replace(toy_job(2), layers=[fails, lambda: nn.Linear(7, 5)], tied=())
    rooms = LayerAllocator(job, seed=SEED, device=CPU, ahead=True)
    expected(rooms, {0: 0, 1: 0})
    assert rooms.take(1).module is not None
    with pytest.raises(ValueError, match="no such layer"):
        rooms.take(0)
    rooms.expect({0: 0})
    rooms.drop()


def test_what_an_optimizer_keeps_fits_whatever_the_sizes() -> None:
    job = dataclasses.replace(toy_job(1), layers=[partial(nn.Embedding, 5025, 101)], tied=())
    rooms = LayerAllocator(job, seed=SEED, device=CPU, ahead=True)
    rooms.expect({0: 3 * 4 * 5025 * 101 + 4})  # AdamW keeps two numbers for each, and a counter
    made = rooms.take(0)
    assert made.memory is not None
    moments = [made.memory.part((5025, 101), torch.float32) for _ in range(2)]
    assert None not in moments


def test_where_there_is_no_memory_for_all_at_once_a_layer_has_none_ahead() -> None:
    rooms = Builds().rooms()
    expected(rooms, {2: 1 << 60})
    made = rooms.take(2)
    assert isinstance(made.module, nn.Linear)
    assert made.memory is None
