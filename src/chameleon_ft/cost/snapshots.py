"""The memory of hosts that snapshots take, and whether they are taken for that; see `plan.snapshots`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.shards import UNITS, Sharding, shard_optimizer
from chameleon_ft.plan.snapshots import Part, SnapshotLayout, lay_out_snapshot
from chameleon_ft.quantities import data_size
from chameleon_ft.workload import LayerCost, Workload

SNAPSHOT_SHARE: Final = 0.5
"""Share of a host's available memory that snapshots take at most, unless their interval is configured."""
MIN_SNAPSHOT_COST: Final = 0.1
"""Part of the seconds in which a snapshot is taken that steps are taken to be longer by, at least.

Steps vary too much to show what it costs them.
"""


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    """Bytes that a worker keeps in the memory of its host for one snapshot: of its own parts, and of backups.

    It keeps two snapshots while one is being taken, and memory that was in use stays for the next one.
    """

    own_bytes: int
    backup_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of two snapshots."""
        return 2 * (self.own_bytes + self.backup_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRule:
    """How it is decided whether snapshots are taken under a plan.

    Attributes:
        group: most parts of a backup; 1 for copies.
        at_any_size: every plan has snapshots. Otherwise there are none under plans that leave nothing to back up, and
            none that take more than `SNAPSHOT_SHARE` of the memory of a host.
        host_memory: host -> bytes available for its workers, as far as known.
    """

    group: int = 1
    at_any_size: bool = False
    host_memory: Mapping[str, int] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_memory", FrozenMap(self.host_memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChoice:
    """Where the snapshots of a plan are kept.

    Attributes:
        layout: None if none are taken.
        memory: worker -> the memory that they take, or would take.
        refusal: why none are taken though there is something to back up.
    """

    layout: SnapshotLayout | None
    memory: Mapping[int, SnapshotMemory]
    refusal: str = ""


def choose_snapshots(
    placement: Placement,
    workload: Workload,
    hosts: Mapping[int, str],
    rule: SnapshotRule,
    sharding: Sharding | None = None,
) -> SnapshotChoice:
    """Decide whether snapshots are taken under a plan, and where they are kept.

    Args:
        placement: every layer has a holder.
        hosts: worker -> host, of all holders.
        sharding: the owners of slices; if None, those of a new layout with the owners of the workload.
    """
    if sharding is None and workload.owners is not None:
        sharding = shard_optimizer(placement, hosts, workload.owners)
    layout = lay_out_snapshot(placement, hosts, sharding, group=rule.group, weight=part_bytes(workload))
    memory = snapshot_memory(layout, workload)
    if rule.at_any_size:
        return SnapshotChoice(layout=layout, memory=memory)
    if not layout.backups:
        return SnapshotChoice(layout=None, memory={})
    needed = host_bytes(memory, hosts)
    lacking = [host for host, size in needed.items() if size > _room_bytes(host, rule)]
    if not lacking:
        return SnapshotChoice(layout=layout, memory=memory)
    host = max(lacking, key=lambda host: needed[host] / max(1, rule.host_memory[host]))
    refusal = (
        f"those of the workers on {host} would take {data_size(needed[host])}, more than {SNAPSHOT_SHARE:.0%} of the "
        f"{data_size(rule.host_memory[host])} that were available there"
    )
    return SnapshotChoice(layout=None, memory=memory, refusal=refusal)


def snapshots_fit(placement: Placement, workload: Workload, hosts: Mapping[int, str], rule: SnapshotRule) -> bool:
    """Return whether no memory keeps a plan from having snapshots, as `choose_snapshots` decides.

    That is quick where hosts have room for all state of their workers, and for that of all layers beside it.
    """
    if rule.at_any_size or not rule.host_memory:
        return True
    pairs = zip(workload.moving_layers, workload.divided_bytes, strict=True)
    whole = [_kept_bytes(layer) + divided for layer, divided in pairs]
    most = dict.fromkeys(set(hosts.values()), sum(whole))
    for worker in placement.workers:
        most[hosts[worker]] += sum(whole[layer] for layer in placement.layers_of(worker))
    if all(2 * size <= _room_bytes(host, rule) for host, size in most.items()):
        return True
    return not choose_snapshots(placement, workload, hosts, rule).refusal


def _room_bytes(host: str, rule: SnapshotRule) -> float:
    return SNAPSHOT_SHARE * rule.host_memory.get(host, math.inf)


def _kept_bytes(layer: LayerCost) -> int:
    """Return the bytes that a snapshot has of what moves with a layer."""
    return state_bytes(layer) - layer.reread_bytes


def expected_snapshot_s(workload: Workload, cluster: Cluster) -> float:
    """Return the seconds in which copies of all state reach other workers, to each as many bytes."""
    total = sum(map(_kept_bytes, workload.moving_layers)) + sum(workload.divided_bytes)
    link = cluster.inter_host if len(cluster.host_sizes) > 1 else cluster.intra_host
    return link.message_s(total / len(cluster.workers))


def part_bytes(workload: Workload) -> Callable[[Part], int]:
    """Return a function that gives the bytes of a part."""
    whole, divided = [_kept_bytes(layer) for layer in workload.moving_layers], workload.divided_bytes

    def bytes_of(part: Part) -> int:
        return divided[part.layer] * (part.stop - part.start) // UNITS if part.stop else whole[part.layer]

    return bytes_of


def host_bytes(memory: Mapping[int, SnapshotMemory], hosts: Mapping[int, str]) -> dict[str, int]:
    """Return the bytes of two snapshots on each host, whose workers keep them."""
    found: dict[str, int] = {}
    for worker, each in memory.items():
        found[hosts[worker]] = found.get(hosts[worker], 0) + each.total_bytes
    return found


def snapshot_memory(layout: SnapshotLayout, workload: Workload) -> dict[int, SnapshotMemory]:
    """Return the memory of each worker that keeps something."""
    bytes_of = part_bytes(workload)
    own: dict[int, int] = {}
    backups: dict[int, int] = {}
    for part, keepers in layout.keepers:
        for keeper in keepers:
            own[keeper] = own.get(keeper, 0) + bytes_of(part)
    for backup in layout.backups:
        backups[backup.worker] = backups.get(backup.worker, 0) + max(map(bytes_of, backup.parts))
    return {
        worker: SnapshotMemory(own.get(worker, 0), backups.get(worker, 0)) for worker in sorted(own.keys() | backups)
    }
