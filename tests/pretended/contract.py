"""Tests of the pretended accelerator and of its library, which `tests/worker/test_pretended_nccl.py` runs.

They are run in a process of their own, because the device would become that of all other tests of the process. Ranks
are threads with a stream each. No test waits for a time: what is to be held is looked at once all else has passed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from typing import Any, Final

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from torch_npu import streams
from torch_npu.nccl import ProcessGroup, Work

NPU: Final = torch.device("npu", 0)
_STORE: Final = c10d.HashStore()
_number: Final = count()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def groups(size: int, *, blocking: int = 0) -> list[ProcessGroup]:
    """Return the groups of the ranks of a new communicator, which is not formed yet."""
    options = ProcessGroup.Options()
    options.config.blocking = blocking
    store = c10d.PrefixStore(f"{next(_number)}", _STORE)
    return [ProcessGroup(store, rank, size, options) for rank in range(size)]


def formed(size: int) -> list[ProcessGroup]:
    made = groups(size)
    for each in made:
        each.eager_connect_single_device(NPU)
    return made


def abort(*aborted: ProcessGroup) -> None:
    """Abort all at the same time, and wait for it."""
    with ThreadPoolExecutor(len(aborted)) as pool:
        for done in [pool.submit(each.abort) for each in aborted]:
            done.result()


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function)
    finally:
        pool.shutdown(wait=False)


def on(value: float, count: int = 3) -> Tensor:
    return torch.full((count,), value).to(NPU)


def garbage(count: int = 3) -> Any:
    return pytest.approx([math.nan] * count, nan_ok=True)


# --- drawn programs against a model of the contract ------------------------------------------------------------------

_BUFFERS: Final = 3


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of one rank: a computation on a buffer, or a message or reduction of it on a communicator.

    `waits`: its stream waits for it at once, or else before the next use of its buffer.
    """

    kind: str
    buffer: int
    communicator: int = 0
    peer: int = 0
    waits: bool = True


Programs = tuple[tuple[Op, ...], ...]


@st.composite
def programs(draw: st.DrawFn) -> Programs:
    """Draw matching operations for two or three ranks, then drop or exchange some of one rank."""
    size = draw(st.integers(2, 3))
    made: list[list[Op]] = [[] for _ in range(size)]
    buffer, communicator = st.integers(0, _BUFFERS - 1), st.integers(0, 1)
    for _ in range(draw(st.integers(1, 7))):
        kind, on = draw(st.sampled_from(["compute", "message", "reduce"])), draw(communicator)
        sender, receiver = draw(st.permutations(range(size)))[:2]
        for rank in range(size):
            own, waits = draw(buffer), draw(st.booleans())
            if kind == "reduce":
                made[rank].append(Op("reduce", own, on, waits=waits))
            elif kind == "message" and rank in (sender, receiver):
                peer = receiver if rank == sender else sender
                made[rank].append(Op("send" if rank == sender else "receive", own, on, peer, waits))
            elif kind == "compute":
                made[rank].append(Op("compute", own))
    rank = draw(st.integers(0, size - 1))
    if len(made[rank]) > 1 and draw(st.booleans()):
        index = draw(st.integers(0, len(made[rank]) - 2))
        if draw(st.booleans()):
            made[rank][index : index + 2] = made[rank][index + 1], made[rank][index]
        else:
            del made[rank][index]
    return tuple(tuple(each) for each in made)


@dataclass(slots=True, eq=False)
class Item:
    """Work of a stream in the model: it runs after `behind`, and may need its peers."""

    op: Op | None
    behind: Item | None = None
    has_passed: bool = False


