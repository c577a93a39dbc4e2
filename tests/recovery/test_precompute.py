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
from chameleon_ft.recovery import Situation, decide, prepare_decisions
from chameleon_ft.recovery.equivalence import host_loss_classes, is_exchange, loss_classes
from chameleon_ft.schedule import CostModel
from tests.recovery.situations import after, layer, rate_of, situation, situations
from tests.recovery.test_decision import check_course


def keeps_all(exchange: dict[int, int], now: Situation) -> bool:
    """Whether nothing changes when each worker takes the place of another, told in the plainest way."""
    cluster, plan = now.costs.cluster, now.plan
    for a in now.live:
        one, other = cluster.worker(a), cluster.worker(exchange[a])
        if (one.speed, one.memory_bytes) != (other.speed, other.memory_bytes):
            return False
        if plan.placement.ranges_of(a) != plan.placement.ranges_of(exchange[a]):
            return False
        if now.ceiling.get(a) != now.ceiling.get(exchange[a]):
            return False
        if plan.recompute.get(a) != plan.recompute.get(exchange[a]):
            return False
        for b in now.live:
            together = cluster.worker(b).host == one.host
            if together != (cluster.worker(exchange[b]).host == other.host):
                return False
    routes = Counter(route.hops for route in plan.routes)
    return routes == Counter(
        tuple(Hop(exchange[hop.worker], hop.layers) for hop in route.hops) for route in plan.routes
    )


def orbits(now: Situation) -> set[frozenset[int]]:
    """The workers that can be exchanged, by trying every permutation."""
    found = {worker: {worker} for worker in now.plan.workers}
    for image in permutations(now.live):
        exchange = dict(zip(now.live, image, strict=True))
        if keeps_all(exchange, now):
            for worker in now.plan.workers:
                found[worker].add(exchange[worker])
    return {frozenset(each) for each in found.values()}


def unlike(now: Situation, speeds: dict[int, float]) -> Situation:
    cluster = now.costs.cluster
    workers = tuple(replace(worker, speed=speeds.get(worker.id, worker.speed)) for worker in cluster.workers)
    return replace(now, costs=CostModel(now.costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host)))


@settings(max_examples=25, deadline=None)
@given(now=situations(intact=True))
def test_classes_are_those_that_trying_every_permutation_finds(now: Situation) -> None:
    assume(len(now.live) <= 6)
    classes = loss_classes(now)
    assert {frozenset(each.exchanges) for each in classes} == orbits(now)
    for each in classes:
        assert each.representative == min(each.exchanges)
        for worker, exchange in each.exchanges.items():
            assert exchange[each.representative] == worker
            assert keeps_all(dict(exchange), now)


@pytest.mark.parametrize(
    ("now", "classes"),
    [
        # By stage alone; whole hosts change places.
        (situation(dp=4, pp=2, hosts=4), {(0, 2, 4, 6), (1, 3, 5, 7)}),
        (situation(dp=4, pp=2, hosts=2), {(0, 2, 4, 6), (1, 3, 5, 7)}),
        # Pipelines lie across three hosts, the middle one with the end of one and the beginning of the next.
        (situation(dp=2, pp=3, hosts=3), {(0,), (1,), (2,), (3,), (4,), (5,)}),
        (unlike(situation(dp=3, pp=2), {4: 0.5}), {(0, 2), (1, 3), (4,), (5,)}),
        (situation(dp=2, pp=2, spares=2), {(0, 2), (1, 3)}),
        (situation(dp=8, pp=4, share=2, hosts=4), {tuple(range(stage, 32, 4)) for stage in range(4)}),
    ],
)
def test_classes_of_common_layouts(now: Situation, classes: set[tuple[int, ...]]) -> None:
    assert {tuple(sorted(each.exchanges)) for each in loss_classes(now)} == classes


@settings(max_examples=25, deadline=None)
@given(now=situations(intact=True))
def test_hosts_of_a_class_come_to_the_same(now: Situation) -> None:
    workers: dict[str, set[int]] = {}
    for worker, host in now.costs.cluster.hosts.items():
        workers.setdefault(host, set()).add(worker)
    found = host_loss_classes(now, loss_classes(now))
    hosts = [lost for each in found for lost in each.exchanges]
    assert len(set(hosts)) == len(hosts)
    needed = {
        frozenset(own)
        for own in workers.values()
        if len(own) > 1 and own & set(now.plan.workers) and not now.placement.without(own).unheld_layers
    }
    assert set(hosts) == needed
    for each in found:
        for lost, exchange in each.exchanges.items():
            assert keeps_all(dict(exchange), now)
            assert {exchange[worker] for worker in each.lost} == lost


def test_unequal_shares_tell_pipelines_apart() -> None:
    now = situation(dp=3, pp=1, share=2)
    routes = (*now.plan.routes[:5], replace(now.plan.routes[0], micro_batch=5))
    uneven = replace(now, plan=replace(now.plan, routes=routes))
    assert {tuple(each.exchanges) for each in loss_classes(uneven)} == {(0,), (1,), (2,)}


def test_what_is_no_exchange_is_found_out() -> None:
    now = situation(dp=2, pp=2)
    assert is_exchange({0: 2, 1: 3, 2: 0, 3: 1}, now)
    assert not is_exchange({0: 2, 1: 1, 2: 0, 3: 3}, now), "pipelines are torn apart"
    assert not is_exchange({0: 1, 1: 0, 2: 3, 3: 2}, now), "layers differ"
    assert not is_exchange({0: 2, 1: 3, 2: 0, 3: 3}, now), "two go to the same place"
    assert not is_exchange({0: 2, 2: 0}, now), "some are left out"
    apart = situation(dp=4, pp=1, hosts=2)
    assert not is_exchange({0: 2, 2: 0, 1: 1, 3: 3}, apart), "who shares a host changes"


@settings(max_examples=10, deadline=None)
@given(now=situations(intact=True))
def test_a_decision_with_workers_exchanged_is_as_good(now: Situation) -> None:
    rate = rate_of(1e4, now)
    prepared = prepare_decisions(now, "chameleon", rate)
    assert set(prepared.decisions) == set(now.plan.workers)
    for each in prepared.classes:
        first = prepared.look_up([each.representative])
        assert first is not None
        assert first == decide(after(now, each.representative), "chameleon", rate.observed(failures=1))
        for worker in each.exchanges:
            decision = prepared.look_up([worker])
            assert decision is not None
            assert decision.candidates == first.candidates
            assert decision.chosen == first.chosen
            if decision.chosen is not None:
                check_course(decision, after(now, worker))


def test_only_single_losses_are_prepared() -> None:
    now = situation(dp=2, pp=2, spares=1, layers=(layer(10),) * 4)
    prepared = prepare_decisions(now, "reroute", rate_of(1e4, now))
    assert prepared.look_up([0]) is not None
    assert prepared.look_up({0, 2}) is None
    assert prepared.look_up([]) is None
    assert prepared.look_up([4]) is None, "nothing is lost with a spare"
    with pytest.raises(PlanError, match="lost already"):
        prepare_decisions(after(now, 0), "reroute", rate_of(1e4, now))


def test_nobody_is_left_to_decide_for_after_the_last_one() -> None:
    now = situation(dp=1, pp=1)
    assert prepare_decisions(now, "reroute", rate_of(1e4, now)).look_up([0]) is None
