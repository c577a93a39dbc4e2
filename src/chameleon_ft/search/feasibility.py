"""Whether workers can hold the model at all: exact, by reachable layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chameleon_ft.schedule._records import Booleans
from chameleon_ft.search.bounds import Stops
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import Shape

__all__ = ["fitting_pipeline"]

# Workers of each class that are used, and at which layers as many stages can stop; bool [L + 1].
_Reached = dict[tuple[int, ...], Booleans]


def fitting_pipeline(stages: Stages, counts: Sequence[int]) -> tuple[Shape, Stops] | None:
    """A pipeline of the fewest workers that holds the model with one micro-batch at a time; None if there is none.

    A worker that fits a stage fits it in every pipeline, and with any number of micro-batches. So by dynamic
    programming over the workers of each class that are used, the layers up to which these hold the model.

    Args:
        stages: of the model.
        counts: workers of each class.
    """
    fits, num_layers = stages.fits, stages.num_layers
    reached: _Reached = {(0,) * len(counts): np.arange(num_layers + 1) == 0}
    newest = reached
    for _ in range(num_layers):
        following: _Reached = {}
        for used, stops in newest.items():
            for kind, count in enumerate(counts):
                if used[kind] < count:
                    more = _with(used, kind, 1)
                    following[more] = following.get(more, False) | (stops @ fits[kind])
        reached |= following
        for used, stops in following.items():
            if stops[-1]:
                return _traced(used, reached, fits)
        newest = following
    return None


def _traced(used: tuple[int, ...], reached: Mapping[tuple[int, ...], Booleans], fits: Booleans) -> tuple[Shape, Stops]:
    """The pipeline of these workers."""
    shape: list[int] = []
    stops = [fits.shape[-1] - 1]
    while any(used):
        for kind in range(len(used)):
            before = _with(used, kind, -1)
            if before in reached and (starts := reached[before] & fits[kind, :, stops[-1]]).any():
                shape.append(kind)
                stops.append(int(starts.argmax()))
                used = before
                break
    return tuple(reversed(shape)), tuple(reversed(stops[:-1]))


def _with(used: tuple[int, ...], kind: int, more: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] + more, *used[kind + 1 :])
