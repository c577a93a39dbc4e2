"""Calibration by measured operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.coordinator.decisions.calibration import Calibration, Corrections
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.protocol.job_info import OperationRate
from chameleon_ft.protocol.parts import OperationTimes
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, OperationKind, Program, best_program
from chameleon_ft.workload import LayerCost, Workload
from tests.coordinator.stage import JOB
from tests.golden import refused
from tests.strategies import recomputing

# Layers that differ in everything, so that no factor comes out right by chance.
LAYERS = tuple(
    LayerCost(f"layer {number}", 1.0 + number, 1.5, 0.5 + number, fused_backward_s=1.75 + number) for number in range(6)
)


KINDS = (OperationKind.FORWARD, OperationKind.BACKWARD)


def costs(workers: int = 6) -> CostModel:
    cluster = Cluster(tuple(Worker(w, "host") for w in range(workers)), Link(0.25, 1e9), Link(0.5, 1e9))
    return CostModel(Workload(LAYERS, 6, 1, operation_overhead_s=0.125), cluster)


def plan(*, dp: int = 3, pp: int = 2, split: bool = False, recompute: Iterable[int] = ()) -> Plan:
    made = data_pipeline_plan(layer_costs=[1.0] * 6, dp=dp, pp=pp, micro_batches=6, split_backward=split)
    return recomputing(made, recompute)


@cache
def program(of: Plan) -> Program:
    return best_program(of, costs()).program


def times(of: Plan, worker: int, true: CostModel) -> OperationTimes:
    """Return a worker's report of a step whose operations take their times in `true`: medians by kind, as ranks do."""

    def median_s(kind: OperationKind) -> float:
        found = sorted(true.operation_s(worker, each) for each in program(of).of(worker) if each.kind is kind)
        return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2 if found else 0.0

    backward_s = median_s(OperationKind.BACKWARD) or (
        median_s(OperationKind.INPUT_GRAD) + median_s(OperationKind.WEIGHT_GRAD)
    )
    return OperationTimes(forward_s=median_s(OperationKind.FORWARD), backward_s=backward_s, longest_s=9.0)


def begun(of: Plan | None = None, *, knows_layers: bool = True) -> Calibration:
    of = plan() if of is None else of
    seen = Calibration(knows_layers)
    seen.begin(of, program(of), costs())
    return seen


def run(
    seen: Calibration, steps: int, *, of: Plan | None = None, factor: float = 1.0, slow: dict[int, float] | None = None
) -> None:
    """Run steps whose operations take `factor` times the expected time, and more on slow workers."""
    of = plan() if of is None else of
    for _ in range(steps):
        for worker in of.workers:
            each = Corrections(operations=factor * (slow or {}).get(worker, 1.0))
            seen.operations(worker, times(of, worker, each.applied(costs())))


@pytest.mark.parametrize(
    "of",
    [
        plan(),
        plan(split=True),
        plan(recompute={0, 3}),
        plan(split=True, recompute=range(6)),
        reroute(plan(), [1], costs()),
    ],
    ids=["fused", "split", "recomputing", "split and recomputing", "rerouted"],
)
@given(factor=st.floats(0.1, 10.0))
def test_operations_that_all_take_longer_give_just_that_factor(of: Plan, factor: float) -> None:
    seen = begun(of)
    run(seen, 3, of=of, factor=factor)
    assert seen.both == pytest.approx(factor)
    assert seen.rates == pytest.approx((factor, factor))


def test_a_second_forward_is_not_taken_for_backward() -> None:
    """Forwards take three times as long as expected, backwards as long, and the workers recompute."""
    of = plan(recompute=range(6))
    seen = begun(of)
    workload = costs().workload
    true = replace(
        costs(),
        workload=replace(workload, layers=tuple(replace(each, forward_s=3 * each.forward_s) for each in LAYERS)),
    )
    for _ in range(2):
        for worker in of.workers:
            seen.operations(worker, times(of, worker, true))
    assert seen.rates is not None
    assert seen.rates[0] == pytest.approx(3, rel=0.1)  # but for the overhead of an operation
    assert seen.rates[1] == pytest.approx(1, rel=0.1)


def test_before_anything_was_seen_nothing_is_corrected() -> None:
    seen = begun()
    assert (seen.rates, seen.both, seen.transfers, seen.unexplained(costs())) == (None, 1, 1, 1)
    assert Corrections().applied(costs()) == costs()


def test_a_first_step_counts_only_while_there_is_no_other() -> None:
    seen = begun()
    run(seen, 1, factor=9.0)
    assert seen.both == pytest.approx(9.0)
    run(seen, 1, factor=2.0)
    assert seen.both == pytest.approx(2.0)
    seen.begin(plan(), program(plan()), costs())
    run(seen, 1, factor=9.0)
    assert seen.both == pytest.approx(2.0)


@given(at=st.integers(1, 19), factor=st.floats(1.0, 100.0))
def test_one_slow_step_changes_nothing(at: int, factor: float) -> None:
    seen = begun()
    run(seen, at, factor=1.5)
    run(seen, 1, factor=1.5 * factor, slow={3: 40.0})
    run(seen, 20 - at, factor=1.5)
    assert seen.both == pytest.approx(1.5)


@given(factor=st.floats(0.1, 10.0), slower=st.floats(1.0, 10.0))
def test_a_step_is_measured_as_observed_by_expected_seconds(factor: float, slower: float) -> None:
    seen = begun()
    for number in range(3):
        for worker in plan().workers:
            each = Corrections(operations=factor * (slower if worker == 3 else 1.0))
            measured = seen.operations(worker, times(plan(), worker, each.applied(costs())))
            if number == 0:
                assert measured is None, "the first step after a change"
            else:
                assert measured is not None
                assert measured[0] == pytest.approx(factor * (slower if worker == 3 else 1.0))


