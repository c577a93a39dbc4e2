"""Models that hardly fit, clusters that are partly or wholly down, and what is kept while a simulation runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import find_plan
from chameleon_ft.simulate.by_class.pipeline_classes import PipelineClass, Pipelines, limit_levels
from chameleon_ft.simulate.by_class.world import world_of
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.results import Results
from chameleon_ft.simulate.run import simulate
from chameleon_ft.simulate.traces.trace import Fault, Trace
from tests.examples import examples
from tests.simulate.clusters import cluster, workload

BY_CLASS = Parameters(exact_up_to=0)
HOUR_S = 3600.0


def simulated(model: str, workers: int, faults: list[Fault], *policies: str) -> Results:
    rates = device("h100-80g")
    work = derive_workload(model_shape(model), rates, micro_batch_size=1, micro_batches=4 * workers)
    trace = Trace.from_faults(faults, workers=workers, duration_s=10 * HOUR_S, workers_per_host=8)
    return simulate(trace, work, rates.cluster(workers, workers_per_host=8), policies, parameters=BY_CLASS)


def of_preset(model: str, workers: int) -> CostModel:
    rates = device("h100-80g")
    work = derive_workload(model_shape(model), rates, micro_batch_size=1, micro_batches=4 * workers)
    return CostModel(work, rates.cluster(workers, workers_per_host=8))


def test_a_model_that_has_to_recompute_is_simulated() -> None:
    results = simulated("qwen2.5-32b", 32, [Fault(tuple(range(8)), HOUR_S, 3 * HOUR_S)], "recycle", "oracle")
    assert results.policies["recycle"].down_s == 0
    assert "recomputing" in results.start


def test_a_large_model_continues_on_fewer_hosts() -> None:
    results = simulated("llama2-70b", 32, [Fault(tuple(range(8)), HOUR_S)], "chameleon", "restart")
    for result in results.policies.values():
        assert result.down_s == 0
        assert "wait" not in result.decisions_by_kind


def test_oobleck_has_room_to_be_reconfigured() -> None:
    # Two H100s hold the 7B model, but with no room for layers that arrive: then hardly a template could be reached.
    losses = [Fault((worker,), (1 + worker) * HOUR_S / 2) for worker in range(8)]
    result = simulated("llama2-7b", 16, losses, "oobleck").policies["oobleck"]
    assert "checkpoint" not in result.decisions_by_kind


def test_a_plan_without_room_for_moves_is_read_from_a_checkpoint() -> None:
    # No layer has room beside those that are held, so that nothing but detours could be reached.
    result = simulated("llama3-70b", 40, [Fault(tuple(range(8)), HOUR_S)], "chameleon").policies["chameleon"]
    assert result.decisions_by_kind == {"reroute": 1, "anew": 1}


def test_redundant_copies_take_memory() -> None:
    pipelines = [Pipelines(of_preset("llama2-7b", 8), split_backward=True, redundant=each) for each in (False, True)]
    own = PipelineClass(pipelines[0].even_cut(3))
    assert pipelines[0].fits(own, 8)
    assert not pipelines[1].fits(own, 8)


def test_depths_that_leave_many_workers_over_are_mixed_with_others() -> None:
    model = of_preset("qwen2.5-72b", 48)
    mixes = world_of(model, BY_CLASS).mixes
    fastest = mixes.fastest(48)
    equal = mixes.equal_pipelines(48)
    assert fastest is not None
    assert equal is not None
    assert fastest.step_s < equal.step_s


@settings(max_examples=examples(25), deadline=None)
@given(
    depth=st.integers(2, 6), share=st.integers(1, 200), memory_gb=st.sampled_from([4, 6, 9, 24]), split=st.booleans()
)
def test_the_period_of_a_pipeline_is_never_below_the_work_of_a_layer(
    depth: int, share: int, memory_gb: int, split: bool
) -> None:
    model = CostModel(workload(), cluster(6, memory_bytes=memory_gb * 10**9))
    pipelines = Pipelines(model, split_backward=split)
    for cut in pipelines.cuts(depth):
        own = PipelineClass(cut)
        line = pipelines.line(own, share)
        if line is None:
            continue
        # Weight gradients of the last micro-batch may be computed while other stages work.
        assert line[1] >= (0.02 if split else 0.03) * (1 - 1e-9)
        run = pipelines.run(own, share)
        assert run is not None
        assert line[0] + share * line[1] == pytest.approx(run.program_s)


def test_nothing_is_scheduled_where_the_state_alone_does_not_fit() -> None:
    pipelines = Pipelines(of_preset("llama2-70b", 512), split_backward=True)
    for depth in (1, 2, 4, 8):
        for cut in pipelines.cuts(depth):
            assert pipelines.fitting(PipelineClass(cut), 100) is None
    assert not pipelines._scheduled


@settings(max_examples=examples(25), deadline=None)
@given(depth=st.integers(1, 6), share=st.integers(1, 16), memory_gb=st.integers(2, 12), split=st.booleans())
def test_a_pipeline_keeps_as_much_in_flight_as_its_memory_holds(
    depth: int, share: int, memory_gb: int, split: bool
) -> None:
    pipelines = Pipelines(CostModel(workload(), cluster(6, memory_bytes=memory_gb * 10**9)), split_backward=split)
    own = PipelineClass(pipelines.even_cut(depth))
    assert pipelines.memory_bytes is not None
    levels = len(limit_levels(pipelines._plan(own, share)))
    runs = [pipelines._run(own, share, level) for level in range(levels)]
    fitting = [run for run in runs if run.peak_bytes <= pipelines.memory_bytes]
    assert pipelines.run(own, share) == (fitting[0] if fitting else None)
    assert pipelines.fits(own, share) == bool(fitting)


def test_a_layout_that_nearly_fills_the_memory_is_as_fast_as_the_plan_that_is_found() -> None:
    model = of_preset("llama2-7b", 12)
    world = world_of(model, BY_CLASS)
    speeds = dict.fromkeys(world.workers, 1.0)
    steps_s = [world.step_s(layout, speeds) for layout in world.several_starts(speeds)]
    best = find_plan(model).best
    assert best.in_flight_limits
    assert min(step_s for step_s in steps_s if step_s is not None) == pytest.approx(best.step_s, rel=0.01)


@pytest.mark.parametrize("exact_up_to", [0, 32])
def test_a_job_begins_when_the_first_workers_are_live(exact_up_to: int) -> None:
    down = [Fault(tuple(range(4)), 0.0, 1_000.0)]
    trace = Trace.from_faults(down, workers=4, duration_s=5_000.0)
    parameters = Parameters(exact_up_to=exact_up_to)
    results = simulate(trace, workload(), cluster(4), ["chameleon", "recycle", "restart"], parameters=parameters)
    for result in results.policies.values():
        assert result.down_s == 1_000.0
        # The job has not failed, so there is nothing to restart.
        assert result.stall_s == 0
        assert result.samples > 0


@pytest.mark.parametrize("exact_up_to", [0, 32])
def test_a_job_waits_for_workers_and_resumes_as_soon_as_the_model_fits(exact_up_to: int) -> None:
    # State of 7.2 GB: two workers of 5 GB hold it, one does not.
    faults = [Fault((0, 1, 2), 1_000.0, 4_000.0), Fault((3,), 1_000.0, 3_000.0), Fault((2,), 4_000.0)]
    trace = Trace.from_faults(faults, workers=4, duration_s=10_000.0)
    own = cluster(4, memory_bytes=6 * 10**9)
    parameters = Parameters(exact_up_to=exact_up_to)
    result = simulate(trace, workload(), own, ["chameleon"], parameters=parameters).policies["chameleon"]
    assert result.down_s == 3_000.0
    assert result.timeline[-1].samples_per_s > 0
