"""Keys: fixed for ever, and far from each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.keys import Purpose, init_key, random_key, step_key

PARTS = st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=5)


def test_frozen_examples() -> None:
    # These must never change: a resumed run would have other weights and masks.
    assert random_key(0) == 8_493_733_112_532_773_764
    assert random_key(7, 1, 2) == init_key(7, 2) == 5_802_218_619_053_399_189


@given(parts=PARTS, others=PARTS)
def test_keys_are_equal_only_for_equal_parts(parts: list[int], others: list[int]) -> None:
    assert 0 <= random_key(*parts) < 2**63
    assert (random_key(*parts) == random_key(*others)) == (parts == others)


def test_purposes_do_not_share_keys() -> None:
    assert step_key(7, step=1, micro_batch=2, layer=3) == random_key(7, Purpose.STEP, 1, 2, 3)
    assert len({random_key(7, purpose, 2) for purpose in Purpose}) == len(Purpose)
