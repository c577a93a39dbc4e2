"""The default effort beside a complete search, on clusters small enough for it, with memory that forbids much."""

from __future__ import annotations

import random

import pytest

from chameleon_ft.schedule import CostModel
from chameleon_ft.search import InfeasibleError, find_plan
from tests.search.instances import instance


def _tiny(seed: int) -> CostModel:
    rng = random.Random(seed)
    workers, layers, micro_batches = rng.randint(2, 5), rng.randint(2, 5), rng.randint(1, 8)
    return instance(
        rng, workers=workers, layers=layers, micro_batches=micro_batches, kinds=rng.randint(1, 2), memory=True
    )


def _small(seed: int) -> CostModel:
    rng = random.Random(seed)
    workers, layers, micro_batches = rng.randint(4, 10), rng.randint(6, 12), rng.randint(4, 24)
    kinds = rng.choice([1, 1, 2])
    return instance(rng, workers=workers, layers=layers, micro_batches=micro_batches, kinds=kinds, memory=True)


@pytest.mark.parametrize("costs", [*map(_tiny, range(1, 60)), *map(_small, (37, 38, 53, 80, 89))])
def test_it_finds_the_best_plan(costs: CostModel) -> None:
    try:
        best_s = find_plan(costs, effort=None).best.step_s
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            find_plan(costs)
        return
    # A plan this close to its bound is good enough.
    assert find_plan(costs).best.step_s <= best_s * (1 + 5e-4)
