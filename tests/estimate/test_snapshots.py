"""The memory of hosts that snapshots take."""

from __future__ import annotations

from chameleon_ft.estimate import snapshot_memory
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.plan.shards import shard_optimizer
from chameleon_ft.plan.snapshots import lay_out_snapshot
from chameleon_ft.workload import LayerCost, Workload

LAYERS = tuple(
    LayerCost("block", 1.0, 1.0, 1.0, param_bytes=6 * size, optimizer_bytes=12 * size, master_bytes=4 * size)
    for size in (100, 100, 200, 400)
)
PLACEMENT = Placement(4, {worker: (LayerRange(worker, worker + 1),) for worker in range(4)})
HOSTS = {worker: f"host{worker}" for worker in range(4)}


def total(group: int) -> tuple[int, int]:
    memory = snapshot_memory(lay_out_snapshot(PLACEMENT, HOSTS, group=group), Workload(LAYERS, 4, 1))
    assert all(each.total_bytes == 2 * (each.own_bytes + each.backup_bytes) for each in memory.values())
    return sum(each.own_bytes for each in memory.values()), sum(each.backup_bytes for each in memory.values())


def test_copies_take_as_much_as_what_they_are_of() -> None:
    assert total(1) == (18 * 800, 18 * 800)


def test_parity_takes_the_largest_part_of_each_group() -> None:
    own, backups = total(3)
    assert own == 18 * 800
    assert backups < 18 * 800
    assert backups >= 18 * 400


def test_owners_keep_their_slices_alone() -> None:
    placement = Placement(4, dict.fromkeys(range(4), (LayerRange(0, 4),)))
    sharding = shard_optimizer(placement, HOSTS, 2)
    workload = Workload(LAYERS, 4, 1, owners=2)
    memory = snapshot_memory(lay_out_snapshot(placement, HOSTS, sharding), workload)
    # What moves with a layer on each worker, the optimizer's state twice, and a third time as backups.
    moving = sum(layer.param_bytes - layer.unmoved_bytes for layer in workload.moving_layers)
    assert sum(each.own_bytes for each in memory.values()) == 4 * moving + 800 * 2 * 12
    assert sum(each.backup_bytes for each in memory.values()) == 800 * 12
