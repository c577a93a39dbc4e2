"""Checksums of tensors: equal bytes have equal ones, and what goes wrong with bytes changes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_ft.worker.state_transfer import layer_messages
from chameleon_ft.worker.state_transfer.layer_messages import checksum, checksum_of_sums
from tests.examples import examples

ROW = 8 * 4096
Checksum = Callable[[Tensor], int]
EITHER = pytest.mark.parametrize("taken", [checksum, checksum_of_sums])
SIZES = (0, 1, 7, ROW - 1, ROW, ROW + 1, 3 * ROW, 40 * ROW + 5)


def drawn(size: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def changed(data: Tensor, at: int, by: int) -> Tensor:
    other = data.clone()
    other[at] = (int(other[at]) + by) % 256
    return other


@EITHER
@pytest.mark.parametrize("size", SIZES)
def test_equal_bytes_have_equal_checksums_wherever_they_lie(taken: Checksum, size: int) -> None:
    data = drawn(size)
    odd = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert taken(data) == taken(odd) == taken(data.clone())
    assert 0 <= taken(data) < 1 << 63, "it goes into a tensor"


def test_on_a_cpu_it_is_xxh3() -> None:
    """The published value of no bytes with seed 0."""
    assert checksum(drawn(0)) == 0x2D06800538D394C2 >> 1


@pytest.mark.parametrize("rows", [1, 3, 1 << 20])
def test_it_does_not_depend_on_how_many_rows_are_summed_at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    data = drawn(SIZES[-1])
    expected = checksum_of_sums(data)
    monkeypatch.setattr(layer_messages, "_ROWS_AT_ONCE", rows)
    assert checksum_of_sums(data) == expected


@EITHER
@settings(max_examples=examples(60), deadline=None)
@given(size=st.sampled_from(SIZES[1:]), at=st.integers(0, 1 << 30), by=st.integers(1, 255))
def test_a_changed_byte_is_noticed(taken: Checksum, size: int, at: int, by: int) -> None:
    data = drawn(size)
    assert taken(changed(data, at % size, by)) != taken(data)


@EITHER
@settings(max_examples=examples(60), deadline=None)
@given(first=st.integers(0, 4 * 4096 - 1), second=st.integers(0, 4 * 4096 - 1), delta=st.integers(1, 1 << 62))
def test_two_changes_that_cancel_out_are_noticed(taken: Checksum, first: int, second: int, delta: int) -> None:
    if first == second:
        return
    words = drawn(4 * ROW).view(torch.int64)
    other = words.clone()
    other[first] += delta
    other[second] -= delta
    assert taken(other.view(torch.uint8)) != taken(words.view(torch.uint8))


@EITHER
def test_parts_that_are_lost_exchanged_or_moved_are_noticed(taken: Checksum) -> None:
    data = drawn(8 * ROW)
    variants = {
        "as it is": data,
        "zeros in it": torch.cat([data[:ROW], torch.zeros(ROW, dtype=torch.uint8), data[2 * ROW :]]),
        "shorter by a row": data[:-ROW],
        "a row more, of zeros": torch.cat([data, torch.zeros(ROW, dtype=torch.uint8)]),
        "rows exchanged": torch.cat([data[ROW : 2 * ROW], data[:ROW], data[2 * ROW :]]),
        "words exchanged": torch.cat([data[8:16], data[:8], data[16:]]),
        "halves exchanged": data.roll(4 * ROW),
        "a byte further": data.roll(1),
        "a word further": data.roll(8),
        "a row further": data.roll(ROW),
        "the first row twice": torch.cat([data[:ROW], data[:ROW], data[2 * ROW :]]),
        "nothing but zeros": torch.zeros_like(data),
    }
    for (name, one), (other_name, other) in itertools.combinations(variants.items(), 2):
        assert taken(one) != taken(other), (name, other_name)
