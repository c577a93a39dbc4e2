"""Workers that hold several stages of one pipeline, where channels run in circles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import best_program, check_program, default_limits, list_schedule, replay
from chameleon_ft.schedule.list_scheduler import Rules, limits_array, schedule_under
from chameleon_ft.schedule.network import builder_of
from chameleon_ft.schedule.records import distinct_paths
from tests.strategies import equal_costs


def interleaved(*, workers: int, rounds: int, micro_batches: int, split_backward: bool = False) -> Plan:
    """Every worker holds every `workers`-th of the layers; each route passes all workers `rounds` times."""
    layers = workers * rounds
    stages = [LayerRange(layer, layer + 1) for layer in range(layers)]
    hops = tuple(Hop(layer % workers, stages[layer]) for layer in range(layers))
    placement = Placement(layers, {worker: tuple(stages[worker::workers]) for worker in range(workers)})
    return Plan(placement, tuple(Route(m, hops) for m in range(micro_batches)), split_backward)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("split_backward", [False, True])
def test_enough_micro_batches_keep_interleaved_stages_busy(workers: int, rounds: int, split_backward: bool) -> None:
    micro_batches = 4 * workers
    plan = interleaved(workers=workers, rounds=rounds, micro_batches=micro_batches, split_backward=split_backward)
    costs = equal_costs(layers=workers * rounds, micro_batches=micro_batches, workers=workers)

    best = best_program(plan, costs)

    check_program(best.program, plan)
    # A plain pipeline of stages that are `rounds` times as long waits (workers - 1) of those; interleaved ones less.
    assert best.step_s <= 3 * rounds * (micro_batches + workers - 1)
    assert workers == 1 or best.step_s < 3 * rounds * (micro_batches + workers - 1)


def test_a_dead_end_is_left_by_smaller_limits() -> None:
    plan = interleaved(workers=2, rounds=2, micro_batches=3)
    # A slower second layer lets worker 0 fill every channel before worker 1 sends the first micro-batch back.
    equal = equal_costs(layers=4, micro_batches=3, workers=2)
    layers = tuple(replace(layer, forward_s=2.0 if i == 1 else 1.0) for i, layer in enumerate(equal.workload.layers))
    costs = replace(equal, workload=replace(equal.workload, layers=layers))
    network = builder_of(plan, costs).network(*distinct_paths(route.hops for route in plan.routes))
    limits = limits_array(plan.workers, default_limits(plan))
    for gradients_only in (False, True):
        rules = Rules(limits=limits, forward_first=True, gradients_only=gradients_only)
        assert schedule_under(network, rules, network.by_priority) is None

    program = list_schedule(plan, costs)

    check_program(program, plan)
    one_by_one_s = sum(network.slots["forward_s"] + network.slots["backward_s"])
    assert replay(program, costs).step_s < 0.75 * one_by_one_s
