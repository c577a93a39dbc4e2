"""All that is predicted of a step, together."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.schedule import CostModel, list_schedule, replay
from tests.strategies import Planned, Shape, equal_costs, pipelines, planned


@given(planned())
def test_the_parts_add_up(case: Planned) -> None:
    program = list_schedule(case.plan, case.costs)

    found = estimate_step(case.plan, program, case.costs)

    timeline = replay(program, case.costs)
    assert found.timeline == timeline
    assert found.program_s == timeline.step_s
    assert found.step_s == max(timeline.step_s, found.sync.end_s)
    assert found.gap >= -1e-9
    busy_s = math.fsum(timeline.busy_s(worker) for worker in case.plan.workers)
    assert found.bubble == pytest.approx(1 - busy_s / (len(case.plan.workers) * timeline.step_s))


def test_the_bubble_of_1f1b_is_the_known_one() -> None:
    plan = pipelines(Shape(dp=2, pp=4, share=12))
    costs = equal_costs(layers=4, micro_batches=24, workers=8)

    found = estimate_step(plan, list_schedule(plan, costs), costs)

    assert found.bubble == pytest.approx(3 / (12 + 3))
    assert found.gap == pytest.approx(0.0)


def test_an_overfull_worker_is_named_with_the_missing_bytes() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=2))
    costs = equal_costs(layers=2, micro_batches=2, workers=2)
    layers = tuple(dataclasses.replace(layer, param_bytes=10) for layer in costs.workload.layers)
    workers = (
        dataclasses.replace(costs.cluster.workers[0], memory_bytes=10),
        dataclasses.replace(costs.cluster.workers[1], memory_bytes=7),
    )
    costs = CostModel(
        dataclasses.replace(costs.workload, layers=layers),
        Cluster(workers, costs.cluster.intra_host, costs.cluster.inter_host),
    )

    found = estimate_step(plan, list_schedule(plan, costs), costs)

    assert found.over_capacity(costs) == {1: 3}


def test_a_preset_is_estimated_from_end_to_end() -> None:
    """Llama 2 13B on 32 H100: within the range of model FLOPs utilisation that is published for such runs."""
    shape = model_shape("llama2-13b")
    rates = device("h100-80g")
    workload = derive_workload(shape, rates, micro_batch_size=1, micro_batches=128)
    costs = CostModel(workload, rates.cluster(32))
    plan = data_pipeline_plan(layer_costs=workload.layer_times_s, dp=4, pp=8, micro_batches=128)

    found = estimate_step(plan, list_schedule(plan, costs), costs)

    assert found.over_capacity(costs) == {}
    assert found.gap < 0.05
    flops = 6 * shape.num_params * 128 * shape.seq_len
    assert 0.3 < flops / (found.step_s * 32 * 989.4e12) < 0.6


def test_estimates_and_presets_are_imported_at_once() -> None:
    code = (
        "import sys; import chameleon_ft.cost.step, chameleon_ft.cost.derive; "
        "print(sorted({'torch', 'numba', 'pydantic', 'networkx', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
