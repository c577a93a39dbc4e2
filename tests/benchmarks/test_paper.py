"""The tables and the picture of docs/paper.md, from made-up results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from benchmarks import paper
from benchmarks._paper_picture import draw
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


def test_throughput_after_recovery_is_that_of_the_longest_interval() -> None:
    rows = list(paper._after_table(FOUND))
    assert len(rows) == 2 + 6
    assert rows[2] == "| 1 | 96.9% | 89.0% (88.0% to 90.0%) | 79.0% (78.0% to 80.0%) | 69.0% (68.0% to 70.0%) | " \
        "59.0% (58.0% to 60.0%) |"  # fmt: skip


def test_averages_are_by_those_of_each_baseline() -> None:
    rows = list(paper._average_table(FOUND))
    assert rows[2] == "| 10 minutes | lost for good | 80.0% | 2.000 | 3.000 | 4.000 | oobleck 2 |"
    assert rows[-1].startswith("| 1 hour | back after 2.5 intervals | 80.0% |")


def test_a_table_takes_the_place_of_the_old_one() -> None:
    page = "a\n<!-- t -->\nold\n<!-- end of t -->\nb\n"
    assert paper._replaced(page, "t", ["new", "er"]) == "a\n<!-- t -->\nnew\ner\n<!-- end of t -->\nb\n"
    with pytest.raises(SystemExit, match="no place for the table 'u'"):
        paper._replaced(page, "u", [])


def test_losses_are_single_workers_at_even_intervals() -> None:
    for_good, back = (paper._trace(600.0, 3, returns=returns) for returns in (False, True))
    assert [event.time_s for event in for_good.events] == [600.0 * number for number in range(1, 7)]
    assert len({event.workers for event in for_good.events}) == 6
    assert len(live_at(for_good, for_good.duration_s)) == 26
    assert [e.workers for e in back.events if e.kind == "lost"] == [e.workers for e in for_good.events]
    assert min(len(live_at(back, event.time_s)) for event in back.events) == 29


def test_the_picture_can_be_read(tmp_path: Path) -> None:
    draw(
        tmp_path / "a.svg",
        after=paper._after(FOUND),
        ratios=paper._ratios(FOUND),
        published={"oobleck": 1.229, "recycle": 1.355},
        published_loss=0.11,
    )
    ElementTree.parse(tmp_path / "a.svg")
    assert "<!-- published: up to 1.229 -->" in (tmp_path / "a.svg").read_text()
