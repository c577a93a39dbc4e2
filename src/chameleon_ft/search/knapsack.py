"""Which pipelines to make of the workers so that together they finish most micro-batches: an unbounded knapsack.

An item is a pipeline: it takes workers of each class and is worth the micro-batches that it finishes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Final, TypeAlias

import numpy as np

from chameleon_ft.quantities import ROUNDING

Size: TypeAlias = tuple[int, ...]
"""Workers of each class that an item takes."""
Mix: TypeAlias = dict[Size, int]
"""How many of each item."""

# Up to this many entries times items, a table is filled in, which is exact.
_TABLE: Final = 12_000_000
# With a number of items there are hundreds of knapsacks in a search.
_NUMBERED_TABLE: Final = 300_000
# Deterministic limits of the integer program for workers of many classes.
_NODES: Final = 50
_GAP: Final = 1e-3


@dataclass(frozen=True, slots=True)
class BoundedMix:
    """A mix, and what no mix can be worth more than, with the items that this bound is made of."""

    bound: int
    mix: Mix
    made_of: tuple[Size, ...]


_NOTHING: Final = BoundedMix(0, {}, ())


def is_exact(counts: Sequence[int], items: int, pipeline_range: tuple[int, int] | None = None) -> bool:
    """Return whether `best_mix` of so many workers of each class and so many items fills in a table."""
    states = math.prod(count + 1 for count in counts)
    if pipeline_range is not None:
        return states * items * pipeline_range[1] <= _NUMBERED_TABLE
    return states * items <= _TABLE


def best_mix(
    values: Mapping[Size, int],
    counts: Sequence[int],
    pipeline_range: tuple[int, int] | None = None,
    *,
    all_workers: bool = False,
) -> BoundedMix:
    """Return the items that are worth most together; none, and a bound of zero, if no items fit.

    Exact by dynamic programming where the table is small. Beyond that, with workers of one class and a number of items,
    a bound by the upper hull of the items and a mix that comes near to it; with several classes an integer program.

    Args:
        values: worth of the items, one for each size; those of no worth are not used.
        counts: workers of each class.
        pipeline_range: fewest and most items; None for any number.
        all_workers: no worker may be idle; always exact.
    """
    items = [(size, value) for size, value in sorted(values.items()) if value > 0 and all(map(le, size, counts))]
    if not items:
        return _NOTHING
    if all_workers or is_exact(counts, len(items), pipeline_range):
        return _by_table(items, counts, pipeline_range, all_workers)
    if pipeline_range is not None and len(counts) == 1:
        return _by_hull({size: value for (size,), value in items}, counts[0], *pipeline_range)
    return _by_program(items, counts, pipeline_range)


def _by_table(
    items: Sequence[tuple[Size, int]],
    counts: Sequence[int],
    pipeline_range: tuple[int, int] | None,
    all_workers: bool,
) -> BoundedMix:
    # Here, because to import a kernel loads numba, and most importers of this module run none.
    from chameleon_ft.search._kernels.knapsack import fill_table

    fewest, most = (0, -1) if pipeline_range is None else (pipeline_range[0], min(pipeline_range[1], sum(counts)))
    if pipeline_range is not None and fewest > most:
        return _NOTHING
    states = math.prod(count + 1 for count in counts)
    best, chosen = np.empty((2, states, max(most, 0) + 1), np.int64)
    sizes, values = np.array([size for size, _ in items]), np.array([value for _, value in items])
    fill_table(np.array(counts), most, all_workers, sizes, values, np.zeros_like(counts), best, chosen)
    number, state = fewest + int(best[-1, fewest:].argmax()), states - 1
    bound = int(best[state, number])
    if bound <= 0:
        return _NOTHING
    strides = np.cumprod([1, *(count + 1 for count in reversed(counts[1:]))])[::-1]
    mix: Mix = {}
    while (taken := int(chosen[state, number])) < len(items):
        if taken < 0:
            state -= int(strides[-1 - taken])
            continue
        size = items[taken][0]
        mix[size] = mix.get(size, 0) + 1
        state -= int(np.dot(size, strides))
        number -= pipeline_range is not None
    return BoundedMix(bound, mix, tuple(mix))


def _by_program(
    items: Sequence[tuple[Size, int]], counts: Sequence[int], pipeline_range: tuple[int, int] | None
) -> BoundedMix:
    """Solve an integer program; the bound is that of the solver."""
    # Here, because it takes long to import, and most searches do without.
    from scipy.optimize import Bounds, LinearConstraint, milp

    sizes = np.array([size for size, _ in items], np.float64).T
    constraints = [LinearConstraint(sizes, ub=np.array(counts, np.float64))]
    if pipeline_range is not None:
        constraints.append(LinearConstraint(np.ones((1, len(items))), *pipeline_range))
    found = milp(
        np.array([-value for _, value in items], np.float64),
        integrality=np.ones(len(items)),
        bounds=Bounds(0, np.inf),
        constraints=constraints,
        options={"node_limit": _NODES, "mip_rel_gap": _GAP},
    )
    bound = getattr(found, "mip_dual_bound", None)
    if found.x is None or bound is None:
        return _NOTHING
    numbers = np.round(found.x).astype(int).tolist()
    mix = {size: count for (size, _), count in zip(items, numbers, strict=True) if count}
    return BoundedMix(math.floor(-bound * (1 + ROUNDING) + ROUNDING), mix, tuple(mix))


def _by_hull(values: Mapping[int, int], count: int, fewest: int, most: int) -> BoundedMix:
    """Bound items that take workers of one class, from `fewest` to `most` items.

    The bound is that of parts of items, which two neighbouring corners of the upper hull of all items meet. The mix is
    made of those two; it is worth as much as the bound says where their sizes differ by one.
    """
    most = min(most, count // min(values))
    if most < fewest:
        return _NOTHING
    corners = _hull(values)
    # More items are worth more until all are of the size that is worth most for each worker; the bound is concave.
    size, _ = max(corners, key=lambda corner: corner[1] / corner[0])
    numbers = sorted({min(max(number, fewest), most) for number in (count // size, count // size + 1)})
    return max((_of_number(corners, count, number) for number in numbers), key=lambda found: found.bound)


def _of_number(corners: Sequence[tuple[int, int]], count: int, number: int) -> BoundedMix:
    """Bound exactly `number` items, where the hull is at their mean size."""
    mean = count / number
    above = next((place for place, (size, _) in enumerate(corners) if size >= mean), len(corners) - 1)
    high, worth_high = corners[above]
    if high <= mean or above == 0:
        return BoundedMix(number * worth_high, {(high,): number}, ((high,),))
    low, worth_low = corners[above - 1]
    slope = (worth_high - worth_low) / (high - low)
    bound = math.floor(number * (worth_low + (mean - low) * slope) * (1 + ROUNDING))
    large = (count - low * number) // (high - low)
    mix = {(low,): number - large, (high,): large}
    return BoundedMix(bound, {size: items for size, items in mix.items() if items}, ((low,), (high,)))


def _hull(values: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the corners of the upper hull of the items from the smallest to the first of the most worth, by size."""
    corners: list[tuple[int, int]] = []
    for size, value in sorted(values.items()):
        if corners and value <= corners[-1][1]:
            continue
        while len(corners) > 1:
            (first, worth_first), (second, worth_second) = corners[-2:]
            if (worth_second - worth_first) * (size - first) > (value - worth_first) * (second - first):
                break
            corners.pop()
        corners.append((size, value))
    return corners
