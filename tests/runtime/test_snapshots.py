"""Real runs that lose all holders of a layer, without any checkpoint: snapshots in memory bring its state back."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.config import FailurePhase, Parallel, Snapshots
from tests.harness import Ended, assert_as_the_plain_loop, fails, small_config, train_here

pytestmark = pytest.mark.multiprocess


def assert_back_by(ended: Ended, most: int) -> None:
    """Check that the run has gone back to a snapshot, by a few steps, and that losses are those of the plain loop."""
    assert ended.code == 0
    last = ended.failures[-1]
    assert last.policy == "snapshot"
    assert 0 <= last.step - last.resume_step <= most
    assert_as_the_plain_loop(ended)


@pytest.mark.parametrize("phase", ["forward", "sync"])
def test_all_holders_of_a_layer_are_killed(tmp_path: Path, phase: FailurePhase) -> None:
    config = small_config(
        tmp_path,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        snapshots=Snapshots(every=3),
        failures=tuple(fails(worker, step=7, phase=phase) for worker in (1, 3)),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.lost == {1, 3}
    assert_back_by(ended, 3)
