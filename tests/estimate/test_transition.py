"""What it costs to change plans."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.estimate import (
    StallModel,
    Transfer,
    estimate_transition,
    fewest_round_bytes,
    missing_layers,
    state_bytes,
)
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, Workload

STALL = StallModel(detect_s=0.125, stop_s=0.25, decide_s=0.5, regroup_s=1.0)
LAYER = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=2, gradient_bytes=2, optimizer_bytes=12)
COSTS = CostModel(
    Workload((LAYER,) * 9, 1, 1),
    Cluster(
        tuple(Worker(worker, "a" if worker < 2 else "b") for worker in range(4)), Link(1.0, 100.0), Link(2.0, 10.0)
    ),
)


def test_rerouting_costs_the_phases_of_the_stall_and_the_step_that_is_repeated() -> None:
    found = estimate_transition([], COSTS, STALL, into_step_s=4.0)

    assert (found.transfer_s, found.stall_s, found.lost_s) == (0.0, 1.875, 5.875)


def test_rounds_come_one_after_the_other_and_last_as_long_as_their_longest_transfer() -> None:
    rounds = [[Transfer(0, 1, 100), Transfer(2, 3, 300)], [Transfer(1, 2, 100)]]

    found = estimate_transition(rounds, COSTS, STALL, into_step_s=0.0)

    assert found.transfer_s == pytest.approx(max(1 + 1, 1 + 3) + (2 + 10))
    assert found.stall_s == pytest.approx(STALL.total_s + found.transfer_s)


def test_the_worked_example_moves_two_layers() -> None:
    """DESIGN section 7: three workers hold three layers each, a fourth joins."""
    before = Placement(9, {worker: (LayerRange(3 * worker, 3 * worker + 3),) for worker in range(3)})
    slots = {0: (0, 2), 1: (4, 6), 2: (6, 9), 3: (2, 4)}
    after = Placement(9, {worker: (LayerRange(*slot),) for worker, slot in slots.items()})

    missing = missing_layers(before, after)

    assert missing == {0: (), 1: (), 2: (), 3: (2, 3)}
    assert state_bytes(LAYER) == 14
    transfers = [Transfer(0, 3, 14), Transfer(1, 3, 14)]
    assert fewest_round_bytes(transfers) == 28
    assert fewest_round_bytes([]) == 0


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: StallModel(detect_s=-1.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0),
            ConfigError,
            "detect_s must be zero or a positive",
        ),
        (lambda: StallModel(detect_s=0.0, stop_s=math.nan, decide_s=0.0, regroup_s=0.0), ConfigError, "stop_s"),
        (lambda: Transfer(1, 1, 5), PlanError, "cannot send to itself"),
        (lambda: Transfer(0, 1, -5), PlanError, "zero or more bytes"),
        (
            lambda: estimate_transition([[Transfer(0, 1, 1), Transfer(0, 2, 1)]], COSTS, STALL, into_step_s=0.0),
            PlanError,
            "source of two transfers",
        ),
        (
            lambda: estimate_transition([[Transfer(0, 2, 1), Transfer(1, 2, 1)]], COSTS, STALL, into_step_s=0.0),
            PlanError,
            "target of two transfers",
        ),
        (
            lambda: estimate_transition([[Transfer(0, 9, 1)]], COSTS, STALL, into_step_s=0.0),
            ConfigError,
            "worker 9 is not in the cluster",
        ),
        (lambda: estimate_transition([], COSTS, STALL, into_step_s=-1.0), ConfigError, "into_step_s"),
    ],
)
def test_what_cannot_be_is_refused(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()
