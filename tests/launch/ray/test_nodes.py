"""The nodes that a run asks Ray for."""

from __future__ import annotations

from typing import Any

import pytest

from chameleon_ft.config import Parallel, TrainConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.ray.cluster import Node, NodeRequest
from chameleon_ft.launch.ray.options import ClusterOptions
from tests.golden import refused

CPUS = [Node(id=str(number), address=f"10.0.0.{number}", resources={"CPU": 8.0}) for number in range(1, 4)]
GPUS = [Node(id="4", address="10.0.0.4", resources={"CPU": 32.0, "GPU": 4.0})]


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"workers": 8, "parallel": Parallel(dp=4, pp=2), **changes})


def options(**changes: Any) -> ClusterOptions:
    return ClusterOptions(**changes)


def test_workers_on_cpus_are_spread_over_the_nodes_that_have_some() -> None:
    head = Node(id="0", address="10.0.0.0", resources={})
    request = NodeRequest.of(config(), options(), [head, *CPUS])
    assert request == NodeRequest(num_nodes=3, workers_per_node=3, resources={"CPU": 3.0})


def test_each_accelerator_of_a_node_has_a_worker() -> None:
    request = NodeRequest.of(config(device="cuda"), options(), [*CPUS, *GPUS])
    assert request == NodeRequest(num_nodes=2, workers_per_node=4, resources={"CPU": 4.0, "GPU": 4.0})


def test_the_number_of_workers_of_a_node_and_its_resources_may_be_given() -> None:
    given = options(workers_per_node=2, cpus_per_worker=0.5, resources={"trainer": 1.0})
    request = NodeRequest.of(config(), given, CPUS)
    assert request == NodeRequest(num_nodes=4, workers_per_node=2, resources={"CPU": 1.0, "trainer": 1.0})
    assert not request.is_met_by(CPUS[0])
    assert request.is_met_by(Node(id="5", address="10.0.0.5", resources={"CPU": 1.0, "trainer": 2.0}))


def nodes(**amounts: list[float]) -> list[Node]:
    """Return nodes with these amounts of each resource."""
    each = [dict(zip(amounts, column, strict=True)) for column in zip(*amounts.values(), strict=True)]
    return [Node(id=str(index), address=f"10.0.1.{index}", resources=found) for index, found in enumerate(each)]


@pytest.mark.parametrize(
    ("cluster", "changes", "given", "expected"),
    [
        (nodes(CPU=[1, 8, 8]), {}, {}, (2, 4)),
        (nodes(CPU=[2, 2, 2]), {}, {}, (3, 3)),
        (nodes(CPU=[8, 8, 8, 8], trainer=[1, 0, 1, 0]), {}, {"resources": {"trainer": 1.0}}, (2, 4)),
        (nodes(CPU=[4, 4, 4]), {}, {"cpus_per_worker": 2.0, "workers_per_node": None}, (3, 3)),
        (nodes(CPU=[0, 0]), {}, {"cpus_per_worker": 0.0, "resources": {"node": 1.0}}, (1, 8)),
        (nodes(GPU=[8, 4]), {"device": "cuda"}, {}, (1, 8)),
        (nodes(GPU=[2, 4, 4]), {"device": "cuda"}, {}, (2, 4)),
        (nodes(GPU=[6, 3, 3]), {"device": "cuda"}, {}, (3, 3)),
        (nodes(GPU=[8, 2], trainer=[0, 1]), {"device": "cuda"}, {"resources": {"trainer": 1.0}}, (4, 2)),
    ],
)
def test_workers_have_a_place_on_nodes_that_differ(
    cluster: list[Node], changes: dict[str, Any], given: dict[str, Any], expected: tuple[int, int]
) -> None:
    request = NodeRequest.of(config(**changes), options(**given), cluster)
    assert (request.num_nodes, request.workers_per_node) == expected


def test_without_accelerators_their_number_is_not_guessed() -> None:
    with refused(ConfigError):
        NodeRequest.of(config(device="cuda"), options(), CPUS)


def test_what_a_cluster_lacks_is_named() -> None:
    request = NodeRequest.of(config(device="cuda"), options(workers_per_node=4), GPUS)
    assert request.lack([*CPUS[:1], *GPUS]) == (
        "2 nodes with 4 CPU and 4 GPU each: 1 of its 2 nodes have that (10.0.0.1 has only 8 CPU and 0 GPU)"
    )
    assert request.lack([*GPUS, *GPUS]).endswith("2 of its 2 nodes have that, but other work uses some of it")
    assert request.lack([]) == "2 nodes with 4 CPU and 4 GPU each: 0 of its 0 nodes have that"
    assert request.lack([*CPUS, *CPUS]).endswith("10.0.0.1 has only 8 CPU and 0 GPU; 2 more)")


@pytest.mark.parametrize(
    "changes",
    [
        {"workers_per_node": 0},
        {"cpus_per_worker": -1.0},
        {"wait_s": -1.0},
        {"resources": {"GPU": 1.0}},
        {"resources": {"trainer": 0.0}},
        {"resources": {"NPU": 1.0}},
        {"resources": {"object_store_memory": 1.0}},
        {"resources": {"trainer": 1e-6}},
        {"cpus_per_worker": float("nan")},
        {"cpus_per_worker": float("inf")},
        {"cpus_per_worker": 1e-6},
        {"wait_s": float("nan")},
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with refused(ConfigError):
        options(**changes)


def test_something_has_to_be_reserved() -> None:
    with refused(ConfigError):
        NodeRequest.of(config(), options(cpus_per_worker=0.0), CPUS)
