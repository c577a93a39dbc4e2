"""A plan: where the layers are, and which way each micro-batch takes through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import _json
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.placement import LayerRange, Placement, RecomputedLayers

__all__ = ["Hop", "Plan", "Route"]


@dataclass(frozen=True, slots=True)
class Hop:
    """One stop of a micro-batch: `worker` runs `layers` on it."""

    worker: int
    layers: LayerRange

    def __hash__(self) -> int:
        # That of the layers would be asked for in Python as well, and hops are looked up time and again.
        layers = self.layers
        return hash((self.worker, layers.start, layers.stop))


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one micro-batch through the layers, from layer 0 to the last; backwards it is walked in reverse.

    Raises PlanError when there are no hops, or they do not start at layer 0 and go on without gap or overlap.
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
                    f"the route of micro-batch {self.micro_batch} must go on at layer {expected}, "
                    f"but worker {hop.worker} runs layers {hop.layers}"
                )
            expected = hop.layers.stop


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement and one route for every micro-batch of the global batch.

    Attributes:
        placement: which layers each worker holds.
        routes: the route of micro-batch m at index m.
        split_backward: whether workers run the two halves of a backward as operations of their own.
        fused_workers: those that run it in one go nevertheless: all workers of some pipelines, on whose routes there is
            no other worker.
        recompute: worker -> the layers by which it trades time for memory: of each it keeps less, and runs its forward,
            or the fast part of it, again just before its backward. A range may span several held ranges; the model's
            first and last layer are never run again. A worker that is not in the mapping keeps everything. Losses and
            gradients do not depend on it.

    Raises:
        PlanError: no routes; micro-batches not numbered 0, 1, ... in order; a route that ends before the last layer, or
            with a hop whose worker does not hold its layers; a worker that is to recompute a range whose first or
            last layer it does not hold; or a route on which only some workers are to split their backward.
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
        # By identity, for hops are slow to hash, and most routes share theirs.
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
        """Whether a worker runs the two halves of a backward as operations of their own."""
        return self.split_backward and worker not in self.fused_workers

    def to_json(self) -> str:
        """The plan as one line of JSON; `from_json` reads it back to an equal plan."""
        return _json.dump(
            _json.PlanRecord(
                num_layers=self.placement.num_layers,
                ranges={w: [(r.start, r.stop) for r in ranges] for w, ranges in self.placement.ranges.items()},
                routes=[[(hop.worker, hop.layers.start, hop.layers.stop) for hop in r.hops] for r in self.routes],
                split_backward=self.split_backward,
                recompute={
                    worker: (own.start, own.stop, *((own.num_selective,) if own.num_selective else ()))
                    for worker, own in self.recompute.items()
                },
                fused_workers=sorted(self.fused_workers),
            )
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises PlanError when `text` is anything else or breaks a rule of plans."""
        record = _json.load(text)
        placement = Placement(
            record.num_layers, {w: tuple(LayerRange(*r) for r in ranges) for w, ranges in record.ranges.items()}
        )
        routes = tuple(
            Route(index, tuple(Hop(worker, LayerRange(start, stop)) for worker, start, stop in hops))
            for index, hops in enumerate(record.routes)
        )
        recompute = {
            worker: RecomputedLayers(*own) if own else RecomputedLayers.in_full(placement.span(worker))
            for worker, own in record.recompute.items()
        }
        return cls(placement, routes, record.split_backward, recompute, frozenset(record.fused_workers))
