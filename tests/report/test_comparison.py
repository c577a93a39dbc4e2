"""Recorded plans and steps, and their comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.recovery import reroute
from chameleon_ft.recovery.generation import CostsFrom, GenerationSpec
from chameleon_ft.report.comparison import compare_generations, measured_steps
from chameleon_ft.schedule import CostModel, OperationKind, best_program
from chameleon_ft.storage.plans import read_generation, read_generation_plans, write_generation
from chameleon_ft.storage.timelines import RecordedReduction, RecordedStep, TimelineLog, read_recorded_steps
from chameleon_ft.workload import LayerCost, Workload
from tests.golden import refused
from tests.strategies import recomputing


def costs(workers: int = 4) -> CostModel:
    layer = LayerCost("layer", 1.0, 1.5, 0.5, output_bytes=8, gradient_bytes=16)
    cluster = Cluster(tuple(Worker(w, "host") for w in range(workers)), Link(0.25, math.inf), Link(0.5, 1e9))
    return CostModel(Workload((layer,) * 4, 6, 1), cluster)


def planned(
    generation: int = 1,
    *,
    lost: tuple[int, ...] = (),
    costs_from: CostsFrom = "profile",
    split: bool = False,
    recompute: Iterable[int] = (),
) -> GenerationSpec:
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=2, pp=2, micro_batches=6, split_backward=split)
    plan = recomputing(plan, recompute)
    plan = reroute(plan, lost, costs()) if lost else plan
    return GenerationSpec(
        generation=generation,
        first_step=3,
        plan=plan,
        program=best_program(plan, costs()).program,
        costs=costs(),
        costs_from=costs_from,
        policy="",
        action="",
    )


def recorded(plan: GenerationSpec, step: int, *, factor: float = 1.0, overhead_s: float = 0.5) -> list[RecordedStep]:
    """Return a step that took `factor` times as long as predicted, on workers that start at different times."""
    estimate = estimate_step(plan.plan, plan.program, plan.costs)
    found = []
    for worker in plan.plan.workers:
        began = 0.125 * worker
        end_s = estimate.step_s * factor - began
        found.append(
            RecordedStep(
                generation=plan.generation,
                step=step,
                worker=worker,
                time=100.0 * step + began,
                operations=tuple(
                    (timed.start_s * factor - began, timed.end_s * factor - began)
                    for timed in estimate.timeline.of(worker)
                ),
                reductions=(RecordedReduction(0, 2, end_s - 0.25, end_s),),
                vote_s=(end_s, end_s + overhead_s),
                end_s=end_s + overhead_s,
            )
        )
    return found


@pytest.mark.parametrize(
    "plan",
    [planned(), planned(2, lost=(1,)), planned(split=True, costs_from="assumed"), planned(recompute={1, 2})],
)
def test_a_plan_is_read_as_it_was_written(plan: GenerationSpec, tmp_path: Path) -> None:
    write_generation(plan, tmp_path / "generation-00001.json")
    assert read_generation(tmp_path / "generation-00001.json") == plan
    assert read_generation_plans(tmp_path) == {plan.generation: plan}


@pytest.mark.parametrize(("before", "after"), [("F0.0", "X0.0"), ("F0.0", "F99.0"), ('"generation"', '"generator"')])
def test_a_damaged_plan_is_named(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "generation-00001.json"
    write_generation(planned(), path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with refused(ConfigError):
        read_generation_plans(tmp_path)


def test_records_are_read_as_they_were_written_to_the_microsecond(tmp_path: Path) -> None:
    steps = [step for number in (7, 3) for step in recorded(planned(), number)]
    steps[0] = dataclasses.replace(steps[0], operations=((0.1234567, 0.9999999),))
    for worker in range(4):
        log = TimelineLog(tmp_path / "timelines" / f"worker-{worker}.jsonl")
        for step in steps:
            if step.worker == worker:
                log.append(step)

    found = read_recorded_steps(tmp_path / "timelines")

    assert [(step.step, step.worker) for step in found] == [(n, w) for n in (3, 7) for w in range(4)]
    assert found[0] == steps[4]
    assert found[4].operations == ((0.123457, 1.0),)
    assert read_recorded_steps(tmp_path / "nowhere") == []


def test_steps_as_predicted_differ_only_by_the_vote() -> None:
    plan = planned()
    steps = [step for number in (3, 4, 5) for step in recorded(plan, number, overhead_s=0.5)]

    (found,) = compare_generations({1: plan}, steps)

    predicted_s = estimate_step(plan.plan, plan.program, plan.costs).step_s
    assert [step.step for step in found.steps] == [4, 5], "the first does everything for the first time"
    assert found.measured_s == pytest.approx(predicted_s + 0.5)
    assert found.error == pytest.approx(predicted_s / (predicted_s + 0.5) - 1)
    assert {kind.kind: kind.count for kind in found.kinds} == {OperationKind.FORWARD: 24, OperationKind.BACKWARD: 24}
    for kind in found.kinds:
        assert kind.mean_error == pytest.approx(0, abs=1e-9)
        assert kind.predicted_s == pytest.approx(kind.measured_s)
    assert found.steps[0].lane.program_s == pytest.approx(found.predicted.program_s)


def test_an_error_is_that_of_the_prediction() -> None:
    plan = planned(lost=(2,))
    steps = [step for number in (3, 4) for step in recorded(plan, number, factor=1.25, overhead_s=0.0)]
    (found,) = compare_generations({1: plan}, steps)
    assert found.error == pytest.approx(1 / 1.25 - 1)
    assert found.to_json()["kinds"]["F"]["mean_error"] == pytest.approx(0.2)
    assert found.to_json()["steps"] == [
        {
            "step": 4,
            "measured_s": pytest.approx(found.measured_s),
            "operations_s": pytest.approx(1.25 * found.predicted.program_s),
            "error": pytest.approx(-0.2),
        }
    ]


def test_without_a_profile_the_operations_are_their_own_prediction() -> None:
    plan = planned(costs_from="assumed")
    steps = [step for number in (3, 4) for step in recorded(plan, number, factor=3.0)]
    (found,) = compare_generations({1: plan}, steps)
    assert found.costs_from == "measured"
    assert all(kind.mean_error == pytest.approx(0, abs=1e-9) for kind in found.kinds)
    # Messages took three times as long too, and only operations are known: the rest is the error.
    assert found.predicted.program_s < found.steps[0].lane.program_s


def test_times_that_vary_in_a_step_count_with_their_mean() -> None:
    plan = planned(costs_from="assumed")

    def varying(step: RecordedStep) -> RecordedStep:
        # One of three operations of a kind takes four seconds, and the others one: one after the other, without gaps.
        ends, kinds, begun = 0.0, dict.fromkeys(OperationKind, 0), []
        for operation in plan.program.of(step.worker):
            kinds[operation.kind] += 1
            begun.append((ends, ends + (4.0 if kinds[operation.kind] % 3 == 0 else 1.0)))
            ends = begun[-1][1]
        return dataclasses.replace(step, operations=tuple(begun), reductions=())

    (found,) = compare_generations({1: plan}, [varying(step) for number in (3, 4) for step in recorded(plan, number)])

    assert {kind.predicted_s for kind in found.kinds} == {2.0}
    assert set(found.predicted.busy_s.values()) == {12.0}, "as long as each worker computes"


def test_reductions_take_as_long_as_for_the_holder_that_waits_for_no_other() -> None:
    plan = planned(costs_from="assumed")

    def reducing(step: RecordedStep) -> RecordedStep:
        # Of the workers that hold layers 0 and 1, worker 0 comes a second after worker 2.
        end_s = step.operations[-1][1]
        late_s = {0: 1.0, 2: 0.0}.get(step.worker, 0.0)
        first = (0, 2) if step.worker in (0, 2) else (2, 4)
        own = RecordedReduction(*first, end_s + late_s, end_s + 4.0)
        return dataclasses.replace(step, reductions=(own,))

    (found,) = compare_generations({1: plan}, [reducing(step) for number in (3, 4) for step in recorded(plan, number)])

    taken = {each.segment.layers.start: each.end_s - each.start_s for each in found.predicted.sync.reductions}
    assert taken == {0: pytest.approx(3.0), 2: pytest.approx(4.0)}


def test_a_step_that_a_worker_did_not_finish_is_left_out() -> None:
    plan = planned()
    whole, broken = recorded(plan, 3), recorded(plan, 4)[:3]
    assert [step.step for step in measured_steps({1: plan}, whole + broken)] == [3]


def test_records_that_fit_no_plan_are_refused() -> None:
    plan = planned()
    with refused(ConfigError):
        measured_steps({2: plan}, recorded(plan, 3))
    short = [dataclasses.replace(step, operations=step.operations[1:]) for step in recorded(plan, 3)]
    with refused(ConfigError):
        measured_steps({1: plan}, short)


def test_operations_that_take_no_time_have_no_error() -> None:
    plan = planned(split=True)
    (found,) = compare_generations({1: plan}, [step for number in (3, 4) for step in recorded(plan, number)])
    assert all(kind.mean_error == pytest.approx(0, abs=1e-9) for kind in found.kinds)
    still = [
        dataclasses.replace(step, operations=((0.0, 0.0),) * len(step.operations))
        for number in (3, 4)
        for step in recorded(plan, number)
    ]
    (nothing,) = compare_generations({1: plan}, still)
    assert {kind.mean_error for kind in nothing.kinds} == {0.0}


def test_an_unfinished_record_is_cut_off_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    first, second = (recorded(planned(), number)[0] for number in (3, 4))
    path = tmp_path / "timelines" / "worker-0.jsonl"
    TimelineLog(path).append(first)
    with path.open("a") as file:
        file.write('{"generation": 1, "st')
    TimelineLog(path).append(second)
    assert read_recorded_steps(path.parent) == [first, second]
    path.write_text(path.read_text().replace('"vote_s"', '"vote"', 1))
    with refused(ConfigError):
        read_recorded_steps(path.parent)
