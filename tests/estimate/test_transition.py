"""Costs of a change of plan."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from chameleon_ft.errors import ConfigError
from chameleon_ft.estimate import StallModel, TransitionEstimate, state_bytes
from chameleon_ft.workload import LayerCost

STALL = StallModel(detect_s=0.125, stop_s=0.25, decide_s=0.5, regroup_s=1.0)


def test_rerouting_costs_the_phases_of_the_stall_and_the_step_that_is_repeated() -> None:
    found = TransitionEstimate(phases=STALL, transfer_s=0.0, repeat_s=4.0)

    assert (found.stall_s, found.lost_s) == (1.875, 5.875)


def test_what_moves_adds_to_the_stall() -> None:
    found = TransitionEstimate(phases=STALL, transfer_s=2.0, repeat_s=0.0)

    assert (found.stall_s, found.lost_s) == (3.875, 3.875)


def test_parameters_and_optimizer_state_move_and_gradients_do_not() -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=2, gradient_bytes=4, optimizer_bytes=12)

    assert state_bytes(layer) == 14


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StallModel(detect_s=-1.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0), "detect_s must be zero or a"),
        (lambda: StallModel(detect_s=0.0, stop_s=math.nan, decide_s=0.0, regroup_s=0.0), "stop_s"),
        (lambda: TransitionEstimate(phases=STALL, transfer_s=-1.0, repeat_s=0.0), "transfer_s must be zero or a"),
        (lambda: TransitionEstimate(phases=STALL, transfer_s=0.0, repeat_s=math.inf), "repeat_s"),
    ],
)
def test_what_cannot_be_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
