"""Costs of a change of plan."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from chameleon_ft.cost.transition import ConnectionModel, StallModel, TransitionEstimate, received_layers, state_bytes
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.workload import LayerCost, Workload
from tests.golden import refused

STALL = StallModel(detect_s=0.125, stop_s=0.25, decide_s=0.5, regroup_s=1.0)


def test_rerouting_costs_the_phases_of_the_stall_and_the_step_that_is_repeated() -> None:
    found = TransitionEstimate(phases=STALL, transfer_s=0.0, repeat_s=4.0)

    assert (found.stall_s, found.lost_s) == (1.875, 5.875)


def test_what_moves_adds_to_the_stall() -> None:
    found = TransitionEstimate(phases=STALL, transfer_s=2.0, repeat_s=0.0)

    assert (found.stall_s, found.lost_s) == (3.875, 3.875)


def test_new_communicators_take_a_time_of_their_own_and_one_for_each() -> None:
    assert ConnectionModel.fitted([(0, 0.1)]) is None, "a worker that keeps all forms none"
    model = ConnectionModel.fitted([(0, 0.0), (2, 0.34), (4, 0.38), (4, 0.38), (8, 0.46)])
    assert model is not None
    assert [model.connect_s(number) for number in (0, 2, 16)] == pytest.approx([0.0, 0.34, 0.62])
    assert ConnectionModel.fitted([(3, 0.5), (3, 0.25)]) == ConnectionModel(creation_s=0.375, first_use_s=0.0)
    shrinking = ConnectionModel.fitted([(2, 0.5), (6, 0.25)])
    assert shrinking == ConnectionModel(creation_s=0.375, first_use_s=0.0), "more never take less time"


def test_parameters_and_optimizer_state_move_and_gradients_do_not() -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=2, gradient_bytes=4, optimizer_bytes=12)

    assert state_bytes(layer) == 14


@pytest.mark.parametrize(
    "build",
    [
        lambda: StallModel(detect_s=-1.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0),
        lambda: StallModel(detect_s=0.0, stop_s=math.nan, decide_s=0.0, regroup_s=0.0),
        lambda: TransitionEstimate(phases=STALL, transfer_s=-1.0, repeat_s=0.0),
        lambda: TransitionEstimate(phases=STALL, transfer_s=0.0, repeat_s=math.inf),
    ],
)
def test_what_cannot_be_is_refused(build: Callable[[], object]) -> None:
    with refused(ConfigError):
        build()


@pytest.mark.parametrize(("owners", "expected"), [(None, (12, 12)), (2, (4 + 8, 4 + 4)), (1, (4 + 4, 4 + 2))])
def test_a_new_holder_receives_its_share_of_the_optimizers_state(owners: int | None, expected: tuple[int, int]) -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    both, second = (LayerRange(0, 2),), (LayerRange(1, 2),)
    placement = Placement(2, {0: both, 1: both, 2: second, 3: second})
    received = received_layers(Workload((layer, layer), 4, 1, owners=owners), placement)
    assert tuple(map(state_bytes, received)) == expected
