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
from torch import Tensor, nn

from chameleon_ft.job.job import Job
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import best_program
from chameleon_ft.sync import gradient_segments
from chameleon_ft.worker.state_transfer import layer_messages as preallocation
from chameleon_ft.worker.state_transfer.layer_messages import LayerAllocator, Memory
from tests.golden import refused
from tests.strategies import equal_costs
from tests.worker.interrupted import LAYERS, MICRO_BATCHES, Worker
from tests.worker.switchboard import Switchboard
from tests.worker.toy import SEED, toy_job

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
        self.job: Job = dataclasses.replace(toy_job(layers), layers=factories, tied=(), built_in_full=())

    def _built(self, layer: int) -> nn.Module:
        self.begun.append(layer)
        self.first_has_begun.set()
        assert self.gate.wait(PATIENCE_S)
        return nn.Linear(7, 5)

    def allocator(self, *, ahead: bool = True) -> LayerAllocator:
        return LayerAllocator(self.job, seed=SEED, device=CPU, ahead=ahead)


def expected(allocator: LayerAllocator, layers: dict[int, int]) -> None:
    """Preallocate layers, and wait until there is room for them."""
    made = threading.Event()
    allocator.preallocate(layers, then=made.set)
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


def test_touching_stops_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preallocation, "_CHUNK_BYTES", 1000)
    memory = Memory(10_000)
    whole = memory.part((10_000,), torch.uint8)
    assert whole is not None
    whole.fill_(1)
    answers = iter([False, False, False, True])
    memory.touch(unless=lambda: next(answers))
    assert int(whole.sum()) == 7000, "three pieces are cleared"
    memory.touch(unless=lambda: False)
    assert not whole.any()


# --- allocator -------------------------------------------------------------------------------------------------------


def test_a_room_has_a_module_and_memory_for_the_rest_of_the_state() -> None:
    allocator = Builds().allocator()
    allocator.preallocate({2: PARAM_BYTES + 8192, 1: PARAM_BYTES})
    two, one = allocator.take(2), allocator.take(1)
    assert isinstance(two.layer.module, nn.Linear)
    assert two.layer.module.training
    assert two.memory is not None
    assert two.memory.part((8192,), torch.uint8) is not None
    assert one.memory is None, "its state is no more than its parameters"


def test_layers_are_preallocated_in_the_requested_order() -> None:
    builds = Builds()
    allocator = builds.allocator()
    expected(allocator, {3: 0, 0: 0, 2: 0})
    assert builds.begun == [3, 0, 2]
    assert allocator.take(0).layer is not allocator.take(0).layer, "the second time it is made anew"
    assert builds.begun == [3, 0, 2, 0]


def test_without_preallocation_memory_is_allocated_on_demand() -> None:
    builds = Builds()
    allocator = builds.allocator(ahead=False)
    expected(allocator, {0: 10**15, 1: 10**15})
    assert builds.begun == []
    assert allocator.take(1).memory is None
    assert builds.begun == [1]
    allocator.drop()


def test_memory_preallocated_for_another_plan_is_reused_if_it_fits() -> None:
    builds = Builds()
    allocator = builds.allocator()
    expected(allocator, {0: 0, 1: 0, 2: 0})
    expected(allocator, {3: 0, 1: 0})
    assert builds.begun == [0, 1, 2, 3]
    allocator.take(1)
    allocator.take(3)
    assert builds.begun == [0, 1, 2, 3], "both were there"
    allocator.take(0)
    assert builds.begun == [0, 1, 2, 3, 0], "this one was let go of"


def under_way(builds: Builds, allocator: LayerAllocator, layers: dict[int, int], then: Callable[[], object]) -> None:
    """Do something while the first of these layers is being built, which ends only after that has begun."""
    builds.gate.clear()
    allocator.preallocate(layers)
    assert builds.first_has_begun.wait(PATIENCE_S)
    doing = threading.Thread(target=then)
    doing.start()
    doing.join(0.05)
    assert doing.is_alive(), "an allocation that is under way is completed first"
    builds.gate.set()
    doing.join(PATIENCE_S)
    assert not doing.is_alive()


