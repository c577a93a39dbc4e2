"""Where a snapshot of the training state is kept, so that it outlives all holders of a layer.

A *part* is a layer's state, or a slice of its optimizer's state (see `plan.shards`). Each holder of a part keeps a copy
of it in host memory. Beside these, one worker that does not hold it has a *backup*, if possible on a host without any
holder: another copy, or the parity of several parts, their bytewise exclusive or (Wang et al., "REFT", 2023; Patterson
et al., "RAID", 1988). With the other parts of the group, parity gives back the part that is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.placement import Placement
from chameleon_ft.plan.shards import LayerShards, Sharding, Slice

__all__ = ["Backup", "Part", "Rebuilding", "Restoration", "Sending", "SnapshotLayout", "lay_out_snapshot"]


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

    def kept_by(self, worker: int) -> tuple[Part, ...]:
        """Return the parts that a worker copies from its own state."""
        return tuple(part for part, keepers in self.keepers if worker in keepers)

    def sendings(self) -> Iterator[Sending]:
        """Yield what is sent for all backups, evenly by all keepers, in an order that all workers share."""
        keepers, sent = dict(self.keepers), dict[int, int]()
        for backup in self.backups:
            for part in backup.parts:
                source = min(keepers[part], key=lambda keeper: (sent.get(keeper, 0), keeper))
                sent[source] = sent.get(source, 0) + 1
                yield Sending(source, part, backup)

    def without(self, worker: int) -> SnapshotLayout:
        """Return what is left of it without a worker."""
        keepers = ((part, tuple(each for each in own if each != worker)) for part, own in self.keepers)
        return replace(
            self, keepers=tuple(keepers), backups=tuple(each for each in self.backups if each.worker != worker)
        )

    def restoration(self) -> Restoration | None:
        """Return how the state comes back from what is left; None if some of it is lost.

        Lost parts of a layer are all made on one worker: one that has the layer, or the one with its backup.
        """
        keepers = dict(self.keepers)
        rebuilt: list[Rebuilding] = []
        made: dict[int, int] = defaultdict(int)  # parts that a worker makes
        held: dict[int, set[int]] = defaultdict(set)
        slices: dict[int, list[Slice]] = defaultdict(list)
        holders: dict[int, tuple[int, ...]] = {}
        makers: dict[int, int] = {}
        for part, own in sorted(self.keepers):  # that of a layer comes before its slices
            inputs = None if own else self._inputs_for(part, keepers)
            if not own and inputs is None:
                return None
            if part.layer not in holders:
                # Slices have owners among those that keep the layer.
                maker = min(own, key=lambda keeper: (made[keeper], keeper)) if inputs is None else inputs[0][0]
                makers[part.layer] = maker
                holders[part.layer] = own or (maker,)
            owners = own
            if inputs is not None:
                maker = makers[part.layer]
                made[maker] += 1
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
    several = len({hosts[worker] for worker in placement.workers}) > 1
    sites = {worker: hosts[worker] if several else str(worker) for worker in placement.workers}

    def outside(parts: Collection[Part], keepers: Mapping[Part, tuple[int, ...]]) -> list[int]:
        taken = {sites[keeper] for part in parts for keeper in keepers[part]}
        return [worker for worker in placement.workers if sites[worker] not in taken]

    # The holders of a layer may be lost together, and each of its slices with them.
    around = {part: keepers[Part(part.layer)] for part in keepers}
    groups: list[list[Part]] = []
    for part in sorted(keepers, key=lambda part: (-weight(part), part)):
        taken = {sites[holder] for holder in around[part]}
        found = next(
            (
                each
                for each in groups
                if len(each) < group
                and taken.isdisjoint(sites[holder] for other in each for holder in around[other])
                and outside([*each, part], around)
            ),
            None,
        )
        if found is None:
            groups.append([part])
        else:
            found.append(part)
    loads: dict[int, float] = dict.fromkeys(placement.workers, 0.0)
    backups = []
    for parts in groups:
        candidates = (
            outside(parts, around)
            or [worker for worker in placement.workers if not any(worker in around[part] for part in parts)]
            or outside(parts, keepers)
            or [worker for worker in placement.workers if not any(worker in keepers[part] for part in parts)]
        )
        if candidates:
            worker = min(candidates, key=lambda worker: (loads[worker], worker))
            loads[worker] += max(map(weight, parts))
            backups.append(Backup(worker, tuple(sorted(parts))))
    return SnapshotLayout(tuple(sorted(keepers.items())), tuple(backups))
