"""Rounds: which segments are reduced at the same time, by colouring the graph of segments that share a worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from chameleon_ft.plan.placement import Placement
from chameleon_ft.sync.segments import Segment, gradient_segments, tied_segments

__all__ = ["SyncRounds", "gradient_rounds"]


@dataclass(frozen=True, slots=True)
class SyncRounds:
    """The segments that need a message, in rounds; no two of a round share a worker.

    Attributes:
        rounds: segments of each round, by first layer.
        fewest: a lower bound on the number of rounds: the most segments that any one worker takes part in.
    """

    rounds: tuple[tuple[Segment, ...], ...]
    fewest: int

    @property
    def order(self) -> tuple[Segment, ...]:
        """All segments by (round, first layer). Every worker issues its own in this order, so none waits in a cycle."""
        return tuple(chain.from_iterable(self.rounds))

    @property
    def excess(self) -> int:
        """Rounds above the lower bound; zero is proven optimal."""
        return len(self.rounds) - self.fewest


def gradient_rounds(placement: Placement, tied: Iterable[tuple[int, ...]] = ()) -> SyncRounds:
    """Return the rounds in which the gradients of a placement are reduced, the highest layers first.

    A backward goes from high layers to low, so the gradients of high layers are complete first.

    If every worker holds one contiguous range, the common workers of two segments hold all between them too: the
    conflicts are a proper interval graph, and taking the first free round from right to left makes the fewest rounds.
    Otherwise DSATUR (Brelaz 1979), which need not. Parameters that layers share are complete when the lowest of them
    is; `tied` are the sets of these layers.

    Raises:
        NoHolderError: a layer has no holder.
    """
    every = [*reversed(gradient_segments(placement)), *tied_segments(placement, tied)]
    segments = [segment for segment in every if len(segment.holders) > 1]
    fewest = max(Counter(chain.from_iterable(segment.holders for segment in segments)).values(), default=0)
    one_range = all(len(ranges) == 1 for ranges in placement.ranges.values())
    colour = _first_free if one_range and not any(segment.tied for segment in segments) else _dsatur
    rounds: dict[int, list[Segment]] = defaultdict(list)
    for segment, number in zip(segments, colour(segments), strict=True):
        rounds[number].append(segment)
    return SyncRounds(
        tuple(tuple(sorted(together, key=lambda segment: segment.layers)) for together in rounds.values()), fewest
    )


def _first_free(segments: Sequence[Segment]) -> list[int]:
    """The first colour for each segment, in turn, that none of its holders has had."""
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
    import networkx  # type: ignore[import-untyped]

    graph = networkx.Graph()
    graph.add_nodes_from(range(len(segments)))
    pairs = combinations(enumerate(segments), 2)
    graph.add_edges_from((i, j) for (i, a), (j, b) in pairs if not set(a.holders).isdisjoint(b.holders))
    found = networkx.greedy_color(graph, strategy="DSATUR")
    return [found[index] for index in range(len(segments))]