@dataclass(slots=True)
class Model:
    """The contract: what passes, what is held, and the values."""

    programs: Programs
    values: list[list[float]] = field(init=False)
    queues: list[list[list[Item]]] = field(init=False)
    """Of each rank: its own stream, and that of each communicator."""
    of_op: dict[tuple[int, int], Item] = field(default_factory=dict)
    aborted: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.values = [[float(10 * rank + b) for b in range(_BUFFERS)] for rank in range(len(self.programs))]
        self.queues = [[[], [], []] for _ in self.programs]
        for rank, program in enumerate(self.programs):
            own = self.queues[rank][0]
            for number, op, waited in with_waits(program):
                if op is None:
                    own.append(Item(None, behind=self.of_op[rank, waited]))
                    continue
                item = self.of_op[rank, number] = Item(op)
                if op.kind == "compute":
                    own.append(item)
                else:
                    own.append(marker := Item(None))
                    item.behind = marker
                    self.queues[rank][1 + op.communicator].append(item)

    def run(self) -> None:
        """Let everything pass that can."""
        while any(self._step(rank, queue) for rank, queues in enumerate(self.queues) for queue in queues):
            pass

    def passed(self) -> dict[tuple[int, int], bool]:
        return {place: item.has_passed for place, item in self.of_op.items()}

    def _step(self, rank: int, queue: list[Item]) -> bool:
        head = next((item for item in queue if not item.has_passed), None)
        if head is None or (head.behind is not None and not head.behind.has_passed):
            return False
        op = head.op
        if op is None:
            head.has_passed = True
        elif op.kind == "compute":
            self.values[rank][op.buffer] = 2 * self.values[rank][op.buffer] + 1
            head.has_passed = True
        elif (rank, op.communicator) in self.aborted:
            if op.kind != "send":
                self.values[rank][op.buffer] = math.nan
            head.has_passed = True
        else:
            return self._meet(rank, head, op)
        return True

    def _meet(self, rank: int, head: Item, op: Op) -> bool:
        """Let an operation pass with its peers, if they are in the other part of it."""
        if op.kind == "reduce":
            found = [self._kernel(each, op.communicator) for each in range(len(self.programs))]
            parts = [(item, item.op) for item in found if item is not None and item.op is not None]
            if len(parts) < len(found) or any(part.kind != "reduce" for _, part in parts):
                return False
            total = sum(self.values[rank][part.buffer] for rank, (_, part) in enumerate(parts))
            for other, (item, part) in enumerate(parts):
                self.values[other][part.buffer] = total
                item.has_passed = True
            return True
        peer = self._kernel(op.peer, op.communicator)
        if peer is None or peer.op is None or {op.kind, peer.op.kind} != {"send", "receive"} or peer.op.peer != rank:
            return False
        (source, sent), (target, received) = sorted(
            [(rank, op), (op.peer, peer.op)], key=lambda each: each[1].kind, reverse=True
        )
        self.values[target][received.buffer] = self.values[source][sent.buffer]
        head.has_passed = peer.has_passed = True
        return True

    def _kernel(self, rank: int, communicator: int) -> Item | None:
        """Return the operation that a rank is in, unless it has aborted."""
        if (rank, communicator) in self.aborted:
            return None
        head = next((item for item in self.queues[rank][1 + communicator] if not item.has_passed), None)
        return head if head is not None and head.behind is not None and head.behind.has_passed else None


def with_waits(program: Sequence[Op]) -> Iterator[tuple[int, Op | None, int]]:
    """Yield (number, operation, 0), and (0, None, number of the operation to wait for), in order."""
    pending: dict[int, int] = {}
    for number, op in enumerate(program):
        if op.buffer in pending:
            yield 0, None, pending.pop(op.buffer)
        yield number, op, 0
        if op.kind != "compute":
            if op.waits:
                yield 0, None, number
            else:
                pending[op.buffer] = number
    for waited in pending.values():
        yield 0, None, waited


@given(programs=programs(), aborted=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=3))
@settings(max_examples=40)
def test_drawn_programs_run_as_the_contract_says(programs: Programs, aborted: set[tuple[int, int]]) -> None:
    model, size = Model(programs), len(programs)
    communicators = [formed(size), formed(size)]
    buffers = [[on(value) for value in values] for values in model.values]
    ends: dict[tuple[int, int], torch.Event] = {}
    for rank, program in enumerate(programs):
        with torch.Stream(NPU) as stream:
            works: dict[int, Work] = {}
            for number, op, waited in with_waits(program):
                if op is None:
                    works[waited].wait()
                elif op.kind == "compute":
                    buffers[rank][op.buffer].mul_(2).add_(1)
                    ends[rank, number] = stream.record_event()
                else:
                    works[number] = work = _issued(op, communicators[op.communicator][rank], buffers[rank])
                    ends[rank, number] = work._end

    def check() -> None:
        model.run()
        passed = model.passed()
        for place in (place for place, has_passed in passed.items() if has_passed):
            ends[place].synchronize()
        assert {place: end.query() for place, end in ends.items()} == passed

    check()
    aborted = {(rank, communicator) for rank, communicator in aborted if rank < size}
    with ThreadPoolExecutor(2 * size) as pool:
        returned = {each: pool.submit(communicators[each[1]][each[0]].abort) for each in aborted}
        model.aborted |= aborted
        check()
        for rank, communicator in aborted:
            items = model.queues[rank][1 + communicator]
            if all(item.has_passed for item in items):
                returned[rank, communicator].result()
            else:
                assert not returned[rank, communicator].done(), "it waits for what is held by another communicator"
        abort(*(group for each in communicators for group in each))
    model.aborted |= {(rank, communicator) for rank in range(size) for communicator in range(2)}
    check()
    streams.synchronize()
    found = [[float(buffer[0]) for buffer in own] for own in buffers]
    assert found == [pytest.approx(own, nan_ok=True) for own in model.values]


