"""The neighbours of orders that a local search replays are the changes that it reports."""

from __future__ import annotations

import random

import numpy as np
import pytest

from chameleon_ft.plan import Hop, LayerRange
from chameleon_ft.schedule._kernels.replay import Neighbourhood, changed, longest_path, replay_neighbours
from chameleon_ft.schedule.best import ListSchedules, Problem, _channels_of_operations
from chameleon_ft.schedule.list_scheduler import InFlightLimit
from chameleon_ft.schedule.network import NetworkBuilder
from tests.schedule.test_pipelines import some_costs


def test_each_change_takes_as_long_as_the_changed_orders_do() -> None:
    changes = [
        _check_neighbours(random.Random(seed), split_backward=split) for seed in range(30) for split in (False, True)
    ]
    # Some have none, mostly with fused backward: the operations of a block keep each other in order.
    assert sum(changes) > 200


def _check_neighbours(rng: random.Random, *, split_backward: bool) -> int:
    """Compare the neighbours of one list schedule with the replays of the changed orders; returns their number."""
    depth = rng.randint(2, 6)
    hops = tuple(Hop(stage, LayerRange(stage, stage + 1)) for stage in range(depth))
    costs = some_costs(rng, depth, depth)
    builder = NetworkBuilder(costs, split_backward=split_backward, workers=tuple(range(depth)))
    in_flight_limits = dict.fromkeys(range(depth), InFlightLimit(depth, 2 * depth))
    problem = Problem.of(builder, [hops], [0] * rng.randint(4, 9), in_flight_limits)
    found = ListSchedules(problem).search()
    network = problem.network
    received_in, sent_in = _channels_of_operations(network)

    workers = np.ascontiguousarray(network.slots["worker"])
    limits = problem.largest()
    of = Neighbourhood(workers, network.operations, received_in, sent_in, network.first, limits, split_backward)

    changes, steps_s, sums_s = replay_neighbours(of, found.codes)

    last = network.first[1:] - 1
    for change, step_s, sum_s in zip(changes.tolist(), steps_s, sums_s, strict=True):
        codes = changed(found.codes, *change)
        assert codes.tolist() != found.codes.tolist()
        ends_s = longest_path(network.operations, codes, network.first)[1]
        if ends_s.min() < 0:
            assert step_s == np.inf
            continue
        assert step_s == ends_s.max()
        assert sum_s == pytest.approx(ends_s[codes[last]].sum())
        for start, stop in zip(network.first, network.first[1:], strict=False):
            before, after = found.codes[start:stop], codes[start:stop]
            assert sorted(before) == sorted(after)
            # Messages of a channel keep their order.
            for channels in (received_in, sent_in):
                for channel in set(channels[before].tolist()) - {-1}:
                    assert before[channels[before] == channel].tolist() == after[channels[after] == channel].tolist()
    return len(changes)
