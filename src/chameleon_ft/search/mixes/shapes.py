"""Which orders of classes of workers are searched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations
from typing import Final

from chameleon_ft.search.mixes.knapsack import Size
from chameleon_ft.search.pipelines.worker_classes import Shape

__all__ = ["shapes_of", "size_of"]

# Up to this many orders of classes in a pipeline, all are searched.
_ALL_SHAPES: Final = 3_000
# Beyond that, only pipelines of one class, and of two classes one after the other up to this depth.
_MIXED_DEPTH: Final = 6


def size_of(shape: Shape, kinds: int) -> Size:
    """How many workers of each class a shape takes."""
    return tuple(shape.count(kind) for kind in range(kinds))


# A search asks for them once for every number of pipelines.
@lru_cache(maxsize=4)
def shapes_of(counts: tuple[int, ...], layers: int) -> tuple[tuple[Shape, ...], bool]:
    """The shapes to search, by depth, and whether these are all."""
    deepest = min(sum(counts), layers)
    if len(counts) == 1:
        return tuple((0,) * depth for depth in range(1, deepest + 1)), True
    if sum(len(counts) ** depth for depth in range(1, deepest + 1)) <= _ALL_SHAPES:
        return tuple(shape for depth in range(1, deepest + 1) for shape in _orders(depth, list(counts))), True
    shapes = [(kind,) * depth for kind, count in enumerate(counts) for depth in range(1, min(count, layers) + 1)]
    for first, second in permutations(range(len(counts)), 2):
        for depth in range(2, min(layers, _MIXED_DEPTH) + 1):
            shapes += [
                (first,) * own + (second,) * (depth - own)
                for own in range(1, depth)
                if own <= counts[first] and depth - own <= counts[second]
            ]
    return tuple(shapes), False


def _orders(depth: int, left: list[int]) -> Iterator[Shape]:
    """All orders of so many workers out of those that are left."""
    if depth == 0:
        yield ()
        return
    for kind in range(len(left)):
        if left[kind]:
            left[kind] -= 1
            for rest in _orders(depth - 1, left):
                yield (kind, *rest)
            left[kind] += 1
