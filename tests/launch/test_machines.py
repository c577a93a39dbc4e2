"""The machines that a scheduler is asked for."""

from __future__ import annotations

import pytest

from chameleon_ft.config import Control, Parallel, TrainConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.slurm import Machines, with_reachable_host
from tests.golden import refused

CONFIG = TrainConfig(workers=12, parallel=Parallel(dp=4, pp=3))


@pytest.mark.parametrize(("nodes", "workers", "expected"), [(None, 4, 3), (None, 8, 2), (None, 16, 1), (5, 4, 5)])
def test_there_are_as_many_as_the_workers_need(nodes: int | None, workers: int, expected: int) -> None:
    assert Machines.for_run(CONFIG, nodes=nodes, workers_per_node=workers) == Machines(expected, workers)


@pytest.mark.parametrize(("nodes", "workers"), [(2, 4), (0, 4), (None, 0)])
def test_too_few_are_refused(nodes: int | None, workers: int) -> None:
    with refused(ConfigError):
        Machines.for_run(CONFIG, nodes=nodes, workers_per_node=workers)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "auto"), ("::1", "auto"), ("localhost", "auto"), ("auto", "auto"), ("ib0", "ib0")],
)
def test_the_coordinator_is_reached_wherever_it_is(host: str, expected: str) -> None:
    config = CONFIG.model_copy(update={"control": Control(host=host, port=29400)})
    assert with_reachable_host(config, chooser="Slurm").control == Control(host=expected, port=29400)


def test_the_address_of_one_machine_is_refused() -> None:
    config = CONFIG.model_copy(update={"control": Control(host="10.0.0.1")})
    with refused(ConfigError):
        with_reachable_host(config, chooser="Slurm")
