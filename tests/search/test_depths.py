"""Which depths are tried out, and what bounds think likely."""

from __future__ import annotations

import math

import pytest

from chameleon_ft.presets import derive_workload, device, model_shape
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import find, find_plan
from chameleon_ft.search._depths import Depth, depths, of_least_time, promising
from chameleon_ft.search._kinds import Crew
from chameleon_ft.search._sync import LeastSync
from chameleon_ft.search._timed import Timer


@pytest.fixture(scope="module")
def costs() -> CostModel:
    workload = derive_workload(model_shape("qwen2.5-7b"), device("h100-80g"), micro_batch_size=1, micro_batches=64)
    return CostModel(workload, device("h100-80g").cluster(16, workers_per_host=8).without([0]))


def timers(costs: CostModel) -> list[Timer]:
    return [Timer(costs, Crew.of(costs.cluster), split_backward=split) for split in (True, False)]


def test_few_depths_of_least_time_and_different_numbers_are_promising(costs: CostModel) -> None:
    every = depths(costs, timers(costs), math.inf)
    assert all(each.numbers[0] * each.depth <= 15 <= each.numbers[1] * each.depth for each in every)
    few = promising(every, effort=160_000, fewest=1)
    assert few[0].time_s == min(each.time_s for each in every)
    assert all(each.formula_s <= each.time_s for each in every)
    beside = [each for each in every if each not in few]
    numbers = {(each.numbers, each.timer.split_backward): each.time_s for each in few}
    for each in beside:
        own_s = numbers.get((each.numbers, each.timer.split_backward), few[-1].time_s)
        assert each.time_s >= own_s, "none that is left out would have been better"
    assert len({(each.numbers, each.timer.split_backward) for each in few}) == len(few) > 1
    assert all(each.numbers[0] >= 2 for each in promising(every, effort=160_000, fewest=2))


def test_where_steps_take_longer_than_was_thought_bounds_are_made_again(
    costs: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = find_plan(costs)

    def too_low(possible: list[Depth], count: int) -> list[tuple[float, Depth]]:
        return [(time_s / 2, each) for time_s, each in of_least_time(possible, count)]

    asked: list[float] = []

    class Noted(LeastSync):
        def __init__(self, costs: CostModel, most_s: float) -> None:
            asked.append(most_s)
            super().__init__(costs, most_s)

    monkeypatch.setattr(find, "of_least_time", too_low)
    monkeypatch.setattr(find, "LeastSync", Noted)
    found = find_plan(costs)
    assert asked[0] < usual.bound_s, "too little time for any plan"
    assert found.bound_s <= asked[-1]
    assert found.bound_s == pytest.approx(usual.bound_s, rel=0.02)