def _issued(op: Op, group: ProcessGroup, buffers: Sequence[Tensor]) -> Work:
    match op.kind:
        case "send":
            return group.send([buffers[op.buffer]], op.peer, 0)
        case "receive":
            return group.recv([buffers[op.buffer]], op.peer, 0)
        case _:
            return group.allreduce([buffers[op.buffer]])


# --- three mistakes that the contract invites ------------------------------------------------------------------------


def test_mistake_an_operation_that_has_ended_has_succeeded() -> None:
    sender, receiver = formed(2)
    target = on(0.0)
    work = receiver.recv([target], 0, 0)
    work.wait()
    behind = target + 1
    assert not work.is_completed()
    receiver.abort()
    assert work.is_completed(), "and so has the event behind it passed"
    assert target.tolist() == garbage()
    assert behind.tolist() == garbage(), "a kernel that was queued behind it has run"
    abort(sender)
    with pytest.raises(RuntimeError):
        receiver.recv([target], 0, 0)


def test_mistake_a_wait_means_arrival() -> None:
    sender, receiver = formed(2)
    target, copy = on(0.0), torch.empty(3, pin_memory=True)
    work = receiver.recv([target], 0, 0)
    work.wait()
    copy.fill_(7.0)
    copy.copy_(target, non_blocking=True)
    assert copy.tolist() == [7.0] * 3
    with torch.Stream(NPU):
        early = target + 1
        assert early.tolist() == [1.0] * 3, "another stream is not behind it"
    with torch.Stream(NPU):
        sender.send([on(5.0)], 1, 0)
    torch.accelerator.current_stream().synchronize()
    assert copy.tolist() == [5.0] * 3
    abort(sender, receiver)


def test_mistake_two_ranks_order_their_operations_differently() -> None:
    first, second = formed(2)
    own, others = [on(1.0), on(10.0)], [on(2.0), on(20.0)]
    for tensor in own:
        first.allreduce([tensor])
    for tensor in reversed(others):
        second.allreduce([tensor])
    streams.synchronize()
    assert [float(each[0]) for each in own] == [21.0, 12.0], "they are matched by their order"
    first.allreduce([own[0]])
    works = [first.allreduce([own[0]]), second.allreduce([on(1.0, count=5)]), second.allreduce([own[1]])]
    abort(first, second)
    assert all(work.is_completed() for work in works)
    assert own[0].tolist() == garbage(), "sizes that differ are never matched"


# --- the library -----------------------------------------------------------------------------------------------------


def test_an_abort_waits_for_what_another_communicator_holds() -> None:
    (first_peer, holding), (second_peer, behind) = formed(2), formed(2)
    first, second = on(0.0), on(0.0)
    holding.recv([first], 0, 0).wait()
    work = behind.recv([second], 0, 0)  # behind the first one, on the current stream
    aborting = in_thread(behind.abort)
    streams.default_stream().queue.wait(0)
    assert not work.is_completed()
    assert not aborting.done()
    holding.abort()
    aborting.result()
    assert second.tolist() == garbage()
    abort(first_peer, second_peer)


