"""Descriptions of plans."""

from __future__ import annotations

import pytest

from chameleon_ft.coordinator.decisions.recovery_plan import describe_pipelines
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route


def plan(*cuts: tuple[int, ...], detours: int = 0) -> Plan:
    """Pipelines with these numbers of layers in their stages; with `detours` of the second through the first's end."""
    ways: list[tuple[Hop, ...]] = []
    worker = 0
    for cut in cuts:
        hops, start = [], 0
        for layers in cut:
            hops.append(Hop(worker, LayerRange(start, start + layers)))
            worker, start = worker + 1, start + layers
        ways.append(tuple(hops))
    held = {hop.worker: (hop.layers,) for hops in ways for hop in hops}
    ways += [(*ways[1][:-1], ways[0][-1]) for _ in range(detours)]
    return Plan(Placement(sum(cuts[0]), held), tuple(map(Route, range(len(ways)), ways)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (plan((6,)), "1 pipeline of 1 stage"),
        (plan((3, 3), (3, 3)), "2 pipelines of 2 stages"),
        (plan((6,), (2, 2, 2), (2, 2, 2)), "3 pipelines: 2 of 3 stages, 1 of 1 stage"),
        (plan((3, 3), (3, 3), detours=1), "2 pipelines of 2 stages; 1 detour"),
    ],
)
def test_pipelines_are_described(given: Plan, text: str) -> None:
    assert describe_pipelines(given) == text
