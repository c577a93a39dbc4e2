"""Which layers each worker holds."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.frozen_map import FrozenMap

GroupT = TypeVar("GroupT", bound=Hashable)


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """The layers `start, ..., stop - 1`; never empty. Raises PlanError unless 0 <= start < stop."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"a layer range needs 0 <= start < stop; got start {self.start} and stop {self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def covers(self, other: LayerRange) -> bool:
        """Return whether every layer of `other` is in this range."""
        return self.start <= other.start and other.stop <= self.stop

    def intersection(self, other: LayerRange) -> LayerRange | None:
        """The layers in both ranges; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return LayerRange(start, stop) if start < stop else None


@dataclass(frozen=True, slots=True)
class RecomputedLayers(LayerRange):
    """Layers that a worker recomputes in its backward: the first ones in full, the last `num_selective` selectively.

    A layer that is recomputed in full keeps only its input. One that is recomputed selectively keeps results that are
    slow to compute (of matrix products and attention), and runs the fast parts again (Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models", 2022).

    Raises PlanError unless `num_selective` is between zero and the number of layers.
    """

    num_selective: int = 0

    def __post_init__(self) -> None:
        LayerRange.__post_init__(self)
        if not 0 <= self.num_selective <= len(self):
            raise PlanError(
                f"of {len(self)} layers that are recomputed, {self.num_selective} cannot be recomputed selectively"
            )

    def __str__(self) -> str:
        selective = f", {self.num_selective} selectively" if self.num_selective else ""
        return LayerRange.__str__(self) + selective

    @classmethod
    def in_full(cls, layers: LayerRange) -> RecomputedLayers:
        """Return these layers, all recomputed in full."""
        return cls(layers.start, layers.stop)

    @property
    def full(self) -> range:
        """The layers that are recomputed in full."""
        return range(self.start, self.stop - self.num_selective)

    @property
    def selective(self) -> range:
        """The layers that are recomputed selectively."""
        return range(self.stop - self.num_selective, self.stop)

    def intersection(self, other: LayerRange) -> RecomputedLayers | None:
        """Return the part of the layers that is in `other`; None if there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if start >= stop:
            return None
        return RecomputedLayers(start, stop, max(0, stop - max(start, self.selective.start)))


@dataclass(frozen=True, slots=True)
class Placement:
    """The layers held by each worker: one contiguous range, or several.

    Workers are kept in ascending order, and the ranges of a worker sorted and merged, so that equivalent placements are
    equal. Layers without a holder are allowed (`unheld_layers`): a failure can leave some.

    Attributes:
        num_layers: layers of the model (L).
        ranges: worker id -> the ranges it holds.

    Raises:
        PlanError: no layers, a negative worker id, a worker that holds nothing, overlapping ranges of one worker, or a
            range that goes past the last layer.
    """

    num_layers: int
    ranges: Mapping[int, tuple[LayerRange, ...]]
    _holders: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise PlanError(f"a placement needs at least one layer; got num_layers {self.num_layers}")
        merged = {worker: self._merged(worker, self.ranges[worker]) for worker in sorted(self.ranges)}
        holders: list[list[int]] = [[] for _ in range(self.num_layers)]
        for worker, ranges in merged.items():
            for layers in ranges:
                for layer in range(layers.start, layers.stop):
                    holders[layer].append(worker)
        object.__setattr__(self, "ranges", FrozenMap(merged))
        object.__setattr__(self, "_holders", tuple(map(tuple, holders)))

    def _merged(self, worker: int, ranges: Collection[LayerRange]) -> tuple[LayerRange, ...]:
        if worker < 0:
            raise PlanError(f"a worker id must be zero or a positive integer; got {worker}")
        if not ranges:
            raise PlanError(f"worker {worker} holds no layers; leave it out of the placement")
        if len(ranges) == 1 and isinstance(ranges, tuple) and ranges[0].stop <= self.num_layers:
            return ranges
        merged: list[LayerRange] = []
        for layers in sorted(ranges):
            if layers.stop > self.num_layers:
                raise PlanError(f"worker {worker} holds layers {layers}, but there are only {self.num_layers} layers")
            if merged and layers.start < merged[-1].stop:
                raise PlanError(f"worker {worker} holds layers {merged[-1]} and {layers}, which overlap")
            if merged and layers.start == merged[-1].stop:
                merged[-1] = LayerRange(merged[-1].start, layers.stop)
            else:
                merged.append(layers)
        return tuple(merged)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that hold something, ascending."""
        return tuple(self.ranges)

    @property
    def unheld_layers(self) -> tuple[int, ...]:
        """The layers that no worker holds, ascending."""
        return tuple(layer for layer, holders in enumerate(self._holders) if not holders)

    @property
    def fewest_holders(self) -> int:
        """The number of holders of the layer that has the fewest."""
        return min(map(len, self._holders))

    def ranges_of(self, worker: int) -> tuple[LayerRange, ...]:
        """Return the ranges that `worker` holds, ascending; empty for a worker that is not in the placement."""
        return self.ranges.get(worker, ())

    def layers_of(self, worker: int) -> tuple[int, ...]:
        """Return the layers that `worker` holds, ascending; empty for a worker that is not in the placement."""
        return tuple(layer for layers in self.ranges_of(worker) for layer in layers)

    def span(self, worker: int) -> LayerRange:
        """Return the range from the first layer that `worker` holds to the last. Raises PlanError if it holds none."""
        if not (held := self.ranges_of(worker)):
            workers = ", ".join(map(str, self.workers))
            raise PlanError(f"worker {worker} holds no layers; the workers of the placement are {workers}")
        return LayerRange(held[0].start, held[-1].stop)

    def holders(self, layer: int) -> tuple[int, ...]:
        """Return the workers that hold `layer`, ascending. Raises PlanError when there is no such layer."""
        if not 0 <= layer < self.num_layers:
            raise PlanError(f"there is no layer {layer}; the layers are 0 to {self.num_layers - 1}")
        return self._holders[layer]

    def holds(self, worker: int, layers: LayerRange) -> bool:
        """Return whether `worker` holds every layer of `layers`."""
        return any(held.covers(layers) for held in self.ranges_of(worker))

    def single_points_of_failure(self, groups: Mapping[int, GroupT]) -> frozenset[GroupT]:
        """Return the groups of workers, such as hosts, that contain all holders of some layer.

        Args:
            groups: the group of each worker that holds something.
        """
        of_holders = ({groups[worker] for worker in holders} for holders in set(self._holders))
        return frozenset(group for having in of_holders if len(having) == 1 for group in having)

    def without(self, workers: Collection[int]) -> Placement:
        """Return the placement without `workers`; workers that it does not have are ignored."""
        gone = frozenset(workers)
        return Placement(self.num_layers, {w: ranges for w, ranges in self.ranges.items() if w not in gone})