@pytest.mark.parametrize("draws", [False, True])
def test_a_step_runs_while_a_layer_is_built_unless_its_factory_draws_numbers(draws: bool) -> None:
    layers = LayerRange(0, LAYERS)
    plan = Plan(
        placement=Placement(LAYERS, {0: (layers,)}),
        routes=tuple(Route(number, (Hop(0, layers),)) for number in range(MICRO_BATCHES)),
    )
    costs = equal_costs(layers=LAYERS, micro_batches=MICRO_BATCHES, workers=1)
    operations = best_program(plan, costs).program.operations[0]

    def run(worker: Worker, *, waits: bool = False) -> list[Tensor]:
        step = threading.Thread(target=worker.run, args=(None, operations, Switchboard(), -1))
        step.start()
        step.join(0.2 if waits else PATIENCE_S)
        assert step.is_alive() == waits
        builds.gate.set()
        step.join(PATIENCE_S)
        assert worker.error is None
        return [buffer for segment in worker.buffers.segments for buffer in worker.buffers.of(segment)]

    builds = Builds()
    builds.job = dataclasses.replace(builds.job, built_in_full=(0,) if draws else ())
    workers = [Worker(0, toy_job(LAYERS), plan, gradient_segments(plan.placement)) for _ in range(2)]
    alone = run(workers[0])
    builds.gate.clear()
    allocator = builds.allocator()
    allocator.preallocate({0: 0})
    assert builds.first_has_begun.wait(PATIENCE_S)
    beside = run(workers[1], waits=draws)
    assert allocator.take(0).layer.module is not None
    assert all(map(torch.equal, alone, beside)), "dropout has drawn the same numbers"


def test_dropping_waits_for_the_current_allocation_and_starts_no_other() -> None:
    builds = Builds()
    allocator = builds.allocator()
    under_way(builds, allocator, {0: 0, 1: 0, 2: 0}, allocator.drop)
    assert builds.begun == [0]
    expected(allocator, {1: 0})
    assert builds.begun == [0, 1], "and it can go on with something else"


def test_another_plan_arrives_during_preallocation() -> None:
    builds = Builds()
    allocator = builds.allocator()
    under_way(builds, allocator, {0: 0, 1: 0, 2: 0}, lambda: expected(allocator, {2: 0, 3: 0}))
    assert builds.begun == [0, 2, 3]


def test_an_urgent_request_touches_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[bool] = []
    monkeypatch.setattr(Memory, "touch", lambda self, *, unless: touched.append(not unless()))
    builds = Builds()
    allocator = builds.allocator()
    builds.gate.clear()
    allocator.preallocate({0: 9000, 1: 9000})
    assert builds.first_has_begun.wait(PATIENCE_S)
    allocator.stop_touching()
    builds.gate.set()
    assert allocator.take(0).memory is not None, "whoever waits for it gets it all the same"
    allocator.take(1)
    assert touched == [False, False]
    expected(allocator, {2: 9000})
    assert touched == [False, False, True]


def test_a_failed_allocation_is_reported_to_the_taker_of_the_layer() -> None:
    def fails() -> nn.Module:
        raise ValueError("no such layer")

    job = dataclasses.replace(toy_job(2), layers=[fails, lambda: nn.Linear(7, 5)], tied=())
    allocator = LayerAllocator(job, seed=SEED, device=CPU, ahead=True)
    expected(allocator, {0: 0, 1: 0})
    assert allocator.take(1).layer is not None
    with refused(ValueError):
        allocator.take(0)
    allocator.preallocate({0: 0})
    allocator.drop()


def test_what_an_optimizer_keeps_fits_whatever_the_sizes() -> None:
    job = dataclasses.replace(toy_job(1), layers=[partial(nn.Embedding, 5025, 101)], tied=())
    allocator = LayerAllocator(job, seed=SEED, device=CPU, ahead=True)
    allocator.preallocate({0: 3 * 4 * 5025 * 101 + 4})  # AdamW keeps two numbers for each, and a counter
    made = allocator.take(0)
    assert made.memory is not None
    moments = [made.memory.part((5025, 101), torch.float32) for _ in range(2)]
    assert None not in moments


def test_a_layer_is_not_preallocated_if_memory_does_not_hold_all_at_once() -> None:
    allocator = Builds().allocator()
    expected(allocator, {2: 1 << 60})
    made = allocator.take(2)
    assert isinstance(made.layer.module, nn.Linear)
    assert made.memory is None
