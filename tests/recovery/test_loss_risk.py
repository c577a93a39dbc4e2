"""The probability of losing all holders of a layer, against all draws of the lost."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.recovery import HolderSets, LossRisk, risk_of
from tests.golden import refused


@st.composite
def holders(draw: st.DrawFn) -> tuple[int, list[frozenset[int]]]:
    """So many groups, and those that hold each layer."""
    groups = draw(st.integers(1, 8))
    sets = st.frozensets(st.integers(0, groups - 1), min_size=1)
    return groups, draw(st.lists(sets, min_size=1, max_size=6))


def exact(groups: int, layers: list[frozenset[int]], lost: int) -> float:
    """The share of all draws of so many groups that include all holders of some layer."""
    hit = sum(any(layer <= set(drawn) for layer in layers) for drawn in combinations(range(groups), lost))
    return hit / comb(groups, lost)


@settings(deadline=None)
@given(case=holders(), data=st.data())
def test_it_is_an_upper_bound_and_exact_for_single_holders(
    case: tuple[int, list[frozenset[int]]], data: st.DataObject
) -> None:
    groups, layers = case
    lost = data.draw(st.integers(0, groups))
    sets = HolderSets.of(layers, groups)
    found, expected = sets.hits(lost)[lost], exact(groups, layers, lost)
    assert expected - 1e-12 <= found <= 1
    if lost <= 1 or set(sets.counts) == {1}:
        assert found == pytest.approx(expected)
    alone = [layer for layer in layers if len(layer) == 1]
    assert sets.singles == len(set(alone))


@pytest.mark.parametrize(("copies", "stages", "lost"), [(2, 4, 2), (2, 4, 3), (3, 3, 4), (3, 3, 5), (4, 2, 5)])
def test_it_is_exact_where_sets_do_not_overlap_and_only_one_can_be_lost(copies: int, stages: int, lost: int) -> None:
    layers = [frozenset(range(stage * copies, (stage + 1) * copies)) for stage in range(stages)]
    assert lost < 2 * copies
    found = HolderSets.of(layers, copies * stages).hits(lost)[lost]
    assert found == pytest.approx(exact(copies * stages, layers, lost))


def test_a_set_that_contains_another_one_does_not_count() -> None:
    sets = HolderSets.of([{1, 2}, {1, 2, 3}, {2, 1}, {4, 5}], 6)
    assert sets == HolderSets(6, {2: 2})


@given(st.lists(st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=1), min_size=1, max_size=3))
def test_sets_in_arrays_count_as_others(layers: list[list[list[int]]]) -> None:
    rows = [np.array(layer) for layer in layers]
    assert HolderSets.of_rows(rows, 8) == HolderSets.of((row for layer in layers for row in layer), 8)


@given(copies=st.integers(1, 6), stages=st.integers(1, 5))
def test_the_peers_of_a_worker_share_its_load(copies: int, stages: int) -> None:
    risk = HolderSets(copies * stages, {copies: stages})
    assert risk.share_per_peer == pytest.approx(0.0 if copies == 1 else 1 / (copies - 1))
    mixed = HolderSets(
        copies * stages + 2 + 1, {copies: stages, 2: 1 + stages * (copies == 2), 1: 1 + (copies == 1) * stages}
    )
    shared = [1 / (copies - 1)] * copies * stages if copies > 1 else []
    assert mixed.share_per_peer == pytest.approx(sum([1.0, 1.0, *shared]) / (2 + len(shared)))


def test_workers_and_hosts_of_a_placement() -> None:
    first, second = LayerRange(0, 1), LayerRange(1, 2)
    placement = Placement(2, {0: (first,), 1: (second,), 2: (first,), 3: (second,)})
    on_two = {0: "a", 1: "a", 2: "b", 3: "b", 4: "b"}
    pairs = HolderSets(5, {2: 2})
    assert risk_of(placement, on_two) == LossRisk(workers=pairs, hosts=HolderSets(2, {2: 1}), share_per_peer=1.0)
    by_stage = {0: "a", 2: "a", 1: "b", 3: "b", 4: "c"}
    assert risk_of(placement, by_stage) == LossRisk(workers=pairs, hosts=HolderSets(3, {1: 2}), share_per_peer=1.0)
    assert risk_of(placement, dict.fromkeys(range(4), "a")).hosts is None


def test_owners_of_a_slice_are_lost_with_part_of_the_holders_of_a_layer() -> None:
    placement = Placement(1, dict.fromkeys(range(4), (LayerRange(0, 1),)))
    on_two = {0: "a", 1: "a", 2: "b", 3: "b"}
    whole, shared, alone = (risk_of(placement, on_two, owners) for owners in (None, 2, 1))
    assert whole == LossRisk(workers=HolderSets(4, {4: 1}), hosts=HolderSets(2, {2: 1}), share_per_peer=1 / 3)
    assert shared == LossRisk(workers=HolderSets(4, {2: 2}), hosts=HolderSets(2, {2: 1}), share_per_peer=1 / 3)
    assert alone == LossRisk(workers=HolderSets(4, {1: 4}), hosts=HolderSets(2, {1: 2}), share_per_peer=1 / 3)
    assert risk_of(placement, on_two, 4) == whole


@pytest.mark.parametrize("counts", [{0: 1}, {4: 1}, {1: 0}])
def test_sets_have_some_of_the_groups(counts: dict[int, int]) -> None:
    with refused(PlanError):
        HolderSets(3, counts)
