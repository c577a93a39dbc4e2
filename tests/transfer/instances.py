"""Transfers: layers of few sizes, workers that hold any ranges, and places for some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import strategies as st

from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.transfer import Holding
from chameleon_ft.workload import LayerCost


def layer(num_bytes: int) -> LayerCost:
    """A layer of so many bytes of state, which is what moves, and others, which do not."""
    optimizer = num_bytes // 2
    return LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=num_bytes - optimizer, optimizer_bytes=optimizer)


def layers_of(sizes: Sequence[int]) -> tuple[LayerCost, ...]:
    return tuple(map(layer, sizes))


def ranges_of(held: Sequence[bool]) -> tuple[LayerRange, ...]:
    """The ranges of the layers that are held, neighbours merged."""
    edges = [at for at in range(len(held) + 1) if (at > 0 and held[at - 1]) != (at < len(held) and held[at])]
    return tuple(LayerRange(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def held_by(holding: Holding) -> set[int]:
    return {number for layers in holding.ranges for number in layers}


@st.composite
def holdings(draw: st.DrawFn, num_layers: int, *, kinds: int, may_be_empty: bool = True) -> Holding:
    """One range mostly, as plans in use have it, or several."""
    start = draw(st.integers(0, num_layers - 1))
    one = (LayerRange(start, draw(st.integers(start + 1, num_layers))),)
    any_set = st.lists(st.booleans(), min_size=num_layers, max_size=num_layers).map(ranges_of)
    ranges = draw(st.one_of(st.just(one), any_set))
    return Holding(ranges if ranges or may_be_empty else one, draw(st.integers(0, kinds - 1)))


@st.composite
def moves(draw: st.DrawFn, *, workers: int = 6, kinds: int = 2) -> tuple[dict[int, Holding], dict[int, Holding]]:
    """Draw holdings of live workers, and places for some of them; both with gaps in their numbers; five layers."""
    have = draw(st.lists(holdings(5, kinds=kinds), min_size=1, max_size=workers))
    numbers = draw(st.permutations(range(workers + 2)))
    live = dict(zip(numbers, have, strict=False))
    of_kind: dict[object, int] = defaultdict(int)
    for each in have:
        of_kind[each.kind] += 1
    places: dict[int, Holding] = {}
    numbers = draw(st.permutations(range(workers + 2)))
    for number in numbers[: draw(st.integers(0, len(have)))]:
        wanted = draw(holdings(5, kinds=kinds, may_be_empty=False))
        if of_kind[wanted.kind]:
            of_kind[wanted.kind] -= 1
            places[number] = wanted
    return live, places


@st.composite
def placements_of_five(draw: st.DrawFn, *, complete: bool) -> Placement:
    """Up to six workers on five layers; with `complete`, every layer has a holder."""
    ranges = {
        worker: draw(holdings(5, kinds=1, may_be_empty=False)).ranges
        for worker in draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
    }
    placement = Placement(5, ranges)
    if complete and (unheld := placement.unheld_layers):
        worker = placement.workers[0]
        held = [number in unheld or worker in placement.holders(number) for number in range(5)]
        placement = Placement(5, {**ranges, worker: ranges_of(held)})
    return placement
