"""Whole simulations: invariants on every trace, examples by hand, and both planners."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.lab.planned_layouts import equal_layouts
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.recovery import DecisionContext, FailureModel, decide, uniform_limits
from chameleon_ft.recovery.checkpoints import daly_interval_s
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.simulate.by_class.world import plans_found, world_of
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners.exact_planner import Decisions
from chameleon_ft.simulate.results import ConservationError, PolicyResult, Results
from chameleon_ft.simulate.run import SIMULATED_POLICIES, simulate
from chameleon_ft.simulate.traces.trace import Fault, Trace
from tests.golden import refused
from tests.simulate.clusters import cluster, costs, random_trace, workload

BY_CLASS = Parameters(exact_up_to=0, worker_mtbf_s=20 * 3600.0)
EXACT = replace(BY_CLASS, exact_up_to=64)


def simulated(trace: Trace, *policies: str, parameters: Parameters = BY_CLASS, **of_workload: int) -> Results:
    own = cluster(trace.workers, per_host=trace.workers_per_host)
    return simulate(trace, workload(**of_workload), own, policies or SIMULATED_POLICIES, parameters=parameters)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_exceeds_the_oracle_and_all_adds_up(seed: int, slow: bool) -> None:
    trace = random_trace(seed, workers=12, per_host=3, faults=12, slow=slow)
    results = simulated(trace)
    oracle = results.policies["oracle"]
    assert oracle.samples > 0
    for result in results.policies.values():
        # That time, worker-hours and samples add up is checked whenever a result is made.
        assert 0 <= result.samples <= oracle.samples
        assert result.share_of_oracle <= 1
        assert result.dead_hours == pytest.approx(trace.down_worker_hours)
        assert [each.time_s for each in result.decisions] == sorted(each.time_s for each in result.decisions)
        assert [each.time_s for each in result.timeline] == sorted({each.time_s for each in result.timeline})


def test_equal_arguments_give_bit_identical_results() -> None:
    trace = random_trace(3, workers=12, per_host=2, faults=6, slow=True)
    first = simulated(trace)
    world_of.cache_clear()
    plans_found.cache_clear()
    assert simulated(trace) == first


def test_a_policy_trains_equally_much_alone_and_beside_others() -> None:
    trace = random_trace(5, workers=12, faults=6)
    together = simulated(trace)
    world_of.cache_clear()
    for policy in SIMULATED_POLICIES[:-1]:
        alone = simulated(trace, policy).policies[policy]
        assert (alone.samples, alone.decisions) == (
            together.policies[policy].samples,
            together.policies[policy].decisions,
        )


def test_without_events_all_but_checkpoints_is_training() -> None:
    # More often than pays for a cluster of one host, whose loss would be a return to a checkpoint.
    parameters = replace(BY_CLASS, checkpoint_interval_s=600.0)
    results = simulated(Trace(6, 10_000.0, ()), "chameleon", "oracle", parameters=parameters)
    chameleon = results.policies["chameleon"]
    assert chameleon.stall_s == chameleon.lost_s == chameleon.down_s == 0.0
    assert chameleon.checkpoint_s == 16 * parameters.checkpoint_write_s
    assert results.policies["oracle"].share_of_failure_free == 1
    assert chameleon.share_of_oracle == pytest.approx(1 - 16 / 10_000.0)


def test_a_dropped_replica_by_hand() -> None:
    # Two pipelines of one worker each; worker 1 is lost at 1,000 s and stays so.
    trace = Trace.from_faults([Fault((1,), 1_000.0)], workers=2, duration_s=2_000.0)
    parameters = replace(BY_CLASS, checkpoint_interval_s=math.inf)
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=2, pp=1, micro_batches=24)
    results = simulate(trace, workload(), cluster(2), ["drop-replica", "oracle"], parameters=parameters, start=plan)
    result = results.policies["drop-replica"]
    # One micro-batch takes 6 x 30 ms; two workers also reduce 6 x 200 MB, each half of them twice.
    fast_s = 12 * 0.18 + 2 * (1e-5 + 6 * 10**8 / 50e9)
    slow_s = 24 * 0.18
    steps, part_s = divmod(1_000.0, fast_s)
    stall_s = parameters.after_loss.total_s
    steps += (1_000.0 - stall_s) // slow_s
    assert result.samples == steps * 24
    assert result.stall_s == pytest.approx(stall_s)
    assert result.lost_s == pytest.approx(part_s)
    assert result.decisions_by_kind == {"drop-replica": 1}
    assert result.decisions[0].predicted_step_s == pytest.approx(slow_s)
    assert result.decisions[0].predicted_stall_s == pytest.approx(stall_s + part_s)


def test_without_a_holder_of_a_layer_all_return_to_a_checkpoint() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=2, pp=2, micro_batches=24)
    trace = Trace.from_faults([Fault((0, 2), 5_000.0)], workers=4, duration_s=10_000.0)
    for parameters in (BY_CLASS, EXACT):
        result = simulate(trace, workload(), cluster(4), ["chameleon"], parameters=parameters, start=plan).policies[
            "chameleon"
        ]
        assert result.decisions_by_kind == {"checkpoint": 1}
        assert 0 < result.lost_by_cause["checkpoint"] <= BY_CLASS.checkpoint_interval_s + 10
        assert result.stall_s == pytest.approx(BY_CLASS.restart_cost_s)


@pytest.mark.parametrize("interval_s", [3_600.0, math.inf])
@pytest.mark.parametrize("before", [BY_CLASS, EXACT])
def test_snapshots_take_the_place_of_checkpoints(before: Parameters, interval_s: float) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=2, pp=2, micro_batches=24)
    trace = Trace.from_faults([Fault((0, 2), 5_000.0)], workers=4, duration_s=10_000.0)
    parameters = replace(before, checkpoint_interval_s=interval_s, snapshot_every=10)
    result = simulate(trace, workload(), cluster(4), ["chameleon"], parameters=parameters, start=plan).policies[
        "chameleon"
    ]
    assert result.decisions_by_kind == {"snapshot": 1}
    assert 0 < result.lost_s <= 11 * result.decisions[0].predicted_step_s, "its steps are the longer ones"
    assert "checkpoint" not in result.lost_by_cause
    assert result.stall_s == pytest.approx(parameters.after_loss.total_s + parameters.snapshot_return_s, abs=1.0)


@pytest.mark.parametrize("parameters", [BY_CLASS, EXACT])
@pytest.mark.parametrize(("owners", "lost", "kind"), [(None, (0, 2), ""), (2, (0, 1), ""), (2, (0, 2), "checkpoint")])
def test_without_an_owner_of_optimizer_state_all_return(
    parameters: Parameters, owners: int | None, lost: tuple[int, ...], kind: str
) -> None:
    """Four pipelines of one worker each: 0 and 2 own the same slices, 1 and 3 the others."""
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=4, pp=1, micro_batches=24)
    trace = Trace.from_faults([Fault(lost, 5_000.0)], workers=4, duration_s=10_000.0)
    shared = replace(workload(), owners=owners)
    results = simulate(trace, shared, cluster(4), ["chameleon"], parameters=parameters, start=plan)
    result = results.policies["chameleon"]
    assert result.decisions[0].chosen == (kind or "reroute")
    assert ("checkpoint" in result.lost_by_cause) == bool(kind)


@pytest.mark.parametrize("before", [BY_CLASS, EXACT])
def test_snapshots_are_taken_as_in_runs_where_hosts_have_the_memory(before: Parameters) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=2, pp=2, micro_batches=24)
    trace = Trace.from_faults([Fault((0, 2), 5_000.0)], workers=4, duration_s=10_000.0)
    as_in_runs = replace(before, snapshot_every=None, snapshot_cost_s=0.1)

    def chosen(**changes: Any) -> str:
        parameters = replace(as_in_runs, **changes)
        results = simulate(trace, workload(), cluster(4), ["chameleon"], parameters=parameters, start=plan)
        return results.policies["chameleon"].decisions[0].chosen

    assert chosen() == chosen(host_memory_bytes=1e12) == "snapshot"
    assert chosen(host_memory_bytes=1e9) == "checkpoint"
    assert chosen(host_memory_bytes=1e9, snapshot_every=10) == "snapshot"


def test_the_interval_of_snapshots_loses_least() -> None:
    parameters = replace(BY_CLASS, snapshot_every=None, snapshot_cost_s=0.5)
    steps = parameters.steps_between_snapshots(step_s=2.0, return_gap_s=10_000.0)
    assert steps == round(daly_interval_s(0.5, 10_000.0) / 2.0)
    assert parameters.steps_between_snapshots(step_s=2.0, return_gap_s=math.inf) == 30 * 86_400 // 2
    assert replace(parameters, snapshot_every=7).steps_between_snapshots(step_s=2.0, return_gap_s=1.0) == 7


def test_a_snapshot_makes_steps_longer() -> None:
    def samples(cost_s: float) -> float:
        parameters = replace(BY_CLASS, checkpoint_interval_s=math.inf, snapshot_every=4, snapshot_cost_s=cost_s)
        return simulated(Trace(6, 10_000.0, ()), "chameleon", parameters=parameters).policies["chameleon"].samples

    assert samples(2.0) < samples(0.0) * 0.99


def test_without_live_workers_all_wait() -> None:
    trace = Trace.from_faults([Fault((0, 1), 1_000.0, 3_000.0)], workers=2, duration_s=10_000.0)
    for parameters in (BY_CLASS, EXACT):
        results = simulated(trace, "chameleon", "restart", "oracle", parameters=parameters)
        for policy in ("chameleon", "restart"):
            result = results.policies[policy]
            assert result.down_s == 2_000.0
            assert result.decisions[0].chosen == "wait"
            assert result.timeline[1].samples_per_s == 0
        assert results.policies["oracle"].down_s == 2_000.0


def test_restart_writes_checkpoints_as_often_as_is_best() -> None:
    results = simulated(Trace(4, 50_000.0, ()), "restart", "oracle")
    result = results.policies["restart"]
    # Nothing is known of failures but what was known beforehand.
    best_s = daly_interval_s(BY_CLASS.checkpoint_write_s, BY_CLASS.worker_mtbf_s / 4)
    step_s = workload().samples / results.policies["oracle"].goodput
    cycle_s = round(best_s / step_s) * step_s + BY_CLASS.checkpoint_write_s
    assert result.checkpoint_s == pytest.approx(50_000.0 // cycle_s * BY_CLASS.checkpoint_write_s)


@pytest.mark.parametrize("policy", ["drop-replica", "recycle"])
def test_exact_policies_of_fixed_depth_have_the_best_of_several_starts(policy: str) -> None:
    trace = random_trace(1, workers=8, faults=4)
    own = CostModel(workload(), cluster(8))
    begun = [
        simulate(
            trace,
            own.workload,
            own.cluster,
            (policy,),
            parameters=EXACT,
            start=each.plan,
            in_flight_limits=each.in_flight_limits,
        ).policies[policy]
        for each in equal_layouts(own, split_backward=True)
    ]
    assert len({each.samples for each in begun}) > 1
    best = simulate(trace, own.workload, own.cluster, (policy,), parameters=EXACT).policies[policy]
    assert best.samples >= max(each.samples for each in begun)


def test_a_start_may_have_in_flight_limits() -> None:
    """Under 1F1B a step with split backward takes longer than with as many in flight as the pipeline has stages."""
    own = CostModel(workload(), cluster(4))
    plan = data_pipeline_plan(
        layer_costs=[1.0] * len(own.workload.layers),
        dp=1,
        pp=4,
        micro_batches=own.workload.micro_batches,
        split_backward=True,
    )
    trace = Trace.from_faults([], workers=4, duration_s=1_000.0, workers_per_host=1)
    few = {worker: InFlightLimit(4 - worker, 4 - worker) for worker in range(4)}
    samples = [
        simulate(
            trace,
            own.workload,
            own.cluster,
            ("reroute",),
            parameters=EXACT,
            start=plan,
            in_flight_limits=in_flight_limits,
        )
        .policies["reroute"]
        .samples
        for in_flight_limits in (few, None)
    ]
    assert samples[0] < samples[1]


def test_cached_decisions_equal_new_ones() -> None:
    model = costs(6)
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=3, pp=2, micro_batches=24)
    remembered = Decisions()
    for lost, repeat_s, mtbf_h in [(1, 0.3, 1.0), (1, 0.9, 1.0), (1, 0.0, 0.001), (2, 0.5, 10.0), (1, 0.4, 5.0)]:
        context = DecisionContext(
            plan=plan,
            in_flight_limits=uniform_limits(range(6), 2),
            costs=CostModel(model.workload, model.cluster.without([lost])),
            phases=BY_CLASS.after_loss,
            repeat_s=repeat_s,
            restart_cost_s=300.0,
        )
        rate = FailureModel(worker_mtbf_s=mtbf_h * 3600, prior_failures=1, failures=1)
        one, other = remembered.decide(context, "chameleon", rate), decide(context, "chameleon", rate)
        assert one.course == other.course
        assert one.chosen is not None
        assert other.chosen is not None
        assert one.chosen.policy == other.chosen.policy
        assert one.chosen.stall_s == pytest.approx(other.chosen.stall_s)


def test_unknown_policies_and_other_clusters_are_refused() -> None:
    trace = Trace(4, 100.0, ())
    with refused(ConfigError):
        simulated(trace, "chamaeleon")
    with refused(ConfigError):
        simulate(trace, workload(), cluster(5))
    with refused(PlanError):
        simulate(trace, workload(), cluster(4, memory_bytes=10**9))
    with refused(ConfigError):
        Parameters(restart_cost_s=-1.0)
    with refused(ConfigError):
        Parameters(checkpoint_interval_s=0.0)


def test_results_that_do_not_add_up_are_refused() -> None:
    result = simulated(random_trace(2, workers=6), "chameleon", "oracle").policies["chameleon"]
    for field in ("useful_s", "down_s", "used_hours", "samples"):
        with pytest.raises(ConservationError):
            _changed(result, field)


def _changed(result: PolicyResult, field: str) -> PolicyResult:
    return replace(result, **{field: getattr(result, field) * 1.01 + 500.0})
