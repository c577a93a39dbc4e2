"""Policies that salvage: what a loss costs, the review that follows, and migrations behind training."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import estimate_parts, estimate_step, lost_share_s
from chameleon_ft.plan import LayerRange, Placement, data_pipeline_plan
from chameleon_ft.recovery import reroute
from chameleon_ft.recovery.salvage import complete_step
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.schedule import replay as timeline_of
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.simulate.account import Account, Change
from chameleon_ft.simulate.results import PolicyResult
from chameleon_ft.simulate.run import simulate
from chameleon_ft.simulate.traces.trace import Fault, Trace
from tests.progress import progress_at
from tests.simulate.clusters import cluster, costs, workload
from tests.simulate.test_as_in_run import ASSUMED, FAST_S, PREPARED_S, SLOW_S, WINDOW_S, replayed, samples


def test_peers_share_the_work_of_lost_workers_by_hand() -> None:
    # A micro-batch takes 30 ms for a layer, and there are 24.
    model = costs(6)
    low, high = LayerRange(0, 2), LayerRange(2, 6)
    placement = Placement(6, {0: (low,), 1: (high,), 2: (low,), 3: (high,), 4: (low,), 5: (high,)})
    # One of three holders of two layers: of 8 micro-batches, 4 for each peer, and half of one more.
    assert lost_share_s(placement, [0], model) == pytest.approx(2 * 0.03 * 4.5)
    assert lost_share_s(placement, [1], model) == pytest.approx(4 * 0.03 * 4.5)
    assert lost_share_s(placement, [0, 1], model) == pytest.approx(4 * 0.03 * 4.5)
    # Two of three: 16 micro-batches for the third.
    assert lost_share_s(placement, [2, 4], model) == pytest.approx(2 * 0.03 * 16.5)
    assert lost_share_s(placement, [0, 2, 4], model) == math.inf
    assert lost_share_s(placement, [], model) == lost_share_s(placement, [9], model) == 0.0


@pytest.mark.parametrize(
    ("dp", "pp", "micro_batches", "split"), [(8, 4, 128, True), (8, 4, 64, False), (4, 2, 32, True)]
)
def test_a_loss_costs_as_much_of_a_step_as_by_the_rest_at_each_moment(
    dp: int, pp: int, micro_batches: int, split: bool
) -> None:
    rates = device("h100-80g")
    work = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=micro_batches)
    model = CostModel(work, rates.cluster(dp * pp, workers_per_host=8))
    layer_s = work.layer_times_s
    plan = data_pipeline_plan(layer_costs=layer_s, dp=dp, pp=pp, micro_batches=micro_batches, split_backward=split)
    program = best_program(plan, model).program
    timeline, step_s = timeline_of(program, model), estimate_step(plan, program, model).step_s
    exact, assumed = [], []
    for lost in range(pp):
        left = CostModel(work, model.cluster.without([lost]))
        rerouted = reroute(plan, [lost], left, searches=False)
        later_s = estimate_parts(rerouted, best_parts(rerouted, left), left).step_s
        for moment in range(10):
            at_s = (moment + 0.5) / 10 * step_s
            rest = complete_step(plan, progress_at(plan, timeline, at_s, lost=[lost]), left, {})
            assert rest is not None
            exact.append((at_s + rest.rest_s) / step_s - 1)
            account = Account()
            for seconds in (step_s, later_s):
                change = Change(
                    cause="lost", stall_s=0.0, step_s=seconds, checkpoint_every_s=1e9, write_s=0.0, saved=False
                )
                account.change(change, finish_step=False)
                if seconds == step_s:
                    account.advance(at_s)
                    account.salvage(step_s=later_s, share_s=lost_share_s(plan.placement, [lost], model))
            account.advance(10 * step_s)
            assumed.append((account.clock_s - account.part_s - (account.steps - 1) * later_s) / step_s - 1)
    assert fmean(assumed) == pytest.approx(fmean(exact), abs=0.05)
    if dp == 8:
        # Seven peers, so a seventh at least of a worker that is never idle.
        assert 0.08 < fmean(assumed) < 0.25


@pytest.mark.parametrize("policy", ["reroute", "chameleon"])
def test_a_loss_by_hand(policy: str) -> None:
    # One worker is left, so that nothing is better than rerouting. It does the other half of the work.
    result = replayed(policy, Fault((1,), 100.0))
    part_s, repeat_s = 100.0 % FAST_S, 12.5 * 0.18 - (SLOW_S - FAST_S)
    assert result.stall_by_cause == pytest.approx({"lost": PREPARED_S})
    assert result.lost_by_cause == pytest.approx({"step": repeat_s})
    first_s = SLOW_S - (part_s - repeat_s)
    steps = 100.0 // FAST_S + 1 + (100.0 - PREPARED_S - first_s) / SLOW_S
    assert result.goodput == pytest.approx(samples(steps))
    (lost,) = result.decisions
    assert (lost.cause, lost.chosen) == ("lost", "reroute")
    assert lost.stall_s == pytest.approx(PREPARED_S + repeat_s)


def test_a_loss_without_salvage_loses_the_step() -> None:
    result = replayed("reroute", Fault((1,), 100.0), parameters=replace(ASSUMED, salvage=False))
    assert result.lost_by_cause == pytest.approx({"step": 100.0 % FAST_S})
    assert result.goodput == pytest.approx(samples(100.0 // FAST_S + (100.0 - PREPARED_S) / SLOW_S))


def test_a_second_loss_in_the_stall_keeps_the_step() -> None:
    result = replayed("reroute", Fault((1,), 100.0), Fault((2,), 100.7), pipelines=3)
    assert result.stall_s == pytest.approx(0.7 + PREPARED_S)
    before_s = 8 * 0.18 + 4 * (1e-5 + 4 * 10**8 / 50e9)
    # Of 8 micro-batches, 4.5 for each of two peers, and of 12 more, 12.5 for the last one; steps are longer then too.
    two_s = 12 * 0.18 + 2 * (1e-5 + 6 * 10**8 / 50e9)
    assert result.lost_s == pytest.approx(4.5 * 0.18 - (two_s - before_s) + 12.5 * 0.18 - (SLOW_S - two_s))
    after_s = 100.0 - 0.7 - PREPARED_S
    steps = 100.0 // before_s + (100.0 % before_s - result.lost_s + after_s) / SLOW_S
    assert result.goodput == pytest.approx(samples(steps))


def test_workers_that_are_back_wait_for_a_switch_that_is_under_way() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=3, pp=1, micro_batches=24)
    trace = Trace.from_faults([Fault((1,), 100.0, 106.1)], workers=3, duration_s=WINDOW_S)
    back_s = {}
    for owners in (None, 2):
        own = replace(workload(), owners=owners)
        parameters = replace(ASSUMED, search_s=5.0, weigh_s=0.5)
        results = simulate(trace, own, cluster(3), ["chameleon"], parameters=parameters, start=plan, as_in_run=True)
        lost, back = results.policies["chameleon"].decisions
        assert (lost.cause, back.cause) == ("lost", "back")
        back_s[owners] = back.time_s
    # The review has come at 106 s, and a step of two workers takes 2.2 s.
    assert back_s[None] == pytest.approx(106.6)
    assert 106.6 < back_s[2] <= 106.0 + FAST_S + 0.5


def joined(*, bandwidth: float, exact_up_to: int, lost_s: float | None = None) -> PolicyResult:
    """Two replicas, one of which is away until 50 s; the other is lost at `lost_s`, if at all."""
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=2, pp=1, micro_batches=24)
    faults = [Fault((1,), 10.0, 50.0), *([] if lost_s is None else [Fault((1,), lost_s)])]
    trace = Trace.from_faults(faults, workers=2, duration_s=WINDOW_S)
    own = cluster(2, memory_bytes=None)
    link = Link(0.0, bandwidth)
    own = Cluster(own.workers, link, link)
    parameters = replace(ASSUMED, exact_up_to=exact_up_to)
    results = simulate(trace, workload(), own, ["chameleon"], parameters=parameters, start=plan, as_in_run=True)
    return results.policies["chameleon"]


@pytest.mark.parametrize("exact_up_to", [0, 32])
def test_a_join_stops_nothing_and_its_layers_move_while_the_others_train(exact_up_to: int) -> None:
    # 6 layers of 1.2 GB at 0.72 GB/s: 10 s. Gradients of 0.2 GB for each layer are reduced slowly too.
    result = joined(bandwidth=0.72e9, exact_up_to=exact_up_to)
    assert set(result.stall_by_cause) == {"lost"}
    both_s = 12 * 0.18 + 6 * 2e8 / 0.72e9
    rates = [(each.time_s, each.samples_per_s) for each in result.timeline]
    (back_s, back), (moves_s, moving), (_, lone) = rates[-1], rates[-2], rates[-3]
    assert lone == pytest.approx(24 / SLOW_S)
    # By class, steps do not take longer while layers move.
    assert moving == pytest.approx(24 / (SLOW_S + (6 * 2e8 / 0.72e9 if exact_up_to else 0.0)))
    assert back == pytest.approx(24 / both_s)
    # The step that is under way at 50 s ends; then all whole steps until 10 s have passed.
    assert 50.0 <= moves_s < 50.0 + SLOW_S
    assert back_s == pytest.approx(moves_s + math.ceil(10.0 / (24 / moving)) * 24 / moving)


def test_a_loss_during_a_migration_leaves_the_plan_that_trains() -> None:
    result = joined(bandwidth=0.72e9, exact_up_to=32, lost_s=55.0)
    assert [each.cause for each in result.decisions] == ["lost", "back", "lost"]
    # The worker that was to receive layers is lost: all stop for it, and continue their step.
    assert result.stall_by_cause == pytest.approx({"lost": 2 * PREPARED_S})
    assert result.timeline[-1].samples_per_s == pytest.approx(24 / SLOW_S)


def test_a_better_plan_is_found_beside_training() -> None:
    # Three pipelines of two stages; with five workers, others are faster than rerouting.
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=3, pp=2, micro_batches=24)
    trace = Trace.from_faults([Fault((1,), 100.0)], workers=6, duration_s=WINDOW_S)
    found = {}
    for exact_up_to in (0, 32):
        parameters = replace(ASSUMED, search_s=7.0, exact_up_to=exact_up_to)
        own = cluster(6, memory_bytes=None)
        results = simulate(trace, workload(), own, ["chameleon"], parameters=parameters, start=plan, as_in_run=True)
        found[exact_up_to] = results.policies["chameleon"]
    for result in found.values():
        lost, review = result.decisions
        assert (lost.cause, lost.chosen, review.cause) == ("lost", "reroute", "review")
        assert review.time_s == pytest.approx(100.0 + PREPARED_S + 7.0)
        assert review.predicted_stall_s == 0.0
        assert review.predicted_step_s < lost.predicted_step_s
        assert result.stall_by_cause == pytest.approx({"lost": PREPARED_S})
    assert found[0].samples == pytest.approx(found[32].samples, rel=0.02)