def test_a_lost_peer_holds_until_the_abort() -> None:
    lost, left = formed(2)
    left.allreduce([on(1.0)])
    lost.allreduce([on(1.0)])
    streams.synchronize()
    work = left.allreduce([target := on(1.0)])
    assert lost._communicator is not None
    lost._communicator.abort()  # shuts its connections down, as the system does when a process ends
    assert not work.is_completed()
    left.abort()
    assert work.is_completed()
    assert target.tolist() == garbage()


def test_creation_needs_all_members_and_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETENDED_NCCL_CREATION_S", "0.05")
    first, second = groups(2)
    first.eager_connect_single_device(NPU)  # returns at once
    sending = in_thread(lambda: first.send([on(3.0)], 1, 0))
    while first._in_use.acquire(blocking=False):
        first._in_use.release()
    aborting = in_thread(first.abort)
    assert not sending.done()
    assert not aborting.done(), "it waits for the thread that waits until the communicator is formed"
    second.eager_connect_single_device(NPU)
    assert second._communicator is not None
    second._communicator.is_formed.wait()
    aborting.result()
    assert sending.result().is_completed()
    abort(second)


def test_a_blocking_communicator_is_formed_when_its_creation_returns() -> None:
    first, second = groups(2, blocking=1)
    connecting = in_thread(lambda: first.eager_connect_single_device(NPU))
    second.eager_connect_single_device(NPU)
    connecting.result()
    abort(first, second)


def test_two_ranks_share_a_device_only_if_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    first, second = formed(2)
    for each in (first, second):
        with pytest.raises(RuntimeError, match="Duplicate GPU"):
            each.send([on(0.0)], 1 - each.rank(), 0)
    abort(first, second)


def test_tensors_are_of_the_device_and_contiguous() -> None:
    first, second = formed(2)
    for wrong in (torch.ones(3), on(0.0, count=4).view(2, 2).t()):
        with pytest.raises(ValueError, match=r"tensors|device"):
            first.send([wrong], 1, 0)
    abort(first, second)


def test_some_members_shrink_a_communicator_without_the_others() -> None:
    first, lost, second = ranks = formed(3)
    for each in ranks:
        each.allreduce([on(1.0)])
    streams.synchronize()
    assert lost._communicator is not None
    lost._communicator.abort()
    with ThreadPoolExecutor(2) as pool:
        smaller = [made.result() for made in [pool.submit(each.shrink, [1]) for each in (first, second)]]
    tensors = [on(1.0), on(2.0)]
    for group, tensor in zip(smaller, tensors, strict=True):
        group.allreduce([tensor])
    streams.synchronize()
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 2
    with pytest.raises(ValueError, match="excluded"):
        first.shrink([0, 1])
    waiting = in_thread(lambda: first.shrink([1]))
    assert not waiting.done(), "it needs all that are left"
    second.shrink([1])
    waiting.result()
    abort(*ranks, *smaller)


def test_communicators_take_streams_in_turn() -> None:
    options = ProcessGroup.Options()
    options.is_high_priority_stream = True
    made = [ProcessGroup(c10d.PrefixStore(f"{next(_number)}", _STORE), 0, 1, options) for _ in range(33)]
    assert made[0]._stream == made[32]._stream
    assert made[0]._stream != made[1]._stream


def test_a_broadcast_and_a_maximum() -> None:
    ranks = formed(3)
    tensors = [on(float(rank)) for rank in range(3)]
    options = c10d.BroadcastOptions()
    options.rootRank = 1
    for group, tensor in zip(ranks, tensors, strict=True):
        group.broadcast([tensor], options)
    streams.synchronize()
    assert [float(each[0]) for each in tensors] == [1.0] * 3
    largest = c10d.AllreduceOptions()
    largest.reduceOp = c10d.ReduceOp(c10d.ReduceOp.MAX)
    tensors = [on(float(rank)) for rank in range(3)]
    for group, tensor in zip(ranks, tensors, strict=True):
        group.allreduce([tensor], largest)
    streams.synchronize()
    assert [float(each[0]) for each in tensors] == [2.0] * 3
    for each in ranks:
        each.shutdown()


# --- the device ------------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """A stream that is held until `released` is set."""

    stream: torch.Stream = field(default_factory=lambda: torch.Stream(NPU))
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        assert isinstance(self.stream, streams.Stream)
        self.stream.queue.put(self.released.wait)


