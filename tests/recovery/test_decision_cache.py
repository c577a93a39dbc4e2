"""Prepared decisions: which losses come to the same, and that a decision with workers exchanged is as good."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import assume, given, settings

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop
from chameleon_ft.recovery import DecisionContext, LossClass, decide, decide_for_class, remap_decision
from chameleon_ft.recovery.symmetry import _Structure, host_loss_classes, loss_classes
from chameleon_ft.schedule import CostModel
from tests.examples import examples
from tests.golden import refused
from tests.recovery.contexts import after, context, contexts, layer, rate_of
from tests.recovery.courses import check_course


def keeps_all(symmetry: dict[int, int], now: DecisionContext) -> bool:
    """Return whether a permutation of the workers changes nothing, by comparing all pairs."""
    cluster, plan = now.costs.cluster, now.plan
    for a in now.live:
        one, other = cluster.worker(a), cluster.worker(symmetry[a])
        if (one.speed, one.memory_bytes) != (other.speed, other.memory_bytes):
            return False
        if plan.placement.ranges_of(a) != plan.placement.ranges_of(symmetry[a]):
            return False
        if now.in_flight_limits.get(a) != now.in_flight_limits.get(symmetry[a]):
            return False
        if plan.recompute.get(a) != plan.recompute.get(symmetry[a]):
            return False
        for b in now.live:
            together = cluster.worker(b).host == one.host
            if together != (cluster.worker(symmetry[b]).host == other.host):
                return False
    routes = Counter(route.hops for route in plan.routes)
    return routes == Counter(
        tuple(Hop(symmetry[hop.worker], hop.layers) for hop in route.hops) for route in plan.routes
    )


def orbits(now: DecisionContext) -> set[frozenset[int]]:
    """The workers that can be exchanged, by trying every permutation."""
    found = {worker: {worker} for worker in now.plan.workers}
    for image in permutations(now.live):
        symmetry = dict(zip(now.live, image, strict=True))
        if keeps_all(symmetry, now):
            for worker in now.plan.workers:
                found[worker].add(symmetry[worker])
    return {frozenset(each) for each in found.values()}


def members(losses: LossClass) -> tuple[int, ...]:
    """The workers of a class of single losses, ascending."""
    return tuple(sorted(worker for (worker,) in losses.symmetries))


def unlike(now: DecisionContext, speeds: dict[int, float]) -> DecisionContext:
    cluster = now.costs.cluster
    workers = tuple(replace(worker, speed=speeds.get(worker.id, worker.speed)) for worker in cluster.workers)
    return replace(now, costs=CostModel(now.costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host)))


@settings(max_examples=examples(25), deadline=None)
@given(now=contexts(intact=True))
def test_classes_are_those_that_trying_every_permutation_finds(now: DecisionContext) -> None:
    assume(len(now.live) <= 6)
    classes = loss_classes(now)
    assert {frozenset(members(each)) for each in classes} == orbits(now)
    for each in classes:
        assert each.lost == (min(members(each)),)
        for (worker,), symmetry in each.symmetries.items():
            assert symmetry[each.lost[0]] == worker
            assert keeps_all(dict(symmetry), now)


@pytest.mark.parametrize(
    ("now", "classes"),
    [
        # By stage alone; whole hosts change places.
        (context(dp=4, pp=2, hosts=4), {(0, 2, 4, 6), (1, 3, 5, 7)}),
        (context(dp=4, pp=2, hosts=2), {(0, 2, 4, 6), (1, 3, 5, 7)}),
        # Pipelines lie across three hosts, the middle one with the end of one and the beginning of the next.
        (context(dp=2, pp=3, hosts=3), {(0,), (1,), (2,), (3,), (4,), (5,)}),
        (unlike(context(dp=3, pp=2), {4: 0.5}), {(0, 2), (1, 3), (4,), (5,)}),
        (context(dp=2, pp=2, spares=2), {(0, 2), (1, 3)}),
        (context(dp=8, pp=4, share=2, hosts=4), {tuple(range(stage, 32, 4)) for stage in range(4)}),
    ],
)
def test_classes_of_common_layouts(now: DecisionContext, classes: set[tuple[int, ...]]) -> None:
    assert {members(each) for each in loss_classes(now)} == classes


@settings(max_examples=examples(25), deadline=None)
@given(now=contexts(intact=True))
def test_hosts_of_a_class_come_to_the_same(now: DecisionContext) -> None:
    workers: dict[str, set[int]] = {}
    for worker, host in now.costs.cluster.hosts.items():
        workers.setdefault(host, set()).add(worker)
    found = host_loss_classes(now, loss_classes(now))
    hosts = [lost for each in found for lost in each.symmetries]
    assert len(set(hosts)) == len(hosts)
    needed = {
        frozenset(own)
        for own in workers.values()
        if len(own) > 1 and own & set(now.plan.workers) and not now.placement.without(own).unheld_layers
    }
    assert set(hosts) == needed
    for each in found:
        for lost, symmetry in each.symmetries.items():
            assert keeps_all(dict(symmetry), now)
            assert {symmetry[worker] for worker in each.lost} == lost


def test_unequal_shares_tell_pipelines_apart() -> None:
    now = context(dp=3, pp=1, share=2)
    routes = (*now.plan.routes[:5], replace(now.plan.routes[0], micro_batch=5))
    uneven = replace(now, plan=replace(now.plan, routes=routes))
    assert {members(each) for each in loss_classes(uneven)} == {(0,), (1,), (2,)}


def test_what_is_no_exchange_is_found_out() -> None:
    now = context(dp=2, pp=2)
    assert _Structure(now).is_preserved_by({0: 2, 1: 3, 2: 0, 3: 1})
    assert not _Structure(now).is_preserved_by({0: 2, 1: 1, 2: 0, 3: 3}), "pipelines are torn apart"
    assert not _Structure(now).is_preserved_by({0: 1, 1: 0, 2: 3, 3: 2}), "layers differ"
    assert not _Structure(now).is_preserved_by({0: 2, 1: 3, 2: 0, 3: 3}), "two go to the same place"
    assert not _Structure(now).is_preserved_by({0: 2, 2: 0}), "some are left out"
    apart = context(dp=4, pp=1, hosts=2)
    assert not _Structure(apart).is_preserved_by({0: 2, 2: 0, 1: 1, 3: 3}), "the workers that share a host change"


@settings(max_examples=examples(10), deadline=None)
@given(now=contexts(intact=True))
def test_a_decision_with_workers_exchanged_is_as_good(now: DecisionContext) -> None:
    rate = rate_of(1e4, now)
    prepared: set[int] = set()
    for each in loss_classes(now):
        first = decide_for_class(each, now, "chameleon", rate)
        assert first is not None
        assert first == decide(after(now, *each.lost), "chameleon", rate.observed(failures=1))
        for (worker,), symmetry in each.symmetries.items():
            prepared.add(worker)
            decision = remap_decision(first, symmetry)
            assert decision.candidates == first.candidates
            assert decision.chosen == first.chosen
            if decision.chosen is not None:
                check_course(decision, after(now, worker))
    assert prepared == set(now.plan.workers)


@settings(max_examples=examples(10), deadline=None)
@given(now=contexts(intact=True))
def test_the_loss_of_a_host_is_decided_as_one_failure_of_a_host(now: DecisionContext) -> None:
    rate = rate_of(1e4, now)
    for each in host_loss_classes(now, loss_classes(now)):
        first = decide_for_class(each, now, "reroute", rate)
        assert first == decide(after(now, *each.lost), "reroute", rate.observed(failures=1, host_failures=1))
        assert first is not None
        for lost, symmetry in each.symmetries.items():
            decision = remap_decision(first, symmetry)
            if decision.chosen is not None:
                check_course(decision, after(now, *lost))


def test_only_losses_of_the_plan_are_prepared() -> None:
    now = context(dp=2, pp=2, spares=1, layers=(layer(10),) * 4)
    prepared = {lost for each in loss_classes(now) for lost in each.symmetries}
    assert prepared == {frozenset([worker]) for worker in range(4)}, "nothing is lost with a spare"
    with refused(PlanError):
        loss_classes(after(now, 0))


def test_there_is_no_decision_after_the_loss_of_the_last_worker() -> None:
    now = context(dp=1, pp=1)
    (only,) = loss_classes(now)
    assert decide_for_class(only, now, "reroute", rate_of(1e4, now)) is None
