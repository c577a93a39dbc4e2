"""Segments, the neighbouring layers whose gradients are reduced in one message, and the rounds of their reduction.

Tied parameters are segments of their own, because their gradients are summed over the holders of all tied layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, pairwise
from typing import Final

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan.plan import LayerRange, Placement
from chameleon_ft.plan.rest import GradientKey
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.workload import Workload

ADDS_TO_GRADIENTS: Final = (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)
"""The kinds of operations that add to the weight gradients."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Gradients that are reduced together: of neighbouring layers, or of parameters that layers share.

    Attributes:
        layers: neighbouring layers, without parameters shared with others; for tied parameters, the first layer.
        holders: the workers, ascending, that hold all these layers; for tied parameters, any of the layers.
        tied: all layers that share the parameters; empty unless they are tied.
    """

    layers: LayerRange
    holders: tuple[int, ...]
    tied: tuple[int, ...] = ()

    @property
    def made_by(self) -> tuple[int, ...]:
        """The layers whose backward adds to its gradients."""
        return self.tied or tuple(self.layers)

    @property
    def keys(self) -> tuple[GradientKey, ...]:
        """The keys of its gradients, in the order in which they are reduced."""
        return (self.tied,) if self.tied else tuple((layer,) for layer in self.layers)


def gradient_segments(placement: Placement) -> tuple[Segment, ...]:
    """Return the fewest segments that cover all layers, by first layer, without `tied_segments`.

    Segments with a single holder are included; they need no message. Raises NoHolderError when a layer has no holder.
    """
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    holders = [placement.holders(layer) for layer in range(placement.num_layers)]
    starts = [layer for layer in range(len(holders)) if not layer or holders[layer] != holders[layer - 1]]
    return tuple(Segment(LayerRange(start, stop), holders[start]) for start, stop in pairwise([*starts, len(holders)]))


def tied_segments(placement: Placement, tied: Iterable[tuple[int, ...]]) -> tuple[Segment, ...]:
    """Return a segment for each set of layers that share parameters.

    A segment with a single holder needs no message, but may still sum gradients of several layers.
    """
    return tuple(
        Segment(
            LayerRange(layers[0], layers[0] + 1),
            tuple(sorted({worker for layer in layers for worker in placement.holders(layer)})),
            layers,
        )
        for layers in tied
    )


def segment_bytes(segment: Segment, workload: Workload) -> int:
    """Return the bytes of the gradients of a segment."""
    if segment.tied:
        return sum(each.gradient_bytes for each in workload.tied if each.layers == segment.tied)
    return sum(layer.gradient_bytes for layer in workload.layers[segment.layers.start : segment.layers.stop]) - sum(
        each.gradient_bytes for each in workload.tied for layer in each.layers if layer in segment.layers
    )


@dataclass(frozen=True, slots=True)
class SyncRounds:
    """The segments that need a message, in rounds, each by first layer; no two segments of a round share a worker."""

    rounds: tuple[tuple[Segment, ...], ...]

    @property
    def order(self) -> tuple[Segment, ...]:
        """All segments by (round, first layer). Workers issue theirs in this order, which rules out deadlock."""
        return tuple(chain.from_iterable(self.rounds))


def gradient_rounds(placement: Placement, tied: Iterable[tuple[int, ...]] = ()) -> SyncRounds:
    """Return the rounds in which the gradients of a placement are reduced, the highest layers first.

    A backward goes from high layers to low, so the gradients of high layers are complete first.

    If every worker holds one contiguous range, the common workers of two segments hold all between them too: the
    conflicts are a proper interval graph, and taking the first free round from right to left makes the fewest rounds.
    Otherwise DSATUR (Brelaz 1979) is used, which may take more. Shared parameters are complete when the lowest of their
    layers is; `tied` are the sets of these layers.

    Raises:
        NoHolderError: a layer has no holder.
    """
    every = [*reversed(gradient_segments(placement)), *tied_segments(placement, tied)]
    segments = [segment for segment in every if len(segment.holders) > 1]
    one_range = all(len(ranges) == 1 for ranges in placement.ranges.values())
    colour = _first_free if one_range and not any(segment.tied for segment in segments) else _dsatur
    rounds: dict[int, list[Segment]] = defaultdict(list)
    for segment, number in zip(segments, colour(segments), strict=True):
        rounds[number].append(segment)
    return SyncRounds(
        tuple(tuple(sorted(together, key=lambda segment: segment.layers)) for together in rounds.values())
    )


def _first_free(segments: Sequence[Segment]) -> list[int]:
    """Return for each segment, in turn, the first colour that none of its holders has."""
    colours: list[int] = []
    # For each worker, a bit for each colour that its segments have.
    taken: dict[int, int] = defaultdict(int)
    for segment in segments:
        of_holders = 0
        for worker in segment.holders:
            of_holders |= taken[worker]
        free = ~of_holders & (of_holders + 1)
        for worker in segment.holders:
            taken[worker] |= free
        colours.append(free.bit_length() - 1)
    return colours


def _dsatur(segments: Sequence[Segment]) -> list[int]:
    # Imported late: it costs more time than all of the pure part, and hardly any placement needs it.
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(len(segments)))
    pairs = combinations(enumerate(segments), 2)
    graph.add_edges_from((i, j) for (i, a), (j, b) in pairs if not set(a.holders).isdisjoint(b.holders))
    found = networkx.greedy_color(graph, strategy="DSATUR")
    return [found[index] for index in range(len(segments))]


def issue_points(operations: Sequence[Operation], segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return for each segment the number of operations after which a worker issues its all-reduce.

    At that point the worker's own gradients of the segment are complete and it has issued all earlier segments, which
    other workers may wait for.

    Args:
        operations: all operations of the worker in a step, in order.
        segments: segments of the worker, in the common order (`SyncRounds.order`).
    """
    points: list[int] = []
    for segment in segments:
        complete = (
            number
            for number, operation in enumerate(operations, start=1)
            if operation.kind in ADDS_TO_GRADIENTS and any(layer in operation.layers for layer in segment.made_by)
        )
        points.append(max(complete, default=0))
    return tuple(accumulate(points, max))
