"""The proposals of each policy, against its description."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Link
from chameleon_ft.config import PolicyName
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange, Placement, RecomputedLayers, Route
from chameleon_ft.recovery import POLICIES, DecisionContext, Proposal, decide, largest_symmetric_layout
from chameleon_ft.recovery import proposals as on_workers
from chameleon_ft.recovery.policies import Kind
from chameleon_ft.schedule import best_program, replay
from chameleon_ft.search import find_plan, reroute
from chameleon_ft.simulate.planners.class_planner import ProposalsByClass
from tests.examples import examples
from tests.golden import refused
from tests.recovery.contexts import after, context, contexts, layer, rate_of
from tests.recovery.proposed import moved_bytes, plan_of, shares_of


def test_the_configuration_knows_all_of_them() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_of_plan_is_proposed_in_runs_and_in_simulations(kind: str) -> None:
    assert callable(getattr(on_workers.ProposalsOnWorkers, kind))
    assert callable(getattr(ProposalsByClass, kind))
    assert any(kind in policy.kinds for policy in POLICIES.values())


@settings(max_examples=examples(60), deadline=None)
@given(now=contexts(), policy=st.sampled_from(sorted(POLICIES)), horizon_s=st.sampled_from([1.0, 1e5]))
def test_every_proposal_is_a_plan_of_live_workers_or_a_reason(
    now: DecisionContext, policy: str, horizon_s: float
) -> None:
    for each in POLICIES[policy](now, horizon_s):
        assert (each.plan is None) == bool(each.reason)
        if each.plan is not None:
            assert set(each.plan.workers) <= set(now.live)
            assert each.plan.micro_batches == now.plan.micro_batches
            assert not each.plan.placement.unheld_layers


def test_a_proposal_is_a_plan_or_a_reason() -> None:
    with refused(PlanError):
        Proposal(name="empty")


@settings(max_examples=examples(30), deadline=None)
@given(now=contexts())
def test_to_reroute_is_what_the_search_does_and_moves_nothing(now: DecisionContext) -> None:
    assume(not now.placement.unheld_layers)
    for policy in ("reroute", "recycle"):
        plan = POLICIES[policy](now, 1e6)[0].plan
        assert plan is not None
        assert plan == reroute(now.plan, now.lost, now.costs, in_flight_limits=now.in_flight_limits)
        assert moved_bytes(now, plan) == 0


@settings(max_examples=examples(30), deadline=None)
@given(now=contexts())
def test_to_re_partition_is_what_the_search_finds_and_no_other_roles_move_less(now: DecisionContext) -> None:
    assume(len(now.live) <= 6 and not now.placement.unheld_layers)
    proposals = POLICIES["repartition"](now, 1e6)
    assume(proposals[0].plan is not None)
    found = find_plan(now.costs, current=now.placement, effort=now.effort)
    hosts = {worker.id: worker.host for worker in now.costs.cluster.workers}
    least, min_at_home = math.inf, math.inf
    places = found.best.plan.placement.ranges
    for workers in permutations(now.live, len(places)):
        taken = dict(zip(places, workers, strict=True))
        held = {taken[place]: ranges for place, ranges in places.items()}
        layers = now.costs.workload.layers
        total = sum(
            state_bytes(layers[number])
            for worker, ranges in held.items()
            for own in ranges
            for number in own
            if worker not in now.placement.holders(number)
        )
        least = min(least, total)
        if all(hosts[place] == hosts[worker] for place, worker in taken.items()):
            min_at_home = min(min_at_home, total)
    first = proposals[0]
    assert first.plan is not None
    # Among plans that are equally fast, another one may move less than the roles of this one.
    assert moved_bytes(now, first.plan) <= min_at_home
    if least < min_at_home:
        assert proposals[1].plan is not None
        assert moved_bytes(now, proposals[1].plan) <= least
    for each in decide(now, "repartition", rate_of(1e6, now)).candidates:
        if each.policy == "repartition" and each.step_s is not None and each.feasible:
            # On their own hosts, workers take each other's places at no cost; only its program may be better.
            assert each.step_s <= found.best.step_s * (1 + 1e-9)


def test_with_too_few_workers_it_says_so() -> None:
    now = context(dp=2, pp=4, layers=(layer(100),) * 8, memory_bytes=900, effort=100)
    assert POLICIES["repartition"](after(now, 1), 1e6)[0].plan is not None
    (none,) = POLICIES["repartition"](after(now, 1, 2, 3, 4, 5, 6), 1e6)
    assert "does not fit the memory of 2 workers" in str(none.reason)


def test_chameleon_proposes_each_plan_once() -> None:
    now = context(dp=2, pp=2)
    names = [each.name for each in POLICIES["chameleon"](now, 1e6)]
    assert names[0] == "reroute"
    assert "repair" not in names, "nothing is to be repaired, so it would be the same plan"
    assert [each.name for each in POLICIES["chameleon"](after(now, 0), 1e6)][:2] == ["reroute", "repair"]


def test_what_the_search_has_repaired_is_not_repaired_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = after(context(dp=3, pp=2, share=4, split_backward=True), 2)
    (alone,) = POLICIES["repair"](now, 1e6)

    def again(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(on_workers, "recut_plan", again)
    (repaired,) = [each for each in POLICIES["chameleon"](now, 1e6) if each.name == "repair"]
    assert repaired.plan == alone.plan
    with pytest.raises(AssertionError):
        POLICIES["repair"](now, 1e6)


def test_a_worker_that_holds_more_than_its_part_is_repaired_by_its_part() -> None:
    """The search knows of what it holds, so its repair is another plan."""
    before = after(context(dp=2, pp=2, share=4, split_backward=True), 1)
    held = Placement(4, {**before.placement.ranges, 0: (LayerRange(0, 4),)})
    now = replace(before, holdings=held)
    repaired = [each.plan for each in POLICIES["chameleon"](now, 1e6) if each.name == "repair"]
    assert repaired == [plan_of(before, "repair")]


def test_only_a_broken_pipeline_is_repaired() -> None:
    before = context(dp=3, pp=3, share=6, layers=(layer(10),) * 6)
    now = after(before, 4)
    plan = plan_of(now, "repair")
    assert sorted(len(workers) for workers in shares_of(plan)) == [2, 3, 3]
    for worker in (0, 1, 2, 6, 7, 8):
        assert plan.placement.ranges_of(worker) == before.plan.placement.ranges_of(worker)
    assert plan.placement.ranges_of(3) == (LayerRange(0, 3),)
    assert plan.placement.ranges_of(5) == (LayerRange(3, 6),)
    assert shares_of(plan)[3, 5] < 6 < max(shares_of(plan).values())


@settings(max_examples=examples(25), deadline=None)
@given(
    dp=st.integers(2, 3),
    pp=st.integers(1, 3),
    share=st.integers(1, 3),
    times_s=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    lost=st.integers(0, 1),
    latency_s=st.sampled_from([0.0, 0.5]),
)
def test_no_other_shares_of_repaired_pipelines_end_earlier(
    dp: int, pp: int, share: int, times_s: list[float], lost: int, latency_s: float
) -> None:
    layers = tuple(layer(10, time_s) for time_s in times_s)
    now = after(context(dp=dp, pp=pp, share=share, layers=layers, link=Link(latency_s, 100.0)), lost)
    plan = plan_of(now, "repair")
    shares = {route.hops: 0 for route in plan.routes}
    for route in plan.routes:
        shares[route.hops] += 1

    def end_s(split: tuple[int, ...]) -> float:
        ways = [hops for hops, count in zip(shares, split, strict=True) for _ in range(count)]
        other = replace(plan, routes=tuple(map(Route, range(len(ways)), ways)))
        return replay(best_program(other, now.costs).program, now.costs).step_s

    everything = product(range(plan.micro_batches + 1), repeat=len(shares))
    min_s = min(end_s(split) for split in everything if sum(split) == plan.micro_batches)
    assert end_s(tuple(shares.values())) == pytest.approx(min_s, rel=1e-9)


def test_a_worker_that_has_come_back_fills_the_gap() -> None:
    repaired = plan_of(after(context(dp=2, pp=3), 1), "repair")
    now = replace(context(dp=2, pp=3), plan=repaired)
    again = plan_of(now, "repair")
    assert sorted(len(workers) for workers in shares_of(again)) == [3, 3]
    assert set(again.workers) == set(range(6))
    spare = after(context(dp=2, pp=2, spares=1), 0)
    plan = plan_of(spare, "repair")
    assert set(shares_of(plan)) == {(4, 1), (2, 3)}
    assert plan.placement.ranges_of(4) == spare.plan.placement.ranges_of(0)


def test_what_is_left_of_two_pipelines_makes_one_again() -> None:
    before = context(dp=2, pp=2)
    rerouted = replace(before, plan=plan_of(after(before, 0), "reroute"))
    assert list(shares_of(plan_of(after(rerouted, 0, 3), "repair"))) == [(2, 1)]
    broken = after(context(dp=2, pp=1, spares=0), 0)
    assert list(shares_of(plan_of(broken, "repair"))) == [(1,)]


def test_a_replica_is_dropped_as_a_whole() -> None:
    before = context(dp=3, pp=2, share=4)
    plan = plan_of(after(before, 2), "drop-replica")
    assert shares_of(plan) == {(0, 1): 6, (4, 5): 6}
    assert plan.workers == (0, 1, 4, 5)
    # The survivor of one and that of another make a pipeline.
    both = after(before, 2, 5)
    plan = plan_of(both, "drop-replica")
    assert shares_of(plan) == {(0, 1): 6, (3, 4): 6}
    # All workers are live again, but hold nothing.
    back = replace(before, plan=plan_of(after(before, 2), "drop-replica"))
    assert shares_of(plan_of(back, "drop-replica")) == {(0, 1): 4, (4, 5): 4, (2, 3): 4}
    (none,) = POLICIES["drop-replica"](after(before, 0, 2, 4), 1e6)
    assert none.reason == "every pipeline has lost a worker"
    assert plan_of(before, "drop-replica") == before.plan


def test_a_pipeline_of_idle_workers_recomputes_as_the_one_that_it_is_like() -> None:
    before = context(dp=3, pp=2, share=4)
    recompute = {0: RecomputedLayers(0, 2), 1: RecomputedLayers(3, 4), 4: RecomputedLayers(0, 1)}
    plan = plan_of(after(replace(before, plan=replace(before.plan, recompute=recompute)), 2, 5), "drop-replica")

    assert shares_of(plan) == {(0, 1): 6, (3, 4): 6}
    assert plan.recompute == {0: recompute[0], 1: recompute[1], 3: recompute[0], 4: recompute[1]}


def test_all_that_are_left_restart_in_the_largest_equal_layout() -> None:
    now = after(context(dp=3, pp=2), 0, 2, 4)
    (only,) = POLICIES["restart"](now, 1e6)
    assert only.from_checkpoint
    assert only.plan == largest_symmetric_layout(
        live=(1, 3, 5), layer_costs=[3.0] * 4, micro_batches=12, preferred_pp=2
    )
    (candidate,) = decide(now, "restart", rate_of(1e6, now)).candidates
    assert candidate.stall_s == 100.0
    assert candidate.transfer_s == 0


def test_dropped_pipelines_leave_shares_in_proportion() -> None:
    now = context(dp=3, pp=2)
    shares = shares_of(plan_of(after(now, 0), "drop-replica"))
    assert sorted(shares.values()) == [6, 6]
