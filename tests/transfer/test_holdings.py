"""Missing layers and moved bytes if every worker keeps its place, against a count layer by layer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.plan import Placement
from chameleon_ft.transfer import missing_between, moved_bytes
from tests.transfer.instances import layers_of, placements_of_five

sizes_of_five = st.lists(st.integers(0, 9), min_size=5, max_size=5)


def layers_held(placement: Placement | None, worker: int) -> set[int]:
    return set() if placement is None else set(placement.layers_of(worker))


@given(st.none() | placements_of_five(complete=False), placements_of_five(complete=False), sizes_of_five)
def test_what_is_missing_is_counted_once(current: Placement | None, new: Placement, sizes: list[int]) -> None:
    missing = {worker: layers_held(new, worker) - layers_held(current, worker) for worker in new.workers}

    found = moved_bytes(current, new, layers_of(sizes))

    assert found == sum(sizes[layer] for layers in missing.values() for layer in layers)
    for worker, layers in missing.items():
        had = () if current is None else current.ranges_of(worker)
        assert missing_between(had, new.ranges_of(worker), range(6)) == len(layers)
