"""A plan: which layers each worker holds, and the route of each micro-batch through them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from chameleon_ft.errors import PlanError, describe_invalid
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


@dataclass(frozen=True, slots=True)
class Hop:
    """A part of a micro-batch's route: `worker` runs `layers`."""

    worker: int
    layers: LayerRange

    def __hash__(self) -> int:
        # One Python call rather than two: hops are looked up often.
        layers = self.layers
        return hash((self.worker, layers.start, layers.stop))


@dataclass(frozen=True, slots=True)
class Route:
    """The hops of one micro-batch, from layer 0 to the last; the backward takes them in reverse.

    Raises PlanError when there are no hops, or they do not cover the layers from 0 on without gap or overlap.
    """

    micro_batch: int
    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        if not self.hops:
            raise PlanError(f"the route of micro-batch {self.micro_batch} has no hops")
        expected = 0
        for hop in self.hops:
            if hop.layers.start != expected:
                raise PlanError(
                    f"the route of micro-batch {self.micro_batch} must continue at layer {expected}, "
                    f"but worker {hop.worker} runs layers {hop.layers}"
                )
            expected = hop.layers.stop


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement and one route for every micro-batch of the global batch.

    Attributes:
        placement: which layers each worker holds.
        routes: the route of micro-batch m at index m.
        split_backward: workers run the two halves of a backward as operations of their own.
        recompute: worker -> the layers of which it keeps less, and runs the forward, or its fast part, again just
            before the backward. A range may span several held ranges; the model's first and last layer are never
            recomputed. A worker that is not in the mapping keeps everything. Losses and gradients do not depend on it.
        fused_workers: workers whose backward is fused nevertheless: all workers of some pipelines.

    Raises:
        PlanError: no routes; micro-batches not numbered 0, 1, ... in order; a route that ends before the last layer, or
            with a hop whose worker does not hold its layers; a worker that is to recompute a range whose first or
            last layer it does not hold; or a route on which only some workers split their backward.
    """

    placement: Placement
    routes: tuple[Route, ...]
    split_backward: bool = False
    recompute: Mapping[int, RecomputedLayers] = FrozenMap({})
    fused_workers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.fused_workers and self.fused_workers == frozenset(self.placement.workers):
            object.__setattr__(self, "split_backward", False)
            object.__setattr__(self, "fused_workers", frozenset())
        if self.fused_workers and not self.split_backward:
            raise PlanError("fused_workers are named only in a plan with split backward; without it all workers are")
        if unknown := sorted(self.fused_workers.difference(self.placement.workers)):
            raise PlanError(f"worker {unknown[0]} is in fused_workers, but it holds no layers; leave it out")
        object.__setattr__(self, "recompute", FrozenMap(dict(sorted(self.recompute.items()))))
        for worker, layers in self.recompute.items():
            ranges = self.placement.ranges_of(worker)
            if not all(any(end in own for own in ranges) for end in (layers.start, layers.stop - 1)):
                raise PlanError(
                    f"worker {worker} is to recompute layers {layers}, but it holds "
                    f"{' '.join(map(str, ranges)) or 'none'}; the range must begin and end with a layer that it holds"
                )
        if not self.routes:
            raise PlanError("a plan needs a route for every micro-batch; got no routes")
        held: set[Hop] = set()
        # By identity, because hops are slow to hash, and most routes share theirs.
        seen: set[int] = set()
        for index, route in enumerate(self.routes):
            if route.micro_batch != index:
                raise PlanError(
                    f"routes must be those of micro-batches 0, 1, 2, ... in order; "
                    f"at index {index} is micro-batch {route.micro_batch}"
                )
            if (stop := route.hops[-1].layers.stop) != self.placement.num_layers:
                raise PlanError(
                    f"the route of micro-batch {index} ends before layer {stop}, "
                    f"but the placement has {self.placement.num_layers} layers"
                )
            if id(route.hops) in seen:
                continue
            seen.add(id(route.hops))
            for hop in route.hops:
                if hop not in held:
                    if not self.placement.holds(hop.worker, hop.layers):
                        raise PlanError(
                            f"micro-batch {index} is to pass layers {hop.layers} on worker {hop.worker}, "
                            f"which holds {' '.join(map(str, self.placement.ranges_of(hop.worker))) or 'none'}"
                        )
                    held.add(hop)
            if self.fused_workers and len({hop.worker in self.fused_workers for hop in route.hops}) > 1:
                raise PlanError(
                    f"on the route of micro-batch {index} some workers split their backward and others do not; "
                    "name all of them in fused_workers, or none"
                )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the global batch (M)."""
        return len(self.routes)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of the placement, ascending; one may hold layers and yet be on no route."""
        return self.placement.workers

    def splits(self, worker: int) -> bool:
        """Return whether a worker runs the two halves of a backward as operations of their own."""
        return self.split_backward and worker not in self.fused_workers

    def to_json(self) -> str:
        """Return the plan as one line of JSON, see `PlanDocument`; `from_json` reads it back to an equal plan."""
        from chameleon_ft.plan._json import PlanDocument

        return PlanDocument(
            format="chameleon-plan/1",
            num_layers=self.placement.num_layers,
            placement={str(w): [(r.start, r.stop) for r in ranges] for w, ranges in self.placement.ranges.items()},
            routes=[[(hop.worker, hop.layers.start, hop.layers.stop) for hop in route.hops] for route in self.routes],
            split_backward=self.split_backward,
            recompute={
                str(worker): [own.start, own.stop, *([own.num_selective] if own.num_selective else [])]
                for worker, own in self.recompute.items()
            },
            fused_workers=sorted(self.fused_workers),
        ).model_dump_json(exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote. Raises PlanError when `text` is anything else or breaks a rule."""
        from pydantic import ValidationError

        from chameleon_ft.plan._json import PlanDocument

        try:
            found = PlanDocument.model_validate_json(text)
        except ValidationError as error:
            why = describe_invalid(error).removeprefix(": ")
            raise PlanError(f"a plan must be JSON of format chameleon-plan/1: {why:.200}") from None
        ranges = {int(worker): tuple(LayerRange(*each) for each in own) for worker, own in found.placement.items()}
        routes = (
            Route(number, tuple(Hop(worker, LayerRange(*layers)) for worker, *layers in hops))
            for number, hops in enumerate(found.routes)
        )
        return cls(
            Placement(found.num_layers, ranges),
            tuple(routes),
            found.split_backward,
            {int(worker): RecomputedLayers(*own) for worker, own in found.recompute.items()},
            frozenset(found.fused_workers),
        )
