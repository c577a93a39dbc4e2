"""The memory of hosts that snapshots take; see `plan.snapshots`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from chameleon_ft.estimate.transition import state_bytes
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.plan.snapshots import Part, SnapshotLayout
from chameleon_ft.workload import Workload

__all__ = ["SNAPSHOT_SHARE", "SnapshotMemory", "host_bytes", "part_bytes", "snapshot_memory"]

SNAPSHOT_SHARE: Final = 0.5
"""Share of a host's available memory that snapshots take at most, unless their interval is configured."""


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


def part_bytes(workload: Workload) -> Callable[[Part], int]:
    """Return a function that gives the bytes of a part."""
    whole, divided = [state_bytes(layer) for layer in workload.moving_layers], workload.divided_bytes

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
