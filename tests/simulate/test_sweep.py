"""Sweeps over one quantity, and the best policy at each value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.run import SWEPT, Lead, Point, Scene, Sweep, simulate, sweep, varied
from tests.golden import refused
from tests.simulate.clusters import cluster, random_trace, workload

WORKERS = 40


@pytest.fixture
def scene() -> Scene:
    trace = random_trace(1, workers=WORKERS, per_host=4)
    return Scene(trace, workload(micro_batches=80), cluster(WORKERS, per_host=4))


def test_each_quantity_is_varied_alone(scene: Scene) -> None:
    faster = varied(scene, "rate", 4.0)
    assert faster.trace.duration_s == scene.trace.duration_s / 4
    assert (faster.workload, faster.cluster) == (scene.workload, scene.cluster)
    smaller = varied(scene, "workers", 24.0)
    assert (smaller.trace.workers, len(smaller.cluster.workers), smaller.workload) == (24, 24, scene.workload)
    assert {worker for event in smaller.trace.events for worker in event.workers} <= set(range(24))
    roomy = varied(scene, "memory", 48.0)
    assert {worker.memory_bytes for worker in roomy.cluster.workers} == {48 * 10**9}
    assert (roomy.trace, roomy.workload) == (scene.trace, scene.workload)
    wider = varied(scene, "bandwidth", 2.0)
    for own, old in ((wider.cluster.intra_host, scene.cluster.intra_host),
                     (wider.cluster.inter_host, scene.cluster.inter_host)):  # fmt: skip
        assert own == replace(old, bytes_per_s=2 * old.bytes_per_s)
    longer = varied(scene, "micro-batches", 120.0)
    assert longer == replace(scene, workload=replace(scene.workload, micro_batches=120))


@pytest.mark.parametrize("name", SWEPT)
def test_nothing_is_varied_below_zero(scene: Scene, name: str) -> None:
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with refused(ConfigError):
            varied(scene, name, value)


def test_quantities_that_cannot_be_varied_are_refused(scene: Scene) -> None:
    with refused(ConfigError):
        varied(scene, "speed", 1.0)
    with refused(ConfigError):
        sweep(scene, "rate", [1.0, 1.0], ["restart"])
    with refused(ConfigError):
        sweep(scene, "rate", [], ["restart"])


def test_a_point_is_a_simulation_of_its_own(scene: Scene) -> None:
    told: set[tuple[float, str]] = set()
    found = sweep(
        scene, "rate", [5.0, 1.0], ["drop-replica", "restart"],
        progress=lambda value, policy, share: told.add((value, policy)),
    )  # fmt: skip
    assert [point.value for point in found.points] == [1.0, 5.0]
    assert found.policies == ("drop-replica", "restart")
    for point in found.points:
        alone = varied(scene, "rate", point.value)
        assert point.results == simulate(alone.trace, alone.workload, alone.cluster, ["drop-replica", "restart"])
    assert told == {(value, policy) for value in (1.0, 5.0) for policy in ("drop-replica", "restart")}
    assert [point["value"] for point in found.to_json()["points"]] == [1.0, 5.0]  # type: ignore[attr-defined]


def test_a_value_where_nothing_fits_has_a_reason_instead_of_results(scene: Scene) -> None:
    found = sweep(scene, "memory", [0.001, 24.0], ["restart"])
    none, some = found.points
    assert none.results is None
    assert "fit the memory" in none.misfit
    assert some.results is not None
    assert found.leads(["restart"]) == (Lead("restart", 24.0, 24.0),)
    assert found.policies == ("restart",)


def test_leads_follow_the_most_samples(scene: Scene) -> None:
    results = simulate(scene.trace, scene.workload, scene.cluster, ["chameleon", "restart"])
    one, other = results.policies["chameleon"], results.policies["restart"]
    assert one.samples > other.samples
    swapped = replace(results, policies={"chameleon": other, "restart": one})
    points = (Point(1.0, results), Point(2.0, results), Point(3.0, None, "no"), Point(4.0, swapped))
    found = Sweep("rate", points)
    assert found.leads(["restart", "chameleon"]) == (Lead("chameleon", 1.0, 2.0), Lead("restart", 4.0, 4.0))
    assert found.leads(["restart"]) == (Lead("restart", 1.0, 4.0),)
