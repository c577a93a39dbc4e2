"""The references of the benchmark of transitions."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from benchmarks._transitions import min_bytes
from chameleon_ft.plan import LayerRange, Placement

LAYERS = 6


def placed(*ranges: tuple[int, int]) -> Placement:
    return Placement(9, {worker: (LayerRange(*each),) for worker, each in enumerate(ranges)})


def test_the_papers_example_moves_two_layers() -> None:
    old, new = placed((0, 3), (3, 6), (6, 9)), placed((0, 2), (2, 4), (4, 6), (6, 9))
    assert min_bytes(old, new, live=range(4), layer_bytes=[1] * 9) == 2


@st.composite
def placements(draw: st.DrawFn, workers: int = 4) -> Placement:
    held = {}
    for worker in range(draw(st.integers(1, workers))):
        start = draw(st.integers(0, LAYERS - 1))
        held[worker] = (LayerRange(start, draw(st.integers(start + 1, LAYERS))),)
    return Placement(LAYERS, held)


@given(old=placements(), new=placements(), sizes=st.lists(st.integers(1, 50), min_size=LAYERS, max_size=LAYERS))
def test_the_least_is_that_of_all_assignments(old: Placement, new: Placement, sizes: list[int]) -> None:
    live = range(4)

    def missing(worker: int, place: int) -> int:
        had = {layer for layers in old.ranges.get(worker, ()) for layer in layers}
        return sum(sizes[layer] for layer in new.layers_of(place) if layer not in had)

    best = min(sum(map(missing, chosen, new.workers)) for chosen in itertools.permutations(live, len(new.workers)))
    assert min_bytes(old, new, live=live, layer_bytes=sizes) == best