def test_tensors_of_the_device_are_not_those_of_the_host() -> None:
    assert (on(1.0) + torch.ones(3).to(NPU)).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="same device"):
        on(1.0) + torch.ones(3)
    with pytest.raises(RuntimeError, match="numpy"):
        on(1.0).numpy()


def test_data_shares_the_memory_and_not_the_count_of_changes() -> None:
    whole = on(0.0, count=4)
    first, second = (part.data for part in whole.split(2))
    before = first._version, second._version, whole._version
    first.view(1, 2).add_(1)
    assert (first._version, second._version, whole._version) == (before[0] + 1, *before[1:])
    assert whole.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert first.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_parameters_keep_their_attributes_on_the_device() -> None:
    model = torch.nn.Linear(2, 2)
    vars(model.weight)["scale"] = 3.0
    assert model.to(NPU).weight.device == NPU
    assert vars(model.weight)["scale"] == 3.0


def test_results_are_there_once_the_stream_has_passed() -> None:
    held = Held()
    with held.stream:
        made = torch.ones(3, device=NPU).add_(1)
        start = torch.Event(NPU, enable_timing=True)
        start.record()
        total = (made * 2).sum()
        end = torch.Event(NPU, enable_timing=True)
        end.record()
    assert not end.query()
    with torch.Stream(NPU) as other:
        assert torch.isnan(total + 1).item()
        end.wait()
        waited = total + 1
        behind = other.record_event()
    assert not behind.query()
    held.released.set()
    behind.synchronize()
    assert float(waited) == 13.0
    assert start.elapsed_time(end) >= 0
    assert held.stream.query()


def test_values_are_waited_for_on_the_host() -> None:
    held = Held()
    with held.stream:
        made = torch.arange(4, device=NPU)
    questions: list[Callable[[], Any]] = [
        lambda: made.sum().item(),
        lambda: made.cpu().tolist(),
        lambda: made.nonzero().tolist(),
        lambda: torch.equal(made, made),
    ]

    def ask(function: Callable[[], Any]) -> Any:
        with held.stream:
            return function()

    answers = [in_thread(partial(ask, each)) for each in questions]
    assert not any(answer.done() for answer in answers)
    held.released.set()
    assert [answer.result() for answer in answers] == [6, [0, 1, 2, 3], [[1], [2], [3]], True]


def test_a_copy_is_waited_for_unless_the_memory_is_pinned() -> None:
    held, pinned, pageable = Held(), torch.ones(3).pin_memory(), torch.ones(3)
    assert (pinned.is_pinned(), pinned[1:].is_pinned(), pageable.is_pinned()) == (True, True, False)
    with held.stream:
        there = pinned.to(NPU, non_blocking=True)
        back = there.to("cpu", non_blocking=True)
        pinned.fill_(2.0)  # before it is read
        assert torch.isnan(back).all()

        def copy() -> Tensor:
            with held.stream:
                return pageable.to(NPU, non_blocking=True)

        copying = in_thread(copy)
    assert not copying.done()
    held.released.set()
    assert copying.result().tolist() == [1.0] * 3
    held.stream.synchronize()
    assert back.tolist() == [2.0] * 3


def test_streams_come_from_a_pool() -> None:
    made = [torch.Stream(NPU) for _ in range(33)]
    assert made[0] == made[32]
    assert torch.Stream(NPU, priority=-1) not in made
    assert all(one != two for one, two in pairwise(made))
    assert torch.accelerator.current_stream() == torch.npu.default_stream()  # type: ignore[attr-defined]


def test_nothing_runs_after_the_fault_of_a_kernel() -> None:
    table, rows = on(0.0, count=6).view(3, 2), torch.tensor([7]).to(NPU)
    try:
        torch.nn.functional.embedding(rows, table)
        with pytest.raises(RuntimeError, match="a kernel has failed"):
            torch.accelerator.synchronize()
        with pytest.raises(RuntimeError, match="a kernel has failed"):
            table + 1
    finally:
        streams.DEVICE.fault = None


def test_a_model_is_trained_as_on_the_host() -> None:
    inputs, targets = torch.randn(5, 8), torch.randint(0, 4, (5,))
    expected = _trained(_model(), inputs, targets)
    assert _trained(_model().to(NPU), inputs.to(NPU), targets.to(NPU)) == pytest.approx(expected)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4))


def _trained(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]
