"""The owners of slices of the optimizer's state: how they share it, and what moves when holders come or go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.plan import shards as sharding_module
from chameleon_ft.plan.shards import (
    UNITS,
    LayerShards,
    Sharding,
    Slice,
    SliceMove,
    owned_share,
    owners_on_ring,
    shard_optimizer,
)
from tests.golden import refused

SLACK = 64  # units, of rounding: a thousandth of a layer


def placement_of(holders: list[set[int]]) -> Placement:
    """Return a placement of layers with these holders."""
    ranges: dict[int, list[LayerRange]] = {}
    for layer, workers in enumerate(holders):
        for worker in workers:
            ranges.setdefault(worker, []).append(LayerRange(layer, layer + 1))
    return Placement(len(holders), {worker: tuple(own) for worker, own in ranges.items()})


def on_hosts(workers: int, per_host: int) -> dict[int, str]:
    return {worker: f"host {worker // per_host}" for worker in range(workers)}


def loads(own: LayerShards) -> dict[int, int]:
    return {holder: sum(stop - start for start, stop in own.owned_by(holder)) for holder in own.holders}


Units = npt.NDArray[np.bool_]


def owned_units(own: LayerShards, worker: int) -> Units:
    """Return whether a worker owns each unit of a layer."""
    found = np.zeros(UNITS, bool)
    for start, stop in own.owned_by(worker):
        found[start:stop] = True
    return found


def carried_out(moves: tuple[SliceMove, ...], before: Sharding) -> dict[tuple[int, int], Units]:
    """Return (worker, layer) -> the units that it has after the moves, whose sources had them before."""
    found: dict[tuple[int, int], Units] = defaultdict(lambda: np.zeros(UNITS, bool))
    for layer, own in enumerate(before.layers):
        for worker in own.holders:
            found[worker, layer] = owned_units(own, worker)
    for move in moves:
        assert owned_units(before.layers[move.layer], move.source)[move.start : move.stop].all()
        found[move.destination, move.layer][move.start : move.stop] = True
    return found


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 8))
def test_a_new_layout_shares_equally_and_across_hosts(count: int, redundancy: int, per_host: int) -> None:
    workers = set(range(count))
    (own,) = shard_optimizer(placement_of([workers]), on_hosts(count, per_host), redundancy).layers
    copies = min(redundancy, count)
    hosts = on_hosts(count, per_host)
    ring = np.array(sorted(workers, key=lambda worker: (hosts[worker], worker)))
    rows = owners_on_ring(ring, redundancy).tolist()
    assert {tuple(sorted(row)) for row in rows} == {each.owners for each in own.slices}
    assert {len(set(each.owners)) for each in own.slices} == {copies}
    assert all(abs(load - copies * UNITS / count) <= SLACK for load in loads(own).values())
    max_on_a_host = min(per_host, count)
    if max_on_a_host <= count // copies:  # otherwise it cannot be
        assert all(len({hosts[owner] for owner in each.owners}) == copies for each in own.slices)


@given(st.data())
def test_owners_keep_what_they_can_when_holders_change(data: st.DataObject) -> None:
    total, redundancy = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 3))
    some = st.sets(st.integers(0, total - 1), min_size=1)
    hosts = on_hosts(total, data.draw(st.integers(1, 4)))
    holders = data.draw(st.lists(some, min_size=1, max_size=3))
    sharding = shard_optimizer(placement_of(holders), hosts, redundancy)
    for _ in range(3):
        wanted = [data.draw(some) for _ in holders]
        after = shard_optimizer(placement_of(wanted), hosts, redundancy, sharding)
        for own, workers in zip(after.layers, wanted, strict=True):
            assert set(own.holders) == workers
            assert {len(set(each.owners)) for each in own.slices} == {min(redundancy, len(workers))}
        found = carried_out(after.moves_from(sharding), sharding)
        for layer, own in enumerate(after.layers):
            for worker in own.holders:
                assert not (owned_units(own, worker) & ~found[worker, layer]).any()
        sharding = after


def test_layers_that_are_alike_are_sliced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sliced: list[int] = []
    joined = sharding_module._joined

    def noting(slices: Iterator[Slice] | Sequence[Slice]) -> tuple[Slice, ...]:
        sliced.append(0)
        return joined(slices)

    monkeypatch.setattr(sharding_module, "_joined", noting)
    hosts, workers = on_hosts(8, 1), set(range(8))
    before = shard_optimizer(placement_of([workers] * 5), hosts, 2)
    left = before.left_to({worker: range(5) for worker in workers - {1}})
    after = shard_optimizer(placement_of([workers - {1}] * 5), hosts, 2, left)
    assert len(sliced) == 3
    assert len(set(map(id, after.layers))) == 1


@given(st.integers(3, 16), st.integers(2, 3))
def test_after_a_loss_only_the_lost_share_moves(count: int, redundancy: int) -> None:
    hosts, workers = on_hosts(count, 1), set(range(count))
    before = shard_optimizer(placement_of([workers]), hosts, redundancy)
    left = before.left_to({worker: [0] for worker in workers - {1}})
    assert left.lost_layers == ()
    assert left.copies == min(redundancy, count) - 1
    after = shard_optimizer(placement_of([workers - {1}]), hosts, redundancy, left)
    moved = sum(move.stop - move.start for move in after.moves_from(left))
    copies = min(redundancy, count - 1)
    lacking = sum(max(0, copies - len(each.owners)) * len(each) for each in left.layers[0].slices)
    assert moved <= lacking + count * SLACK
    assert max(loads(after.layers[0]).values()) <= copies * UNITS / (count - 1) * 1.4
    assert shard_optimizer(placement_of([workers - {1}]), hosts, redundancy, after) == after


def test_a_newcomer_takes_its_share_and_no_more_moves() -> None:
    before = shard_optimizer(placement_of([{0, 1, 2}]), on_hosts(4, 1), 2)
    after = shard_optimizer(placement_of([{0, 1, 2, 3}]), on_hosts(4, 1), 2, before)
    moves = after.moves_from(before)
    assert {move.destination for move in moves} == {3}
    assert sum(move.stop - move.start for move in moves) == pytest.approx(UNITS / 2, abs=SLACK)
    assert Counter(move.source for move in moves).keys() == {0, 1, 2}


def test_without_redundancy_a_loss_leaves_slices_without_owners() -> None:
    before = shard_optimizer(placement_of([{0, 1, 2}, {3}]), on_hosts(4, 1), 1)
    left = before.left_to({0: [0], 2: [0], 3: [1]})
    assert left.lost_layers == (0,)
    with refused(PlanError):
        left.moves_from(left)


def test_the_writers_of_a_layer_write_about_equally() -> None:
    (own,) = shard_optimizer(placement_of([set(range(8))]), on_hosts(8, 2), 2).layers
    assert sorted(Counter(own.writers()).values()) == [1] * 8
    assert all(writer in each.owners for writer, each in zip(own.writers(), own.slices, strict=True))


@given(count=st.integers(1, 12), redundancy=st.integers(1, 4), lost=st.sets(st.integers(0, 11)))
def test_each_holder_receives_what_it_does_not_own_once_and_owners_send_about_equally(
    count: int, redundancy: int, lost: set[int]
) -> None:
    placement = placement_of([set(range(count))])
    (own,) = shard_optimizer(placement, on_hosts(count, 2), redundancy).layers
    left = own.left_to(set(range(count)) - lost)
    for shards in (own, *([left] if all(each.owners for each in left.slices) else [])):
        sent: Counter[int] = Counter()
        for each, receivers in zip(shards.slices, shards.receivers(), strict=True):
            assert set(receivers) == set(each.owners)
            received = [holder for holders in receivers.values() for holder in holders]
            assert sorted(received) == [holder for holder in shards.holders if holder not in each.owners]
            sent.update({owner: len(each) * len(holders) for owner, holders in receivers.items()})
        if shards is own:
            assert max(sent.values()) - min(sent.values()) <= 2 * UNITS / count + SLACK


def test_updated_parameters_stay_on_a_host_that_has_an_owner_and_come_from_few_workers() -> None:
    hosts = on_hosts(8, 4)
    (own,) = shard_optimizer(placement_of([set(range(8))]), hosts, 2).layers
    pairs = {
        (owner, receiver) for receivers in own.receivers() for owner, others in receivers.items() for receiver in others
    }
    assert all(hosts[owner] == hosts[receiver] for owner, receiver in pairs)
    assert len(pairs) == 8 * 3


@pytest.mark.parametrize("slices", [(Slice(0, 5, (0,)),), (Slice(5, UNITS, (0,)),), (Slice(0, UNITS, (2,)),)])
def test_slices_cover_a_layer_and_belong_to_its_holders(slices: tuple[Slice, ...]) -> None:
    with refused(PlanError):
        LayerShards((0, 1), slices)
    with refused(PlanError):
        Slice(5, 5, ())


def test_the_share_of_a_holder() -> None:
    assert owned_share(800, 8, 2) == 200
    assert owned_share(800, 8, None) == owned_share(800, 2, 3) == 800
