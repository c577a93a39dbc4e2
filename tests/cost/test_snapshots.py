"""The memory of hosts that snapshots take."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cost.snapshots import SnapshotRule, choose_snapshots, host_bytes, snapshot_memory, snapshots_fit
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


def test_parameters_that_are_read_again_take_nothing() -> None:
    layers = [replace(layer, reread_bytes=5 * layer.param_bytes // 6) for layer in LAYERS]
    memory = snapshot_memory(lay_out_snapshot(PLACEMENT, HOSTS), Workload(tuple(layers), 4, 1))
    assert sum(each.own_bytes for each in memory.values()) == 13 * 800


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


def test_none_are_taken_where_they_would_take_more_than_half_of_a_host() -> None:
    workload = Workload(LAYERS, 4, 1)
    free = choose_snapshots(PLACEMENT, workload, HOSTS, SnapshotRule())
    assert free.layout is not None
    needed = host_bytes(free.memory, HOSTS)
    for host, size in needed.items():
        enough = SnapshotRule(host_memory={host: 2 * size})
        assert choose_snapshots(PLACEMENT, workload, HOSTS, enough) == free
        short = SnapshotRule(host_memory={**dict.fromkeys(HOSTS.values(), 10**9), host: 2 * size - 1})
        found = choose_snapshots(PLACEMENT, workload, HOSTS, short)
        assert found.layout is None
        assert found.memory == free.memory
        assert found.refusal.startswith(f"those of the workers on {host} would take ")
        assert choose_snapshots(PLACEMENT, workload, HOSTS, replace(short, at_any_size=True)) == free


def test_where_every_worker_has_all_state_there_is_nothing_to_take_and_nothing_to_say() -> None:
    everywhere = Placement(4, dict.fromkeys(range(4), (LayerRange(0, 4),)))
    found = choose_snapshots(everywhere, Workload(LAYERS, 4, 1), HOSTS, SnapshotRule(host_memory={"host0": 1}))
    assert (found.layout, found.memory, found.refusal) == (None, {}, "")


@given(
    owners=st.none() | st.integers(1, 3),
    group=st.integers(1, 3),
    per_host=st.integers(1, 3),
    memory=st.lists(st.integers(1, 200_000), min_size=4, max_size=4),
)
def test_whether_they_fit_is_what_is_decided(owners: int | None, group: int, per_host: int, memory: list[int]) -> None:
    hosts = {worker: f"host{worker // per_host}" for worker in range(4)}
    halves = Placement(4, {worker: (LayerRange(worker % 2 * 2, worker % 2 * 2 + 2),) for worker in range(4)})
    rule = SnapshotRule(group=group, host_memory=dict(zip(hosts.values(), memory, strict=False)))
    workload = Workload(LAYERS, 4, 1, owners=owners)
    decided = choose_snapshots(halves, workload, hosts, rule)
    assert snapshots_fit(halves, workload, hosts, rule) == (not decided.refusal)
