"""Real runs that lose all holders of a layer, without any checkpoint: snapshots in memory bring its state back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Parallel, Recovery, Snapshots
from tests.harness import Ended, assert_as_the_plain_loop, fails, small_config, train_here

pytestmark = pytest.mark.multiprocess

EVERY_THIRD = Snapshots(every=3)


def train(directory: Path, *, dp: int, pp: int, **changes: Any) -> Ended:
    fields = {"workers": dp * pp, "parallel": Parallel(dp=dp, pp=pp), "snapshots": EVERY_THIRD, **changes}
    return train_here(small_config(directory, **fields), directory / "run")


def assert_back_by(ended: Ended, most: int) -> None:
    """Check that the run has gone back to a snapshot, by a few steps, and that losses are those of the plain loop."""
    assert ended.code == 0
    last = ended.failures[-1]
    assert last.policy == "snapshot"
    assert 0 <= last.step - last.resume_step <= most
    assert ended.summary["samples_repeated"] == (len(ended.steps) - len(set(ended.steps))) * 12
    assert_as_the_plain_loop(ended)


def test_all_holders_of_a_layer_are_killed(tmp_path: Path) -> None:
    failures = tuple(fails(worker, step=7, phase="sync") for worker in (1, 3))
    ended = train(tmp_path, dp=2, pp=2, failures=failures)
    assert ended.lost == {1, 3}
    assert_back_by(ended, 3)
    assert ended.failures[-1].resume_step > 0
    assert [event["step"] for event in ended.events("checkpoint")] == [10], "there is only the one at the end"


def test_nothing_need_be_configured_for_that(tmp_path: Path) -> None:
    failures = tuple(fails(worker, step=7, phase="sync") for worker in (1, 3))
    ended = train(tmp_path, dp=2, pp=2, snapshots=Snapshots(), failures=failures)
    assert ended.lost == {1, 3}
    taken = [event["step"] for event in ended.events("snapshot")]
    assert ended.failures[-1].resume_step in {0, *taken}, "a busy machine may not have completed one"
    assert_back_by(ended, 7)
    assert not ended.events("snapshots_off")


def test_parity_brings_back_what_was_lost_while_a_snapshot_was_under_way(tmp_path: Path) -> None:
    snapshots = Snapshots(every=3, mode="parity", group=3)
    ended = train(tmp_path, dp=1, pp=4, snapshots=snapshots, failures=(fails(2, step=6, phase="snapshot"),))
    assert_back_by(ended, 3)
    taken = [event["step"] for event in ended.events("snapshot")]
    assert ended.failures[-1].resume_step in taken


@pytest.mark.each_kind
def test_slices_without_owner_come_back(tmp_path: Path) -> None:
    parallel = Parallel(dp=3, pp=2, optimizer_redundancy=1)
    ended = train(tmp_path, dp=3, pp=2, parallel=parallel, failures=(fails(3, step=7, phase="gather"),))
    assert "the optimizer's state of layers 2-3 is lost" in ended.failures[-1].action
    assert_back_by(ended, 3)


def test_a_loss_on_the_way_back_leads_to_the_same_snapshot(tmp_path: Path) -> None:
    failures = (fails(1, step=7), fails(4, step=7), fails(5, step=1, phase="confirm"))
    ended = train(tmp_path, dp=2, pp=3, failures=failures, recovery=Recovery(policy="reroute", salvage=False))
    assert ended.lost == {1, 4, 5}
    assert_back_by(ended, 3)
