"""Parts of a snapshot as blocks: packed, joined to parity, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chameleon_ft.errors import DamagedCheckpointError
from chameleon_ft.plan.snapshots import Part, Rebuilding
from chameleon_ft.worker.snapshots import PackedState, RestoredLayers, SnapshotStore, join, rebuild, unpack
from tests.golden import refused

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
        found[f"module/{number}"] = tensor.t() if len(shape) == 2 else tensor
    if draw(st.booleans()):
        found["optimizer/weight/step"] = torch.tensor(3.0)
        found["optimizer/weight/name"] = "adam"
    return found


def pack(state: dict[str, Any]) -> Tensor:
    packed = PackedState(state)
    block = torch.full((packed.num_bytes,), 7, dtype=torch.uint8)
    packed.copy(block)
    packed.seal(block)
    return block


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key])
        else:
            assert value == other[key]


@given(states())
def test_a_block_has_all_of_a_state(state: dict[str, Any]) -> None:
    assert_equal(unpack(pack(state)), state)
    assert torch.equal(pack(state), pack(state)), "the bytes between tensors are the same in each block"


@given(st.lists(states(), min_size=2, max_size=4), st.data())
def test_parity_gives_back_any_of_its_parts(drawn: list[dict[str, Any]], data: st.DataObject) -> None:
    parity: Tensor | None = None
    for state in drawn:
        parity = join(parity, pack(state))
    lost = data.draw(st.integers(0, len(drawn) - 1))
    for number, state in enumerate(drawn):
        if number != lost:
            parity = join(parity, pack(state))
    assert parity is not None
    assert_equal(unpack(parity), drawn[lost])


@given(st.data())
def test_a_changed_byte_is_found(data: st.DataObject) -> None:
    block = pack({"module/weight": torch.arange(100.0)})
    place = data.draw(st.integers(0, block.numel() - 1).filter(lambda place: not 24 <= place < 64))
    block[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedCheckpointError):
        unpack(block)


def test_a_worker_makes_a_part_of_its_own_blocks_and_keeps_these() -> None:
    one, other = ({"module/weight": torch.rand(5)} for _ in range(2))
    parts = Part(0), Part(1)
    blocks = {parts: join(pack(one), pack(other)), (parts[1],): pack(other)}
    before = {key: block.clone() for key, block in blocks.items()}
    inputs = tuple((3, key) for key in blocks)
    made = rebuild(3, [Rebuilding(3, Part(0), inputs)], blocks, None, scale=1)  # type: ignore[arg-type]
    restored = RestoredLayers.of([0, 1], blocks, made, torch.device("cpu")).layers
    assert_equal(restored[0], one)
    assert_equal(restored[1], other)
    restored[1]["module/weight"].zero_()
    assert all(torch.equal(block, before[key]) for key, block in blocks.items())


def test_a_layer_that_is_not_there_is_damage() -> None:
    with refused(DamagedCheckpointError):
        RestoredLayers.of([0, 1], {(Part(0),): pack({})}, {}, torch.device("cpu"))


def test_the_store_keeps_two_snapshots() -> None:
    store = SnapshotStore(pins_memory=False)

    def is_settled() -> bool:
        return store.is_settled

    key: tuple[Part, ...] = (Part(0),)
    assert is_settled()
    blocks = {step: {key: store.allocate(8)} for step in (2, 4, 6)}
    store.add(2, blocks[2])
    assert not is_settled(), "another one may not begin before this is known to be complete"
    store.resolve(2, is_complete=True)
    assert is_settled()
    store.add(4, blocks[4])
    assert (list(store), is_settled()) == ([2, 4], False)
    store.resolve(4, is_complete=False)
    assert (list(store), is_settled()) == ([2], True)
    store.add(6, blocks[6])
    store.resolve(6, is_complete=True)
    assert list(store) == [6]
    assert store.allocate(8).data_ptr() in {each[key].data_ptr() for each in (blocks[2], blocks[4])}
    store.keep_only(None)
    assert (list(store), is_settled()) == ([], True)
