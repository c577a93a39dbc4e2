"""Layouts of a cluster: what moves against the transfer of real placements, and detours against rerouted plans."""

from __future__ import annotations

import random

import pytest

from chameleon_ft.cost.step import estimate_step
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Placement, data_pipeline_plan
from chameleon_ft.recovery import LossRisk, reroute, risk_of
from chameleon_ft.recovery.failure_model import host_numbers
from chameleon_ft.schedule import best_program
from chameleon_ft.simulate.by_class.cluster_layout import (
    ClusterLayout,
    arranged,
    layer_rings,
    layout_of_plan,
    layout_step,
    move_to,
)
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, Pipelines
from chameleon_ft.simulate.by_class.step_times import StepTimes
from chameleon_ft.transfer import transfer_s, transfer_to
from tests.golden import refused
from tests.simulate.clusters import costs

HALVES, THIRDS = Cut((3, 6)), Cut((2, 4, 6))


def placement(layout: ClusterLayout) -> Placement:
    return Placement(6, {worker: (layers,) for worker, layers in layout.held.items()})


@pytest.mark.parametrize("seed", range(25))
def test_a_move_has_the_bytes_of_a_transfer(seed: int) -> None:
    draw = random.Random(seed)
    model = costs(12)
    before = arranged({HALVES: 3, THIRDS: 2}, range(12))
    lost = draw.sample(range(12), draw.randint(0, 3))
    left = before.without(lost)
    live = [worker for worker in range(12) if worker not in lost]
    halves = draw.randint(0, len(live) // 2)
    after = arranged({HALVES: halves, THIRDS: (len(live) - 2 * halves) // 3}, live, left)
    if not after.pipelines:
        return
    move = move_to(after, left, Pipelines(model, split_backward=False))
    transfer = transfer_to(placement(left), placement(after), live=live, layers=model.workload.layers)
    assert move is not None
    moved_bytes, seconds = move.moved_bytes, move.transfer_s
    assert moved_bytes == transfer.total_bytes
    # Rounds may take longer than the worker that sends or receives most, and sources than layers one by one.
    took_s = transfer_s(transfer.rounds, model.cluster)
    assert took_s * 0.45 <= seconds <= took_s * 1.001


def test_whole_pipelines_stay() -> None:
    before = arranged({HALVES: 3}, range(6))
    after = arranged({HALVES: 2, THIRDS: 1}, range(7), before)
    assert set(before.pipelines[:2]) <= set(after.pipelines)


def test_a_layer_without_a_holder_cannot_move() -> None:
    before = arranged({HALVES: 1}, range(4))
    pipelines = Pipelines(costs(4), split_backward=False)
    assert move_to(arranged({HALVES: 1}, [1, 2]), before.without([0]), pipelines) is None


def test_a_layout_without_holders_has_no_step() -> None:
    times = StepTimes(Pipelines(costs(4), split_backward=False))
    layout = arranged({HALVES: 2}, range(4))
    speeds = dict.fromkeys(range(4), 1.0)
    assert layout_step(layout.without([0]), times, speeds) is not None
    assert layout_step(layout.without([0, 2]), times, speeds) is None


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("lost", [[0], [1], [2, 7], [4, 5]])
def test_detours_take_about_as_long_as_the_rerouted_plan(lost: list[int], split_backward: bool) -> None:
    model = costs(24, micro_batches=96)
    layer_costs = [1.0] * 6
    plan = data_pipeline_plan(layer_costs=layer_costs, dp=12, pp=2, micro_batches=96, split_backward=split_backward)
    times = StepTimes(Pipelines(model, split_backward=split_backward))
    layout = layout_of_plan(plan).without(lost)
    step = layout_step(layout, times, dict.fromkeys(range(24), 1.0))
    rerouted = reroute(plan, lost, model)
    program = best_program(rerouted, model).program
    real = estimate_step(rerouted, program, model)
    assert step is not None
    assert step.step_s == pytest.approx(real.step_s, rel=0.05)


def test_a_plan_with_detours_is_no_start() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=3, pp=2, micro_batches=24)
    with refused(PlanError):
        layout_of_plan(reroute(plan, [1], costs(6)))


@pytest.mark.parametrize("owners", [None, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_the_risk_of_a_layout_equals_that_of_its_placement(seed: int, owners: int | None) -> None:
    draw = random.Random(seed)
    layout = arranged({HALVES: 2, THIRDS: 2}, range(10)).without(draw.sample(range(10), draw.randint(0, 5)))
    hosts = {worker: f"host {worker // 3}" for worker in range(12) if worker in layout.used or worker > 9}
    held = placement(layout)
    rings = layer_rings(layout, host_numbers(hosts), 6)
    assert (rings is None) == bool(held.unheld_layers)
    if rings is not None:
        numbers, num_hosts = host_numbers(hosts), len(set(hosts.values()))
        found = LossRisk.of_rings(rings, numbers, num_workers=len(hosts), num_hosts=num_hosts, owners=owners)
        assert found == risk_of(held, hosts, owners)
