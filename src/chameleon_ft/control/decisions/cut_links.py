"""The workers that leave when nothing passes between some pairs of workers, though the coordinator reaches all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from chameleon_ft.control.state.active_plan import ActivePlan

_MOST_SETS: Final = 1000  # that are compared; a cut between two hosts has as many as a host has workers, and one more


def workers_to_give_up(
    pairs: Sequence[tuple[int, int]], active: ActivePlan, speeds: Mapping[int, float]
) -> frozenset[int]:
    """Return the set of workers with one of each pair whose loss costs least.

    First counts how many layers, or slices of their optimizer's state, no other worker holds; then how many workers
    become the only holders of a layer; then what the others lack in speed. `speeds` are those of slow workers.
    """
    placement, sharding = active.plan.placement, active.sharding

    def cost(leaving: frozenset[int]) -> tuple[int, int, float, int, list[int]]:
        left = placement.without(leaving)
        lost = set(left.unheld_layers)
        if sharding is not None:
            lost.update(sharding.left_to({worker: left.layers_of(worker) for worker in left.workers}).lost_layers)
        sole_holders = left.single_points_of_failure({worker: worker for worker in left.workers})
        share = sum(speeds.get(worker, 1.0) for worker in leaving.intersection(placement.workers))
        return len(lost), len(sole_holders), share, len(leaving), [-worker for worker in sorted(leaving)]

    return min(islice(_covers(pairs), _MOST_SETS), key=cost)


def _covers(pairs: Collection[tuple[int, int]]) -> Iterator[frozenset[int]]:
    """Yield sets with a worker of each pair; among them are all from which no worker can be left out."""
    if not pairs:
        yield frozenset()
        return
    peers: dict[int, set[int]] = {}
    for one, other in pairs:
        peers.setdefault(one, set()).add(other)
        peers.setdefault(other, set()).add(one)
    worst = max(peers, key=lambda worker: len(peers[worker]))
    for side in (frozenset({worst}), frozenset(peers[worst])):
        for others in _covers([pair for pair in pairs if side.isdisjoint(pair)]):
            yield side | others
