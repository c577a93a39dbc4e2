"""Layouts of snapshots: what they outlive, and how lost parts come back."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.plan.shards import shard_optimizer
from chameleon_ft.plan.snapshots import Part, SnapshotLayout, lay_out_snapshot
from tests.golden import refused


def pipelines(dp: int, pp: int, layers: int) -> Placement:
    cuts = [layers * stage // pp for stage in range(pp + 1)]
    return Placement(
        layers,
        {
            pipeline * pp + stage: (LayerRange(cuts[stage], cuts[stage + 1]),)
            for pipeline in range(dp)
            for stage in range(pp)
        },
    )


def left_to(layout: SnapshotLayout, live: Collection[int], workers: Collection[int]) -> SnapshotLayout:
    for worker in workers:
        if worker not in live:
            layout = layout.without(worker)
    return layout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Placement, dict[int, str], SnapshotLayout, int]:
    dp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    placement = pipelines(dp, pp, draw(st.integers(pp, 2 * pp)))
    size = draw(st.integers(1, dp * pp))
    hosts = {worker: f"host{worker // size}" for worker in placement.workers}
    redundancy = draw(st.none() | st.integers(1, 3))
    sharding = None if redundancy is None else shard_optimizer(placement, hosts, redundancy)
    group = draw(st.integers(1, 4))
    return placement, hosts, lay_out_snapshot(placement, hosts, sharding, group=group), group


def worth(layout: SnapshotLayout) -> dict[tuple[Part, ...], frozenset[Part]]:
    """Parts whose exclusive or is in each block."""
    return {backup.parts: frozenset(backup.parts) for backup in layout.backups} | {
        (part,): frozenset({part}) for part, _ in layout.keepers
    }


@given(layouts())
def test_the_parts_of_a_backup_have_no_host_in_common(
    drawn: tuple[Placement, dict[int, str], SnapshotLayout, int],
) -> None:
    placement, hosts, layout, group = drawn
    keepers = dict(layout.keepers)
    several = len(set(hosts.values())) > 1
    backed_up = [part for backup in layout.backups for part in backup.parts]
    assert len(backed_up) == len(set(backed_up))
    for part in keepers:
        # Only what all workers hold has no backup.
        assert (part in backed_up) == (set(keepers[part]) != set(placement.workers))
    for backup in layout.backups:
        assert 1 <= len(backup.parts) <= group
        around = [keepers[Part(part.layer)] for part in backup.parts]
        sites = [{hosts[k] if several else str(k) for k in holders} for holders in around]
        own = hosts[backup.worker] if several else str(backup.worker)
        if len(backup.parts) > 1:
            assert sum(map(len, sites)) == len(set().union(*sites))
            assert all(own not in each for each in sites)
        assert all(backup.worker not in keepers[part] for part in backup.parts)
        elsewhere = set(hosts.values() if several else map(str, hosts)) - sites[0]
        assert len(backup.parts) > 1 or own not in sites[0] or not elsewhere


@given(layouts())
def test_each_worker_has_its_share(drawn: tuple[Placement, dict[int, str], SnapshotLayout, int]) -> None:
    placement, _, layout, _ = drawn
    shares, sendings = layout.shares(), list(layout.sendings())
    assert shares.keys() == {*placement.workers}
    for worker, share in shares.items():
        assert share.kept == tuple(part for part, keepers in layout.keepers if worker in keepers)
        assert share.outgoing == tuple(each for each in sendings if each.source == worker)
        assert share.incoming == tuple(each for each in sendings if each.backup.worker == worker)


@given(layouts(), st.data())
def test_the_loss_of_all_holders_of_a_layer_is_survived(
    drawn: tuple[Placement, dict[int, str], SnapshotLayout, int], data: st.DataObject
) -> None:
    placement, _, layout, _ = drawn
    layer = data.draw(st.integers(0, placement.num_layers - 1))
    lost = set(placement.holders(layer))
    live = set(placement.workers) - lost
    found = left_to(layout, live, placement.workers).restoration()
    if not live:
        assert found is None
        return
    assert found is not None
    assert {each.part.layer for each in found.rebuilt} >= {layer}


@given(layouts(), st.data())
def test_what_is_restored_is_complete_and_made_of_what_is_there(
    drawn: tuple[Placement, dict[int, str], SnapshotLayout, int], data: st.DataObject
) -> None:
    placement, _, layout, _ = drawn
    live = data.draw(st.sets(st.sampled_from(placement.workers), min_size=1))
    left = left_to(layout, live, placement.workers)
    found = left.restoration()
    if found is None:
        return
    content, keepers = worth(layout), dict(left.keepers)
    has: dict[int, set[Part]] = {worker: {part for part, own in left.keepers if worker in own} for worker in live}
    blocks = {(backup.worker, backup.parts) for backup in left.backups}
    blocks |= {(worker, (part,)) for part, own in keepers.items() for worker in own}
    for each in found.rebuilt:
        assert all(source in live and (source, key) in blocks for source, key in each.inputs)
        result: frozenset[Part] = frozenset()
        for _, key in each.inputs:
            result ^= content[key]
        assert result == {each.part}
        assert each.worker in live
        has[each.worker].add(each.part)
    held = {layer for layers in found.held.values() for layer in layers}
    assert held == set(range(placement.num_layers))
    for worker, layers in found.held.items():
        assert all(Part(layer) in has[worker] for layer in layers)
    if found.sharding is not None:
        assert not found.sharding.lost_layers
        for layer, own in enumerate(found.sharding.layers):
            assert all(layer in found.held[holder] for holder in own.holders)
            for cut in own.slices:
                assert all(Part(layer, cut.start, cut.stop) in has[owner] for owner in cut.owners)


def test_parity_takes_less_memory_than_copies() -> None:
    placement = pipelines(1, 4, 4)
    hosts = {worker: f"host{worker}" for worker in range(4)}
    copies = lay_out_snapshot(placement, hosts)
    parity = lay_out_snapshot(placement, hosts, group=3)
    assert [len(backup.parts) for backup in copies.backups] == [1, 1, 1, 1]
    assert [len(backup.parts) for backup in parity.backups] == [3, 1]


def test_backups_are_spread_by_their_bytes() -> None:
    placement, hosts = pipelines(1, 4, 8), dict.fromkeys(range(4), "host")
    layout = lay_out_snapshot(placement, hosts, weight=lambda part: 6.0 if part.layer == 0 else 1.0)
    (big,) = (backup.worker for backup in layout.backups if backup.parts == (Part(0),))
    assert [backup.worker for backup in layout.backups].count(big) == 1


def test_a_group_has_a_part() -> None:
    with refused(PlanError):
        lay_out_snapshot(pipelines(1, 2, 2), {0: "a", 1: "b"}, group=0)