@pytest.mark.parametrize(
    ("of", "knows_layers", "groups"),
    [
        (plan(), True, [0, 1, 0, 1, 0, 1]),
        (plan(), False, [0, 1, 0, 1, 0, 1]),
        (plan(dp=2, pp=3), True, [None] * 6),  # one peer is too few
        (plan(dp=2, pp=3), False, [0, 1, 2, 0, 1, 2]),
        (plan(dp=1, pp=6), False, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_workers_of_other_layers_are_compared_only_by_a_profile(
    of: Plan, knows_layers: bool, groups: list[int | None]
) -> None:
    seen = begun(of, knows_layers=knows_layers)
    run(seen, 1, of=of)
    measured = [seen.operations(worker, times(of, worker, costs())) for worker in of.workers]
    assert [each and each[1] for each in measured] == groups


def test_a_slow_worker_is_slower_in_the_costs() -> None:
    corrected = Corrections(slow={3: 0.5}).applied(costs()).cluster
    assert [each.speed for each in corrected.workers] == [1, 1, 1, 0.5, 1, 1]


def test_what_was_seen_of_other_layers_counts_until_there_is_something_newer() -> None:
    seen = begun()
    run(seen, 5, factor=3.0)
    other = plan(dp=2, pp=3)
    seen.begin(other, program(other), costs())
    assert seen.both == pytest.approx(3.0)
    run(seen, 2, of=other, factor=2.0)
    assert seen.both == pytest.approx(2.0)


def test_a_kind_of_operation_that_was_not_run_says_nothing() -> None:
    seen = begun()
    seen.operations(0, OperationTimes(forward_s=1.0, backward_s=0.0, longest_s=1.0))
    seen.operations(0, OperationTimes(forward_s=0.0, backward_s=1.0, longest_s=1.0))
    assert seen.rates is None


def test_what_operations_do_not_explain_of_a_step() -> None:
    seen = begun()
    step_s = estimate_step(plan(), program(plan()), costs()).step_s
    for each in (50.0, 1.25, 1.25):
        seen.step(each * step_s)
    assert seen.unexplained(costs()) == 1, "two steps after the first are too few"
    seen.step(9.0 * step_s)
    assert seen.unexplained(costs()) == pytest.approx(1.25)
    seen.begin(plan(), program(plan()), costs())
    assert seen.unexplained(costs()) == pytest.approx(1.25), "until there is something newer"


def test_transfers() -> None:
    seen = begun()
    for observed_s in (3.0, 4.0, 90.0):
        seen.transfer(expected_s=2.0, observed_s=observed_s)
    seen.transfer(expected_s=0.0, observed_s=1.0)
    assert seen.transfers == 2.0


@pytest.mark.parametrize(
    "bad", [{"operations": 0.0}, {"step": float("nan")}, {"transfer": -1.0}, {"migration": 0.0}, {"slow": {1: 0.0}}]
)
def test_a_correction_is_a_positive_number(bad: dict[str, object]) -> None:
    with refused(ConfigError):
        Corrections(**bad)  # type: ignore[arg-type]


def test_migrations_are_corrected_by_their_own_median() -> None:
    seen = Calibration(knows_layers=True)
    assert seen.migrations is None
    seen.transfer(expected_s=1.0, observed_s=3.0)
    for observed_s in (20.0, 50.0, 30.0):
        seen.migration(expected_s=10.0, observed_s=observed_s)
    seen.migration(expected_s=0.0, observed_s=1.0)
    assert [seen.migrations, seen.transfers] == [3.0, 3.0]
    for _ in range(10):
        seen.migration(expected_s=10.0, observed_s=70.0)
    assert seen.migrations == 7.0


def test_a_stage_below_all_that_is_trained_has_a_speed_and_no_backward() -> None:
    job = replace(JOB, gradient_bytes=(0, 0, 0, 256))
    config = RunConfig(job="a job", workers=2, parallel=Parallel(dp=1, pp=2), batch=Batch(micro_batches=2))
    hosts = dict.fromkeys(range(2), "host")
    of = data_pipeline_plan(layer_costs=job.relative_costs, dp=1, pp=2, micro_batches=2)
    reference, true = (job.costs(config, hosts, OperationRate(seconds, 2 * seconds)) for seconds in (1.0, 3.0))
    assert [each.backward_s for each in reference.workload.layers] == [0.0, 0.0, 0.0, 0.5]
    seen = Calibration(knows_layers=False)
    seen.begin(of, best_program(of, reference).program, reference)
    for worker in (0, 0, 1, 1):
        forward_s, backward_s = (true.compute_s(worker, kind, of.placement.ranges_of(worker)[0]) for kind in KINDS)
        ratio = seen.operations(worker, OperationTimes(forward_s=forward_s, backward_s=backward_s, longest_s=9.0))
    assert ratio is not None
    assert ratio[0] == pytest.approx(3.0)
    assert seen.rates == pytest.approx((3.0, 3.0))
    only_first = Calibration(knows_layers=False)
    only_first.begin(of, best_program(of, reference).program, reference)
    for _ in range(2):
        only_first.operations(0, OperationTimes(forward_s=1.5, backward_s=1e-6, longest_s=9.0))
    assert only_first.rates == pytest.approx((3.0, 6.0))
