"""Whether workers can hold the model at all: exact, by reachable layers."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_ft.search.bounds import Stops
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import Shape

__all__ = ["fitting_pipeline"]


def fitting_pipeline(stages: Stages, counts: Sequence[int]) -> tuple[Shape, Stops] | None:
    """A pipeline of the fewest workers that holds the model with one micro-batch at a time; None if there is none.

    A worker that fits a stage fits it in every pipeline, and with any number of micro-batches. So by dynamic
    programming over the workers of each class that are used, the layers up to which these hold the model.

    Args:
        stages: of the model.
        counts: workers of each class.
    """
    num_layers = stages.num_layers
    fits = stages.fits
    # By class and first layer, the layers where a stage may stop as bits.
    until = [
        [sum(1 << stop for stop in range(start + 1, num_layers + 1) if own[start, stop]) for start in range(num_layers)]
        for own in fits
    ]
    most = [min(count, num_layers) for count in counts]
    start = (0,) * len(most)
    reached = {start: 1}
    layers = [start]
    for _ in range(num_layers):
        following: dict[tuple[int, ...], int] = {}
        for used in layers:
            for kind, count in enumerate(most):
                if used[kind] < count:
                    more = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    following[more] = following.get(more, 0) | _extended(reached[used], until[kind])
        reached |= following
        for used, bits in following.items():
            if bits >> num_layers:
                return _traced(used, reached, until, num_layers)
        layers = list(following)
    return None


def _extended(bits: int, until: Sequence[int]) -> int:
    """The layers up to which one more stage gets from these."""
    found = 0
    while bits:
        lowest = bits & -bits
        if lowest.bit_length() <= len(until):
            found |= until[lowest.bit_length() - 1]
        bits ^= lowest
    return found


def _traced(
    used: tuple[int, ...], reached: dict[tuple[int, ...], int], until: Sequence[Sequence[int]], num_layers: int
) -> tuple[Shape, Stops]:
    """The pipeline that ends in a state."""
    shape: list[int] = []
    stops = [num_layers]
    while any(used):
        for kind, count in enumerate(used):
            before = (*used[:kind], count - 1, *used[kind + 1 :])
            bits = reached.get(before, 0) if count else 0
            starts = [start for start in range(stops[-1]) if bits >> start & 1 and until[kind][start] >> stops[-1] & 1]
            if starts:
                shape.append(kind)
                stops.append(starts[0])
                used = before
                break
    return tuple(reversed(shape)), tuple(reversed(stops[:-1]))
