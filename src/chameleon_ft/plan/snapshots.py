"""Where a snapshot of the training state is kept, so that it outlives all holders of a layer.

A *part* is a layer's state, or a slice of its optimizer's state (see `plan.shards`). Each holder of a part keeps a copy
of it in host memory. Beside these, one worker that does not hold it has a *backup*, if possible on a host without any
holder: another copy, or the parity of several parts, their bytewise exclusive or (Wang et al., "REFT", 2023; Patterson
et al., "RAID", 1988). With the other parts of the group, parity gives back the part that is lost.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.plan import Placement
from chameleon_ft.plan.shards import LayerShards, Sharding, Slice

_Indices: TypeAlias = npt.NDArray[np.intp]


class Part(NamedTuple):
    """Units `start, ..., stop - 1` of a layer's optimizer state; if there are none, the rest of the layer's state."""

    layer: int
    start: int = 0
    stop: int = 0


class Backup(NamedTuple):
    """The parity of some parts, on a worker that holds none of them; that of one part is a copy."""

    worker: int
    parts: tuple[Part, ...]


class Sending(NamedTuple):
    """A part that `source` sends to the worker of a backup."""

    source: int
    part: Part
    backup: Backup


class SnapshotShare(NamedTuple):
    """A worker's share in the work for a snapshot.

    Attributes:
        kept: parts that it copies from its own state.
        outgoing, incoming: what it sends and receives for backups, in the order of `SnapshotLayout.sendings`.
    """

    kept: tuple[Part, ...] = ()
    outgoing: tuple[Sending, ...] = ()
    incoming: tuple[Sending, ...] = ()


class Rebuilding(NamedTuple):
    """A part that all its keepers have lost, made on a worker from what these workers keep: (worker, parts)."""

    worker: int
    part: Part
    inputs: tuple[tuple[int, tuple[Part, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """How workers come to hold the state of a snapshot again.

    Attributes:
        held: worker -> the layers whose state it then has, ascending.
        sharding: the owners of slices among them; None if each holder of a layer has all of it.
        rebuilt: the parts that are made first.
    """

    held: Mapping[int, tuple[int, ...]]
    sharding: Sharding | None
    rebuilt: tuple[Rebuilding, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "held", FrozenMap(self.held))

    @property
    def senders(self) -> set[int]:
        """The workers from which others need something to make parts."""
        return {source for each in self.rebuilt for source, _ in each.inputs if source != each.worker}


@dataclass(frozen=True, slots=True)
class SnapshotLayout:
    """The keepers of each part, which hold it, by layer; and the backups."""

    keepers: tuple[tuple[Part, tuple[int, ...]], ...]
    backups: tuple[Backup, ...]

    def shares(self) -> dict[int, SnapshotShare]:
        """Return worker -> its share, of the workers that keep something."""
        kept: dict[int, list[Part]] = defaultdict(list)
        outgoing: dict[int, list[Sending]] = defaultdict(list)
        incoming: dict[int, list[Sending]] = defaultdict(list)
        for part, keepers in self.keepers:
            for keeper in keepers:
                kept[keeper].append(part)
        for sending in self.sendings():
            outgoing[sending.source].append(sending)
            incoming[sending.backup.worker].append(sending)
        return {
            worker: SnapshotShare(tuple(kept[worker]), tuple(outgoing[worker]), tuple(incoming[worker]))
            for worker in sorted({*kept, *incoming})
        }

    def sendings(self) -> Iterator[Sending]:
        """Yield what is sent for all backups, evenly by all keepers, in an order that all workers share."""
        keepers, sent = dict(self.keepers), dict[int, int]()
        for backup in self.backups:
            for part in backup.parts:
                source = min(keepers[part], key=lambda keeper: (sent.get(keeper, 0), keeper))
                sent[source] = sent.get(source, 0) + 1
                yield Sending(source, part, backup)

    def without(self, worker: int) -> SnapshotLayout:
        """Return the layout without a worker and all that it keeps."""
        keepers = ((part, tuple(each for each in own if each != worker)) for part, own in self.keepers)
        return replace(
            self, keepers=tuple(keepers), backups=tuple(each for each in self.backups if each.worker != worker)
        )

    def restoration(self) -> Restoration | None:
        """Return how the state is restored from the remaining copies; None if some of it is lost.

        Lost parts of a layer are all made on one worker: one that has the layer, or the one with its backup.
        """
        keepers = dict(self.keepers)
        rebuilt: list[Rebuilding] = []
        num_made: dict[int, int] = defaultdict(int)
        held: dict[int, set[int]] = defaultdict(set)
        slices: dict[int, list[Slice]] = defaultdict(list)
        holders: dict[int, tuple[int, ...]] = {}
        makers: dict[int, int] = {}
        # The part of a layer comes before its slices.
        for part, own in sorted(self.keepers):
            inputs = None if own else self._inputs_for(part, keepers)
            if not own and inputs is None:
                return None
            if part.layer not in holders:
                # Slices have owners among those that keep the layer.
                maker = min(own, key=lambda keeper: (num_made[keeper], keeper)) if inputs is None else inputs[0][0]
                makers[part.layer] = maker
                holders[part.layer] = own or (maker,)
            owners = own
            if inputs is not None:
                maker = makers[part.layer]
                num_made[maker] += 1
                rebuilt.append(Rebuilding(maker, part, inputs))
                owners = (maker,)
            if part.stop > part.start:
                slices[part.layer].append(Slice(part.start, part.stop, owners))
            for owner in holders[part.layer]:
                held[owner].add(part.layer)
        sharding = Sharding(tuple(LayerShards(holders[layer], tuple(slices[layer])) for layer in sorted(slices)))
        return Restoration(
            held={worker: tuple(sorted(layers)) for worker, layers in held.items()},
            sharding=sharding if slices else None,
            rebuilt=tuple(rebuilt),
        )

    def _inputs_for(
        self, part: Part, keepers: Mapping[Part, tuple[int, ...]]
    ) -> tuple[tuple[int, tuple[Part, ...]], ...] | None:
        """Return what makes a part again, its backup first; None if that is not there."""
        for backup in self.backups:
            others = [other for other in backup.parts if other != part]
            if part in backup.parts and all(keepers[other] for other in others):
                return ((backup.worker, backup.parts), *((keepers[other][0], (other,)) for other in others))
        return None


def lay_out_snapshot(
    placement: Placement,
    hosts: Mapping[int, str],
    sharding: Sharding | None = None,
    *,
    group: int = 1,
    weight: Callable[[Part], float] = lambda part: 1.0,
) -> SnapshotLayout:
    """Return where a snapshot of the state under a placement is kept.

    Hosts fail as one. If all workers are on one host, workers do.

    Args:
        placement: every layer has a holder.
        hosts: worker -> host, of all holders.
        sharding: the owners of slices of the optimizer's state.
        group: most parts of a backup; 1 for copies. The layers of its parts have no host in common, and neither has the
            worker that keeps it, so the loss of a host, or of all holders of a layer, takes one of them at most.
        weight: bytes of a part. No worker gets many more bytes of backups than others.

    Raises:
        PlanError: `group` is not positive.
    """
    if group < 1:
        raise PlanError(f"a backup is of one part or more; got {group}")
    keepers = {Part(layer): placement.holders(layer) for layer in range(placement.num_layers)}
    for layer, own in enumerate(() if sharding is None else sharding.layers):
        keepers |= {Part(layer, each.start, each.stop): each.owners for each in own.slices}
    workers = _Workers.of(placement, hosts)
    loads = np.zeros(len(workers.numbers))
    backups = []
    for parts in _groups(sorted(keepers, key=lambda part: (-weight(part), part)), group, workers):
        # The holders of a layer may be lost together, and each of its slices with them.
        layers = frozenset(part.layer for part in parts)
        candidates = workers.outside(layers)
        if not len(candidates):
            candidates = workers.without(layers)
        if not len(candidates):
            owners = {keeper for part in parts for keeper in keepers[part]}
            candidates = workers.outside_sites_of(owners)
            if not len(candidates):
                candidates = workers.other_than(owners)
        if len(candidates):
            place = candidates[loads[candidates].argmin()]
            loads[place] += max(map(weight, parts))
            backups.append(Backup(workers.numbers[place], tuple(sorted(parts))))
    return SnapshotLayout(tuple(sorted(keepers.items())), tuple(backups))


def _groups(parts: Iterable[Part], group: int, workers: _Workers) -> list[list[Part]]:
    """Divide parts into groups of at most `group`, each into the first that it fits."""
    groups: list[list[Part]] = []
    # The groups, ascending, that have parts of these layers.
    open_groups: dict[frozenset[int], list[int]] = defaultdict(list)
    for part in parts:
        found = [(each[0], layers) for layers, each in open_groups.items() if workers.can_share(layers, part.layer)]
        if found:
            index, layers = min(found)
            open_groups[layers].remove(index)
            if not open_groups[layers]:
                del open_groups[layers]
        else:
            index = len(groups)
            groups.append([])
        groups[index].append(part)
        if len(groups[index]) < group:
            insort(open_groups[frozenset(each.layer for each in groups[index])], index)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Workers:
    """The workers of a placement, ascending, and which may keep backups for which: (n,) indices into `numbers`.

    There are thousands of slices and of workers, but few different sets of layers, for which answers are kept.

    Attributes:
        sites: the worker's host, or its own if there is only one.
    """

    numbers: tuple[int, ...]
    sites: Mapping[int, str]
    holders: tuple[tuple[int, ...], ...]
    _outside: dict[frozenset[int], _Indices] = field(default_factory=dict)
    _without: dict[frozenset[int], _Indices] = field(default_factory=dict)
    _can_share: dict[tuple[frozenset[int], int], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, placement: Placement, hosts: Mapping[int, str]) -> _Workers:
        numbers = placement.workers
        several = len({hosts[worker] for worker in numbers}) > 1
        sites = {worker: hosts[worker] if several else str(worker) for worker in numbers}
        holders = tuple(placement.holders(layer) for layer in range(placement.num_layers))
        return cls(numbers=numbers, sites=sites, holders=holders)

    def outside(self, layers: frozenset[int]) -> _Indices:
        """Return the workers on hosts without a holder of these layers."""
        if layers not in self._outside:
            self._outside[layers] = self.outside_sites_of(self._holders_of(layers))
        return self._outside[layers]

    def without(self, layers: frozenset[int]) -> _Indices:
        """Return the workers that hold none of these layers."""
        if layers not in self._without:
            self._without[layers] = self.other_than(self._holders_of(layers))
        return self._without[layers]

    def can_share(self, layers: frozenset[int], layer: int) -> bool:
        """Return whether a part of a layer can join a backup of parts of others."""
        if (layers, layer) not in self._can_share:
            own = {self.sites[holder] for holder in self.holders[layer]}
            is_apart = own.isdisjoint(self.sites[holder] for holder in self._holders_of(layers))
            self._can_share[layers, layer] = is_apart and len(self.outside(layers | {layer})) > 0
        return self._can_share[layers, layer]

    def outside_sites_of(self, workers: Collection[int]) -> _Indices:
        """Return the workers on hosts without any of these."""
        taken = {self.sites[worker] for worker in workers}
        return np.array([i for i, each in enumerate(self.numbers) if self.sites[each] not in taken], dtype=np.intp)

    def other_than(self, workers: Collection[int]) -> _Indices:
        """Return the workers but for these."""
        return np.array([i for i, each in enumerate(self.numbers) if each not in workers], dtype=np.intp)

    def _holders_of(self, layers: frozenset[int]) -> set[int]:
        return {holder for layer in layers for holder in self.holders[layer]}
