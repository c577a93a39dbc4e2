"""Times of pipelines by class against the estimates of whole plans; mixes against trying all."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cost.presets import Recompute
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.lab.by_class import EstimatedMixes, EstimatedTimes
from chameleon_ft.plan import Hop, Placement, Plan, Route
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, PipelineClass, Pipelines
from chameleon_ft.simulate.by_class.step_times import Mixes, StepTimes
from tests.simulate.clusters import cluster, costs, workload

CUTS = [Cut((6,)), Cut((3, 6)), Cut((2, 6)), Cut((2, 4, 6))]


def times_of(workers: int, *, split_backward: bool = False, micro_batches: int = 24) -> StepTimes:
    return StepTimes(Pipelines(costs(workers, micro_batches=micro_batches), split_backward=split_backward))


def estimated_s(counts: Counter[Cut], shares: list[int], split_backward: bool, model: CostModel) -> float:
    """The estimate of the plan in which each pipeline has its share."""
    pipelines: list[tuple[Hop, ...]] = []
    worker = 0
    for cut in counts.elements():
        pipelines.append(tuple(Hop(worker + stage, layers) for stage, layers in enumerate(cut.stages)))
        worker += cut.depth
    routes = [hops for hops, share in zip(pipelines, shares, strict=True) for _ in range(share)]
    held = {hop.worker: (hop.layers,) for hops, share in zip(pipelines, shares, strict=True) if share for hop in hops}
    plan = Plan(Placement(6, held), tuple(map(Route, range(len(routes)), routes)), split_backward)
    program = best_program(plan, model).program
    return estimate_step(plan, program, model).step_s


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_equal_pipelines_take_as_long_as_their_plan(cut: Cut, split_backward: bool) -> None:
    times = times_of(4 * cut.depth, split_backward=split_backward)
    step = times.equally_shared(PipelineClass(cut), 4)
    assert step is not None
    expected_s = estimated_s(Counter({cut: 4}), [6] * 4, split_backward, times.pipelines.costs)
    assert step.step_s == pytest.approx(expected_s, rel=0.01)


@given(
    numbers=st.lists(st.integers(0, 2), min_size=4, max_size=4).filter(lambda numbers: 0 < sum(numbers) <= 4),
    split_backward=st.booleans(),
)
def test_shares_are_the_best_there_are(numbers: list[int], split_backward: bool) -> None:
    counts = Counter({PipelineClass(cut): number for cut, number in zip(CUTS, numbers, strict=True) if number})
    workers = sum(own.cut.depth * number for own, number in counts.items())
    times = times_of(workers, split_backward=split_backward, micro_batches=10)
    step = times.step(counts)
    assert step is not None
    pipelines = list(counts.elements())
    finished_s = min(
        max(times.pipelines.program_s(own, share) for own, share in zip(pipelines, shares, strict=True))
        for shares in itertools.product(range(11), repeat=len(pipelines))
        if sum(shares) == 10
    )
    assert step.program_s == pytest.approx(finished_s)
    assert sum(count * step.most.get(own, 0) for own, count in counts.items()) >= 10


def test_unequal_pipelines_take_as_long_as_their_plan() -> None:
    counts = Counter({Cut((3, 6)): 2, Cut((2, 4, 6)): 2})
    times = times_of(10)
    step = times.step({PipelineClass(cut): count for cut, count in counts.items()})
    assert step is not None
    most = [step.most[PipelineClass(cut)] for cut in counts.elements()]
    shares = list(most)
    while sum(shares) > 24:
        shares[shares.index(max(shares))] -= 1
    expected_s = estimated_s(counts, shares, False, times.pipelines.costs)
    assert step.step_s == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("micro_batches", [17, 31, 50, 77, 150, 400])
def test_between_scheduled_shares_times_are_nearly_linear(micro_batches: int, split_backward: bool) -> None:
    pipelines = Pipelines(costs(8), split_backward=split_backward)
    own = PipelineClass(Cut((2, 3, 6)))
    real = pipelines._schedule(own, micro_batches, 0)
    assert pipelines.program_s(own, micro_batches) == pytest.approx(real.program_s, rel=0.01)


def test_pipelines_that_do_not_fit_recompute_or_are_refused() -> None:
    whole = PipelineClass(Cut((6,)))
    for memory_bytes, fits in ((9 * 10**9, True), (8 * 10**9, False)):
        model = CostModel(workload(), cluster(4, memory_bytes=memory_bytes))
        pipelines = Pipelines(model, split_backward=False)
        assert pipelines.run(whole, 4) is None
        fitting = pipelines.fitting(whole, 4)
        assert (fitting == PipelineClass(Cut((6,), recompute=Recompute.FULL))) == fits
        assert (fitting is None) != fits


def test_a_slow_worker_makes_its_pipeline_slow() -> None:
    pipelines = Pipelines(costs(4), split_backward=False)
    fast, slow = (pipelines.program_s(PipelineClass(Cut((3, 6)), speeds), 20) for speeds in ((), (1.0, 0.5)))
    assert slow > 1.8 * fast


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 9])
def test_no_mix_of_even_cuts_is_faster(workers: int) -> None:
    times = times_of(workers, micro_batches=12)
    found = Mixes(times).fastest(workers)
    assert found is not None
    best_s = math.inf
    for numbers in itertools.product(*(range(workers // depth + 1) for depth in range(1, 7))):
        if 0 < sum(number * depth for depth, number in enumerate(numbers, start=1)) <= workers:
            counts = {
                PipelineClass(times.pipelines.even_cut(depth)): number
                for depth, number in enumerate(numbers, start=1)
                if number
            }
            step = times.step(counts)
            best_s = min(best_s, math.inf if step is None else step.step_s)
    # Of mixes of three and more depths, none is looked at.
    assert found.step_s <= best_s * 1.02
    assert sum(own.cut.depth * count for own, count in found.counts.items()) <= workers


@given(workers=st.integers(1, 14), micro_batches=st.integers(1, 20), depths=st.sets(st.integers(1, 5), min_size=1))
def test_all_workers_are_used_up_with_the_least_estimate(workers: int, micro_batches: int, depths: set[int]) -> None:
    pipelines = {depth: EstimatedTimes(first_s=depth, period_s=6 / depth) for depth in sorted(depths)}
    found = EstimatedMixes(pipelines, micro_batches).fastest(workers)
    best_s = math.inf
    for numbers in itertools.product(*(range(workers // depth + 1) for depth in sorted(depths))):
        counts = Counter(dict(zip(sorted(depths), numbers, strict=True)))
        if sum(depth * number for depth, number in counts.items()) == workers:
            ends = sorted({depth + share * 6 / depth for depth in depths for share in range(micro_batches + 1)})
            for time_s in ends:
                values = {depth: pipelines[depth].most(time_s) for depth in counts if counts[depth]}
                if all(values.values()) and sum(counts[d] * values[d] for d in values) >= micro_batches:
                    best_s = min(best_s, time_s)
                    break
    if found is None:
        assert best_s == math.inf
    else:
        counts, estimate_s = found
        assert sum(depth * number for depth, number in counts.items()) == workers
        assert estimate_s == pytest.approx(best_s, rel=1e-4)


def test_a_worker_holds_the_share_of_optimizer_state_of_as_many_pipelines_as_there_can_be() -> None:
    own = costs(12)
    shared = CostModel(replace(own.workload, owners=2), own.cluster)
    whole, divided = (Pipelines(each, split_backward=False) for each in (own, shared))
    layer = own.workload.layers[0]
    for depth, holders in ((1, 12), (3, 4), (6, 2)):
        rest, share = layer.param_bytes + layer.gradient_bytes, -(-layer.optimizer_bytes * 2 // holders)
        assert whole.held_before(depth)[-1] == 6 * layer.held_bytes
        assert divided.held_before(depth)[-1] == 6 * (rest + share)
        assert divided.state_bytes(depth) == [layer.param_bytes + share] * 6
    # Three layers take 4.2 GB without activations if nothing is shared, and 2.2 GB with six holders.
    few = replace(
        own.cluster, workers=tuple(replace(each, memory_bytes=7 * 10**9 // 2) for each in own.cluster.workers)
    )
    fits = [
        Pipelines(CostModel(each.workload, few), split_backward=False).fits(PipelineClass(Cut((3, 6))), 4)
        for each in (own, shared)
    ]
    assert fits == [False, True]
