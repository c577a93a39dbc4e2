"""The tables and the picture of docs/paper.md, from made-up results."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from benchmarks import paper
from tests.simulate.live import live_at

POLICIES = ("chameleon", "oobleck", "recycle", "paper")
FOUND = [
    paper.Found(
        "ours",
        interval,
        returns,
        seed,
        {policy: [0.9 - 0.1 * number - 0.02 * seed] * 6 for number, policy in enumerate(POLICIES)},
        {policy: 0.8 / (number + 1) for number, policy in enumerate(POLICIES)},
        {policy: int(policy == "oobleck") for policy in POLICIES},
    )
    for interval, returns in (("10 minutes", False), ("1 hour", False), ("6 hours", False), ("1 hour", True))
    for seed in (0, 1)
]


def test_averages_are_by_those_of_each_baseline() -> None:
    rows = list(paper._average_table(FOUND))
    assert rows[2] == "| 10 minutes | lost for good | 80.0% | 2.000 | 3.000 | 4.000 | oobleck 2 |"
    assert rows[-1].startswith("| 1 hour | back after 2.5 intervals | 80.0% |")


def test_losses_are_single_workers_at_even_intervals() -> None:
    for_good, back = (paper._trace(600.0, 3, returns=returns) for returns in (False, True))
    assert [event.time_s for event in for_good.events] == [600.0 * number for number in range(1, 7)]
    assert len({event.workers for event in for_good.events}) == 6
    assert len(live_at(for_good, for_good.duration_s)) == 26
    assert [e.workers for e in back.events if e.kind == "lost"] == [e.workers for e in for_good.events]
    assert min(len(live_at(back, event.time_s)) for event in back.events) == 29
