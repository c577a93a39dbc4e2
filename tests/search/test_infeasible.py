"""Messages when nothing fits, checked by following their advice."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.workload import LayerCost, Workload

LINK = Link(0.0, math.inf)
LAYERS = tuple(LayerCost(f"layer {n}", 1.0, 1.0, 1.0, param_bytes=100, activation_bytes=10) for n in range(8))


def costs(workers: int, memory: int, layers: tuple[LayerCost, ...] = LAYERS) -> CostModel:
    cluster = Cluster(tuple(Worker(number, "host", memory_bytes=memory) for number in range(workers)), LINK, LINK)
    return CostModel(Workload(layers, 4, 1), cluster)


def refused(model: CostModel) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        find_plan(model)
    return caught.value


@pytest.mark.parametrize(("workers", "memory"), [(1, 400), (2, 300), (3, 250)])
def test_the_workers_it_asks_for_are_enough_and_one_fewer_is_not(workers: int, memory: int) -> None:
    error = refused(costs(workers, memory))
    assert error.layer is None
    assert error.workers_needed is not None
    assert str(error.workers_needed) in str(error)
    find_plan(costs(error.workers_needed, memory))
    refused(costs(error.workers_needed - 1, memory))


@pytest.mark.parametrize(("workers", "memory"), [(1, 400), (2, 300), (3, 50)])
def test_the_bytes_it_asks_for_are_enough_and_fewer_are_not(workers: int, memory: int) -> None:
    error = refused(costs(workers, memory))
    find_plan(costs(workers, memory + error.missing_bytes))
    refused(costs(workers, memory + error.missing_bytes - 1))


@pytest.mark.parametrize("micro_batches", [2, 4, 9])
def test_the_bytes_it_asks_for_hold_the_messages_of_all_micro_batches(micro_batches: int) -> None:
    layers = tuple(dataclasses.replace(layer, output_bytes=7) for layer in LAYERS)

    def with_memory(memory: int) -> CostModel:
        model = costs(3, memory, layers)
        return CostModel(dataclasses.replace(model.workload, micro_batches=micro_batches), model.cluster)

    error = refused(with_memory(250))
    find_plan(with_memory(250 + error.missing_bytes))
    # Where it says that there is room, there is.
    for memory in range(300, 250 + error.missing_bytes, 3):
        assert refused(with_memory(memory)).missing_bytes > 0


def test_memory_is_kept_apart_where_speeds_are_many() -> None:
    # The large worker holds the model alone. It is not taken to be as small as others with about its speed.
    workers = tuple(
        Worker(number, "host", 1.0 + 0.01 * (number % 4), 900 if number == 5 else 50 + number) for number in range(12)
    )
    model = CostModel(Workload(LAYERS, 4, 1), Cluster(workers, LINK, LINK))
    assert 5 in find_plan(model).best.plan.workers


def test_a_layer_that_no_worker_holds_is_named() -> None:
    large = dataclasses.replace(LAYERS[3], name="embedding", param_bytes=1000)
    error = refused(costs(8, 500, (*LAYERS[:3], large)))
    assert error.layer == 3
    assert error.workers_needed is None
    assert "'embedding'" in str(error)
    assert error.missing_bytes == 1000 + 10 - 500


def test_it_crosses_process_boundaries() -> None:
    error = refused(costs(1, 400))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.workers_needed, again.missing_bytes) == (
        str(error),
        error.workers_needed,
        error.missing_bytes,
    )
