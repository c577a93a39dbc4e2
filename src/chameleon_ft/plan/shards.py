"""Which workers keep and update which slices of the optimizer's state: ZeRO-1 over the holders of a layer.

The trained parameters of a layer form a vector, of which each *slice* has `redundancy` owners among the layer's
holders. Owners keep the optimizer's state of the slice and apply the update to it; then they send the updated
parameters to the holders that do not own it. So a layer's state is its parameters, on every holder, and slices of
optimizer state, on their owners (Rajbhandari et al., "ZeRO", 2020, with copies).

Slices are ranges of the vector and not whole parameters, because single parameters are as large as a whole layer's
share: an embedding, or a matrix of a block. They are counted in `UNITS` to a layer, so that this module needs no
parameters, and no boundary moves when holders come or go.

The owners are part of the plan, as data. In a new layout the slices are equal, and the owners of one are on as many
hosts as possible. When holders come or go, owners keep what they own as far as their shares allow, so few bytes move;
after a loss without a transition, the remaining owners stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.frames import Repeated
from chameleon_ft.plan.plan import Placement

UNITS: Final = 1 << 16
"""Units to the vector of a layer's trained parameters."""


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """The units `start, ..., stop - 1` of a layer and their owners, ascending.

    Raises PlanError unless 0 <= start < stop <= UNITS.
    """

    start: int
    stop: int
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= UNITS:
            raise PlanError(f"a slice needs 0 <= start < stop <= {UNITS}; got start {self.start} and stop {self.stop}")
        object.__setattr__(self, "owners", tuple(sorted(self.owners)))

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SliceMove:
    """Units of a layer whose optimizer state one worker sends to another."""

    source: int
    destination: int
    layer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LayerShards:
    """The slices of a layer, in order and without gaps, and its holders, ascending.

    Raises PlanError if the slices do not cover the layer, or if an owner is no holder.
    """

    holders: tuple[int, ...]
    slices: tuple[Slice, ...]

    def __post_init__(self) -> None:
        ends = [0, *(each.stop for each in self.slices)]
        if [each.start for each in self.slices] != ends[:-1] or ends[-1] != UNITS:
            raise PlanError(f"the slices of a layer have to cover it in order, without gaps; got {self.slices}")
        if strangers := {owner for each in self.slices for owner in each.owners}.difference(self.holders):
            raise PlanError(f"workers {sorted(strangers)} own slices of a layer that they do not hold")

    def owned_by(self, worker: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of units that a worker owns, ascending and as few as possible."""
        return _merged((each.start, each.stop) for each in self.slices if worker in each.owners)

    def receivers(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Return for each slice owner -> the holders that it sends updated parameters to: all that do not own it.

        Each owner sends to about as many, and to neighbours, which are likely to be on its host. So slices with the
        same owners travel together. All slices have an owner.
        """
        sent: dict[int, int] = defaultdict(int)
        found = []
        for each in self.slices:
            others = [holder for holder in self.holders if holder not in each.owners]
            least, more = divmod(len(others), len(each.owners))
            with_more = sorted(each.owners, key=lambda owner: (sent[owner], owner))[:more]
            sizes = [least + (owner in with_more) for owner in each.owners]
            ends = accumulate(sizes, initial=0)
            parts = {owner: tuple(others[a:b]) for owner, (a, b) in zip(each.owners, pairwise(ends), strict=True)}
            for owner, own in parts.items():
                sent[owner] += len(own) * len(each)
            found.append(parts)
        return tuple(found)

    def writers(self) -> tuple[int, ...]:
        """Return for each slice the owner that writes it to checkpoints, so that none writes much more than others.

        All slices have an owner.
        """
        written: dict[int, int] = defaultdict(int)
        found = []
        for each in self.slices:
            found.append(min(each.owners, key=lambda owner: (written[owner], owner)))
            written[found[-1]] += len(each)
        return tuple(found)

    def left_to(self, workers: Collection[int]) -> LayerShards:
        """Return the slices with only these workers as owners and holders."""
        holders = tuple(holder for holder in self.holders if holder in workers)
        slices = (
            Slice(each.start, each.stop, tuple(owner for owner in each.owners if owner in workers))
            for each in self.slices
        )
        return LayerShards(holders, _joined(slices))


@dataclass(frozen=True, slots=True)
class Sharding:
    """The slices of all layers, first layer to last."""

    layers: Repeated[LayerShards]

    @property
    def lost_layers(self) -> tuple[int, ...]:
        """The layers with a slice that no worker owns, ascending."""
        return tuple(layer for layer, own in enumerate(self.layers) if not all(each.owners for each in own.slices))

    @property
    def copies(self) -> int:
        """The owners of the slice that has the fewest."""
        return min(len(each.owners) for own in self.layers for each in own.slices)

    def owned_by(self, worker: int) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return layer -> the ranges of units that a worker owns, of the layers of which it owns some."""
        owned = {layer: own.owned_by(worker) for layer, own in enumerate(self.layers)}
        return {layer: ranges for layer, ranges in owned.items() if ranges}

    def left_to(self, held: Mapping[int, Collection[int]]) -> Sharding:
        """Return the slices with only these workers as owners and holders, by the layers that each of them holds."""
        holders: dict[int, set[int]] = defaultdict(set)
        for worker, layers in held.items():
            for layer in layers:
                holders[layer].add(worker)
        # Many layers are sliced alike.
        found: dict[tuple[LayerShards, tuple[int, ...]], LayerShards] = {}
        left = []
        for layer, own in enumerate(self.layers):
            key = own, tuple(holder for holder in own.holders if holder in holders[layer])
            if key not in found:
                found[key] = own.left_to(holders[layer])
            left.append(found[key])
        return Sharding(tuple(left))

    def moves_from(self, before: Sharding) -> tuple[SliceMove, ...]:
        """Return what has to be sent so that all owners have their slices, in an order that all workers share.

        Of the owners before, the one that has sent least sends a slice.

        Raises PlanError if a slice had no owner.
        """
        if lost := before.lost_layers:
            raise PlanError(f"no worker has all of the optimizer's state of layers {lost}")
        sent: dict[int, int] = defaultdict(int)
        moves = []
        for layer, (own, former) in enumerate(zip(self.layers, before.layers, strict=True)):
            for start, stop, owners, had in _overlaps(own.slices, former.slices):
                for destination in sorted(set(owners).difference(had)):
                    source = min(had, key=lambda owner: (sent[owner], owner))
                    sent[source] += stop - start
                    moves.append(SliceMove(source, destination, layer, start, stop))
        return tuple(moves)


def shard_optimizer(
    placement: Placement, hosts: Mapping[int, str], redundancy: int, before: Sharding | None = None
) -> Sharding:
    """Return the slices of a placement's layers, each with `redundancy` owners, or all holders if there are fewer.

    Args:
        placement: every layer has a holder.
        hosts: worker -> host, of all holders.
        redundancy: 1 or more.
        before: owners that keep their slices as far as their share allows.
    """
    # Many layers are alike.
    known: dict[tuple[LayerShards | None, tuple[int, ...]], LayerShards] = {}
    found = []
    for layer in range(placement.num_layers):
        holders = placement.holders(layer)
        former = None if before is None else before.layers[layer]
        if former is not None and set(former.holders).isdisjoint(holders):
            former = None
        if (former, holders) not in known:
            known[former, holders] = (
                _new(holders, hosts, redundancy) if former is None else _kept(former, holders, hosts, redundancy)
            )
        found.append(known[former, holders])
    return Sharding(tuple(found))


def owned_share(num_bytes: int, holders: int, redundancy: int | None) -> int:
    """Return the bytes of a layer's optimizer state that each of its holders owns; None: each owns all."""
    if redundancy is None or redundancy >= holders:
        return num_bytes
    return -(-num_bytes * redundancy // holders)


def owners_on_ring(ring: NDArray[np.int64], redundancy: int) -> NDArray[np.int64]:
    """Return the owners of each slice in a new layout of a layer, as far apart as can be in its holders by host.

    Args:
        ring: the holders in the order of their hosts, of shape (holders,).
        redundancy: owners of a slice.

    Returns:
        Owners, of shape (slices, owners). Several slices may have the same owners.
    """
    count, copies = len(ring), min(redundancy, len(ring))
    apart = np.arange(copies) * count // copies
    owners: NDArray[np.int64] = ring[(np.arange(count)[:, np.newaxis] + apart) % count]
    return owners


def _new(holders: tuple[int, ...], hosts: Mapping[int, str], redundancy: int) -> LayerShards:
    """Slice a layer equally."""
    count = len(holders)
    ring = np.array(sorted(holders, key=lambda holder: (hosts[holder], holder)))
    slices = (
        Slice(UNITS * number // count, UNITS * (number + 1) // count, tuple(owners))
        for number, owners in enumerate(owners_on_ring(ring, redundancy).tolist())
    )
    return LayerShards(holders, _joined(slices))


def _kept(before: LayerShards, holders: tuple[int, ...], hosts: Mapping[int, str], redundancy: int) -> LayerShards:
    """Slice a layer for other holders, of which those that own slices keep them as far as their share allows."""
    copies = min(redundancy, len(holders))
    if before.holders == holders and all(len(each.owners) == copies for each in before.slices):
        return before
    # A few units more, so that rounding moves nothing.
    share = -(-copies * UNITS // len(holders)) + copies
    loads = dict.fromkeys(holders, 0)
    for each in before.slices:
        for owner in each.owners:
            if owner in loads:
                loads[owner] += len(each)
    pieces = [piece for each in before.slices for piece in _kept_parts(each, loads, share, copies)]
    room = dict.fromkeys(holders, share)
    for start, stop, owners in pieces:
        for owner in owners:
            room[owner] -= stop - start
    slices = []
    for first, last, kept in pieces:
        start = first
        while start < last:
            stop, added = last, list[int]()
            while len(kept) + len(added) < copies:
                owner = _next_owner((*kept, *added), room, hosts)
                if room[owner] > 0:
                    stop = min(stop, start + room[owner])
                added.append(owner)
            for owner in added:
                room[owner] -= stop - start
            slices.append(Slice(start, stop, (*kept, *added)))
            start = stop
    return LayerShards(holders, _joined(slices))


def _kept_parts(
    each: Slice, loads: Mapping[int, int], share: int, copies: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (start, stop, owners that stay) of the parts of a slice.

    An owner with more than its share gives up the same proportion of each of its slices, and two owners of a slice give
    up different parts of it if they can.
    """
    staying = [owner for owner in each.owners if owner in loads][:copies]
    given: dict[int, range] = {}
    for number, owner in enumerate(staying):
        length = len(each) * max(0, loads[owner] - share) // max(1, loads[owner])
        first = min(each.start + len(each) * number // len(staying), each.stop - length)
        given[owner] = range(first, first + length)
    ends = sorted({each.start, each.stop, *(end for part in given.values() for end in (part.start, part.stop))})
    return [
        (start, stop, tuple(owner for owner in staying if start not in given[owner])) for start, stop in pairwise(ends)
    ]


def _next_owner(owners: Sequence[int], room: Mapping[int, int], hosts: Mapping[int, str]) -> int:
    """Return the holder that comes to own a slice, too: one with room, if possible on another host."""
    taken = {hosts[owner] for owner in owners}
    return min(
        (holder for holder in room if holder not in owners),
        key=lambda holder: (room[holder] <= 0, hosts[holder] in taken, -room[holder], holder),
    )


def _joined(slices: Iterator[Slice] | Sequence[Slice]) -> tuple[Slice, ...]:
    """Join neighbours with the same owners."""
    runs = (list(run) for _, run in groupby(slices, key=lambda each: each.owners))
    return tuple(Slice(run[0].start, run[-1].stop, run[0].owners) for run in runs)


def _merged(ranges: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _overlaps(
    slices: Sequence[Slice], others: Sequence[Slice]
) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (start, stop, owners, owners in `others`) of the ranges in which neither changes."""
    index = 0
    for each in slices:
        start = each.start
        while start < each.stop:
            while others[index].stop <= start:
                index += 1
            stop = min(each.stop, others[index].stop)
            yield start, stop, each.owners, others[index].owners
            start = stop
