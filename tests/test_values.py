"""Errors, workloads and clusters."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from chameleon_ft import errors
from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ChameleonError, ConfigError, DataError, NoHolderError, PlanError
from chameleon_ft.workload import LayerCost, TiedParameters, Workload
from tests.golden import refused

LAYER = LayerCost("block 3", 1.0, 0.75, 0.5)
LINK = Link(0.5, 100.0)


def test_one_tree_holds_every_error() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), ChameleonError)
    assert issubclass(DataError, ConfigError)
    assert issubclass(NoHolderError, PlanError)
    assert all(name in (errors.__doc__ or "") for name in errors.__all__)


def test_a_missing_holder_keeps_its_layers_across_processes() -> None:
    error = pickle.loads(pickle.dumps(NoHolderError([5, 2])))

    assert error.layers == (2, 5)
    assert str(error).startswith("no live worker holds layers 2, 5;")
    assert str(NoHolderError([4])).startswith("no live worker holds layer 4;")


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerCost("a", -1.0, 0, 0),
        lambda: LayerCost("a", 0, math.nan, 0),
        lambda: TiedParameters((1,), 4),
        lambda: TiedParameters((2, 1), 4),
        lambda: TiedParameters((0, 1), -4),
        lambda: Workload((LAYER,), 1, 1, tied=(TiedParameters((0, 1), 4),)),
        lambda: LayerCost("a", 0, 0, math.inf),
        lambda: LayerCost("a", 0, 0, 0, output_bytes=-1),
        lambda: Workload((), 1, 1),
        lambda: Workload((LAYER,), 0, 1),
        lambda: Workload((LAYER,), 1, 0),
        lambda: Workload((LAYER,), 1, 1, -0.1),
        lambda: Link(-1, 1),
        lambda: Link(0, 0),
        lambda: Link(0, math.nan),
        lambda: Worker(-1, "a"),
        lambda: Worker(1, "a", speed=0),
        lambda: Worker(1, "a", memory_bytes=0),
        lambda: Cluster((Worker(1, "a"), Worker(1, "b")), LINK, LINK),
        lambda: Cluster((), LINK, LINK).worker(0),
    ],
)
def test_values_say_what_is_wrong_with_them(make: Any) -> None:
    with refused(ConfigError):
        make()


def test_a_backward_is_both_halves() -> None:
    assert LAYER.backward_s == 1.25
    assert Workload((LAYER,), 8, 3).samples == 24


def test_a_cluster_without_some_workers() -> None:
    cluster = Cluster(tuple(Worker(i, "ab"[i // 2]) for i in range(4)), Link(0.0, math.inf), LINK)

    left = cluster.without([1, 9])

    assert [worker.id for worker in left.workers] == [0, 2, 3]
    assert left.link(2, 3) == Link(0.0, math.inf)
    assert left.link(0, 3) == LINK
    assert LINK.message_s(50) == 1.0
    assert pickle.loads(pickle.dumps(left)) == left
