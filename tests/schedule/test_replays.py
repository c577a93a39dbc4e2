"""Replays of orders that differ little from others are those of the whole orders."""

from __future__ import annotations

import random

import numpy as np
import pytest

from chameleon_ft.plan import Hop, LayerRange
from chameleon_ft.schedule import InFlightLimit
from chameleon_ft.schedule._kernels.replays import _replay_changed, longest_path
from chameleon_ft.schedule._network import NetworkBuilder
from chameleon_ft.schedule._part import Part
from chameleon_ft.schedule._trials import Trials
from tests.schedule.test_pipelines import some_costs


@pytest.mark.parametrize("seed", range(60))
def test_only_what_comes_after_a_change_is_replayed(seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.randint(2, 6)
    costs = some_costs(rng, depth, depth)
    hops = tuple(Hop(stage, LayerRange(stage, stage + 1)) for stage in range(depth))
    builder = NetworkBuilder(costs, split_backward=seed % 2 == 0)
    trials = Trials(builder, tuple(range(depth)), dict.fromkeys(range(depth), InFlightLimit(depth, 2 * depth)))
    found = Part(trials, [hops], [0] * rng.randint(2, 9)).best[1]
    network = found.network
    starts_s, ends_s = longest_path(network.operations, found.codes, network.first)
    waiting = np.full(len(ends_s), -1)
    deadlocks = 0
    for _ in range(20):
        worker = rng.randrange(depth)
        low, high = sorted(rng.sample(range(network.first[worker], network.first[worker + 1]), 2))
        codes = found.codes.copy()
        codes[[low, high]] = codes[[high, low]]
        wanted_starts_s, wanted_s = longest_path(network.operations, codes, network.first)
        own_starts_s, own_s = np.zeros(len(ends_s)), np.zeros(len(ends_s))

        from_s = starts_s[found.codes[low]]
        _replay_changed(
            network.operations, codes, network.first, from_s, starts_s, ends_s, waiting, own_starts_s, own_s
        )

        assert own_s.tolist() == wanted_s.tolist()
        later = (starts_s >= from_s) & (wanted_s >= 0)
        assert own_starts_s[later].tolist() == wanted_starts_s[later].tolist()
        # As it was, so that the next replay can begin.
        assert (waiting == -1).all()
        deadlocks += bool((wanted_s < 0).any())
    assert deadlocks
