"""Short windows, computed by hand, with policies that act as in a run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.results import PolicyResult
from chameleon_ft.simulate.run import simulate
from chameleon_ft.simulate.traces.trace import Fault, Trace
from tests.simulate.clusters import cluster, workload

# A micro-batch takes 6 x 30 ms; n workers that hold everything reduce 6 x 200 MB over links of 50 GB/s.
SLOW_S = 24 * 0.18
FAST_S = 12 * 0.18 + 2 * (1e-5 + 6 * 10**8 / 50e9)
ASSUMED = Parameters(
    detect_s=0.1,
    stop_s=0.2,
    decide_s=0.3,
    search_s=0.5,
    regroup_s=0.4,
    worker_mtbf_s=20 * 3600.0,
    checkpoint_interval_s=math.inf,
)
PREPARED_S, SEARCHED_S = 1.0, 1.2  # the phases together
WINDOW_S = 200.0


def replayed(
    policy: str, *faults: Fault, pipelines: int = 2, pp: int = 1, parameters: Parameters = ASSUMED, per_host: int = 1
) -> PolicyResult:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=pipelines, pp=pp, micro_batches=24)
    workers = pipelines * pp
    trace = Trace.from_faults(faults, workers=workers, duration_s=WINDOW_S)
    costs = workload(), cluster(workers, per_host=per_host)
    results = simulate(trace, *costs, [policy], parameters=parameters, start=plan, as_in_run=True)
    return results.policies[policy]


def samples(steps: float) -> float:
    return 24 * steps / WINDOW_S


def test_a_loss_that_was_prepared_for_by_hand() -> None:
    result = replayed("drop-replica", Fault((1,), 100.0))
    # The step that was interrupted counts for nothing, the one at the end for its part.
    assert result.goodput == pytest.approx(samples(100.0 // FAST_S + (100.0 - PREPARED_S) / SLOW_S))
    assert result.stall_s == pytest.approx(PREPARED_S)
    assert result.lost_s == pytest.approx(100.0 % FAST_S)


@pytest.mark.parametrize("at_s", [0.4, 0.6])
def test_a_loss_before_anything_could_be_prepared_takes_a_search(at_s: float) -> None:
    result = replayed("drop-replica", Fault((1,), at_s))
    stall_s = SEARCHED_S if at_s < ASSUMED.search_s else PREPARED_S
    assert result.stall_s == pytest.approx(stall_s)
    assert result.goodput == pytest.approx(samples((WINDOW_S - at_s - stall_s) / SLOW_S))


def test_losses_are_prepared_for_one_class_after_the_other() -> None:
    # Two pipelines of two stages: losses of first stages are alike, and those of second ones.
    stalls = {}
    for worker, at_s in [(0, 0.6), (1, 0.6), (1, 1.1)]:
        stalls[worker, at_s] = replayed("drop-replica", Fault((worker,), at_s), pp=2).stall_s
    assert stalls == pytest.approx({(0, 0.6): PREPARED_S, (1, 0.6): SEARCHED_S, (1, 1.1): PREPARED_S})


def test_two_losses_at_once_take_a_search() -> None:
    result = replayed("drop-replica", Fault((1,), 100.0), Fault((2,), 100.0), pipelines=3)
    assert result.stall_s == pytest.approx(SEARCHED_S)


@pytest.mark.parametrize(
    ("at_s", "stall_s"),
    # That of any worker comes first.
    [(0.6, SEARCHED_S), (1.1, PREPARED_S)],
)
def test_hosts_are_prepared_for_after_workers(at_s: float, stall_s: float) -> None:
    lost = [Fault((2, 3), at_s)]
    assert replayed("drop-replica", *lost, pipelines=4, per_host=2).stall_s == pytest.approx(stall_s)


def test_two_of_a_larger_host_take_a_search() -> None:
    result = replayed("drop-replica", Fault((1, 2), 100.0), pipelines=6, per_host=3)
    assert result.stall_s == pytest.approx(SEARCHED_S)


def test_a_loss_within_a_stall_begins_a_new_one() -> None:
    result = replayed("drop-replica", Fault((1,), 100.0), Fault((2,), 100.7), pipelines=3)
    assert result.stall_s == pytest.approx(0.7 + SEARCHED_S)
    assert [each.time_s for each in result.decisions] == [100.0, 100.7]
    after = samples((100.0 - 0.7 - SEARCHED_S) / SLOW_S)
    # Rings of three: 4 messages of a third.
    before_s = 8 * 0.18 + 4 * (1e-5 + 4 * 10**8 / 50e9)
    assert result.goodput == pytest.approx(samples(100.0 // before_s) + after)


@pytest.mark.parametrize("weigh_s", [0.0, 2.5])
def test_returns_within_a_stall_are_decided_after_training_has_resumed(weigh_s: float) -> None:
    result = replayed("repartition", Fault((1,), 100.0, 100.5), parameters=replace(ASSUMED, weigh_s=weigh_s))
    assert [each.cause for each in result.decisions] == ["lost", "back"]
    assert result.decisions[1].time_s == pytest.approx(100.0 + PREPARED_S + weigh_s)
    assert result.timeline[-1].samples_per_s == pytest.approx(24 / FAST_S)


def test_returns_are_decided_while_training_continues() -> None:
    result = replayed("repartition", Fault((1,), 100.0, 150.0), parameters=replace(ASSUMED, weigh_s=3.0))
    assert result.decisions[1].time_s == pytest.approx(153.0)
    assert result.lost_by_cause == pytest.approx({"step": 100.0 % FAST_S})


def test_a_worker_lost_again_before_the_decision_changes_nothing() -> None:
    result = replayed(
        "repartition", Fault((1,), 100.0, 150.0), Fault((1,), 151.0), parameters=replace(ASSUMED, weigh_s=3.0)
    )
    assert [each.cause for each in result.decisions] == ["lost"]


def test_steps_take_longer_than_their_estimate_by_the_overhead() -> None:
    result = replayed("drop-replica", parameters=replace(ASSUMED, step_overhead_s=0.25))
    assert result.goodput == pytest.approx(samples(WINDOW_S / (FAST_S + 0.25)))
    assert result.share_of_failure_free == pytest.approx(1.0)


def test_without_a_checkpoint_a_run_ends_with_its_last_holder() -> None:
    result = replayed("chameleon", Fault((0,), 50.0, 60.0), pipelines=1, pp=2)
    assert result.down_s == pytest.approx(150.0)
    # Two stages of 90 ms for 24 micro-batches and one to fill them: 2.25 s and a few messages of 0.2 ms.
    assert result.samples == 22 * 24
    assert set(result.decisions_by_kind) == {"wait"}


def test_a_restart_takes_the_layout_and_the_seconds_of_the_runtime() -> None:
    parameters = replace(ASSUMED, restart_cost_s=30.0, checkpoint_interval_s=1e-6, checkpoint_write_s=0.0)
    result = replayed("restart", Fault((1,), 100.0), parameters=parameters)
    assert result.stall_s == pytest.approx(30.0)
    # Every step was kept, and no time goes into checkpoints.
    assert result.goodput == pytest.approx(samples(100.0 // FAST_S + 70.0 / SLOW_S))


def test_returned_workers_stay_idle_as_in_a_run() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=2, pp=1, micro_batches=24)
    trace = Trace.from_faults([Fault((1,), 50.0, 60.0)], workers=2, duration_s=WINDOW_S)
    last = []
    for as_in_run in (True, False):
        results = simulate(
            trace, workload(), cluster(2), ["recycle"], parameters=ASSUMED, start=plan, as_in_run=as_in_run
        )
        last.append(results.policies["recycle"].timeline[-1].samples_per_s)
    assert last == pytest.approx([24 / SLOW_S, 24 / FAST_S])
