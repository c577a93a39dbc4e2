"""The losses of the benchmark of decisions."""

from __future__ import annotations

import pytest

from benchmarks.decision import context, losses_of


@pytest.mark.parametrize(("part", "number"), [("single", 1), ("two", 2), ("prepared", 1)])
def test_every_decision_is_on_others(part: str, number: int) -> None:
    lost = [losses_of(part, each) for each in range(32)]
    assert len(set(lost)) == 32
    assert {len(set(each)) for each in lost} == {number}
    now = context(lost[0])
    assert now.lost == tuple(sorted(lost[0]))
    assert len(now.live) == 32 - number


def test_all_of_a_host_are_lost() -> None:
    hosts = [losses_of("host", each) for each in range(4)]
    assert sorted(worker for lost in hosts for worker in lost) == list(range(32))
    for lost in hosts:
        now = context(lost)
        assert len(set(now.costs.cluster.hosts.values())) == 3
