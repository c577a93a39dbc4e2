"""Rounds: which segments are reduced at the same time, by colouring the graph of those that share a worker."""

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
        fewest: a number of rounds that cannot be beaten: the most segments that any one worker takes part in.
    """

    rounds: tuple[tuple[Segment, ...], ...]
    fewest: int

    @property
    def order(self) -> tuple[Segment, ...]:
        """The one order (round, first layer) in which every worker issues its own, so that none waits in a circle."""
        return tuple(segment for segments in self.rounds for segment in segments)

    @property
    def excess(self) -> int:
        """Rounds above what cannot be beaten; zero is proven optimal."""
        return len(self.rounds) - self.fewest


def gradient_rounds(placement: Placement, tied: Iterable[tuple[int, ...]] = ()) -> SyncRounds:
    """The rounds in which the gradients of a placement are reduced; the highest layers are in the first.

    A backward goes from high layers to low, so that the gradients of these are complete first.

    Where every worker holds one contiguous range, the workers of a segment that two others have in common hold all
    between them too: the conflicts are a proper interval graph, and the first free round from right to left makes the
    fewest rounds. Otherwise DSATUR (Brelaz 1979), which need not. Parameters that layers share are complete when the
    lowest of them is; `tied` are the sets of these layers.

    Raises:
        NoHolderError: a layer has no holder.
    """
    every = [*reversed(gradient_segments(placement)), *tied_segments(placement, tied)]
    segments = [segment for segment in every if len(segment.holders) > 1]
    fewest = max(Counter(chain.from_iterable(segment.holders for segment in segments)).values(), default=0)
    one_range = all(len(ranges) == 1 for ranges in placement.ranges.values())
    one_range = one_range and not any(segment.tied for segment in segments)
    colours = _in_turn(segments) if one_range else _dsatur(_conflicts(segments))
    rounds: dict[int, list[Segment]] = defaultdict(list)
    for segment, colour in zip(segments, colours, strict=True):
        rounds[colour].append(segment)
    return SyncRounds(
        tuple(tuple(sorted(together, key=lambda segment: segment.layers)) for together in rounds.values()), fewest
    )


def _conflicts(segments: Sequence[Segment]) -> list[set[int]]:
    """For each segment, the indices of those that it shares a worker with."""
    conflicts: list[set[int]] = [set() for _ in segments]
    holders = [set(segment.holders) for segment in segments]
    for i, j in combinations(range(len(segments)), 2):
        if not holders[i].isdisjoint(holders[j]):
            conflicts[i].add(j)
            conflicts[j].add(i)
    return conflicts


def _in_turn(segments: Sequence[Segment]) -> list[int]:
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


def _dsatur(conflicts: Sequence[set[int]]) -> list[int]:
    # Imported late: it costs more time than all of the pure part, and hardly any placement needs it.
    import networkx  # type: ignore[import-untyped]

    graph = networkx.Graph()
    graph.add_nodes_from(range(len(conflicts)))
    graph.add_edges_from((i, j) for i, others in enumerate(conflicts) for j in sorted(others) if i < j)
    found = networkx.greedy_color(graph, strategy="DSATUR")
    return [found[index] for index in range(len(conflicts))]
