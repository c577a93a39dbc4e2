"""Real runs, of which a process dies or hangs before it has connected: another one is started in its place."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from chameleon_ft import launch
from chameleon_ft.config import Recovery, Timeouts
from tests.harness import assert_trained_as_if_nothing_failed, small_config, train_here

pytestmark = pytest.mark.multiprocess

_WORKER = 2
_rank_entry = launch._rank_entry
_TIMEOUTS = Timeouts(heartbeat_timeout_s=6.0, watchdog_min_s=8.0, collective_timeout_s=12.0, rendezvous_s=15.0)


def _fail_at_first(how: str, *, worker: int, incarnation: int, **arguments: Any) -> None:
    """Run a rank; the first process of a worker dies, or hangs, before it connects."""
    if (worker, incarnation) == (_WORKER, 1):
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    _rank_entry(worker=worker, incarnation=incarnation, **arguments)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_process_that_fails_before_it_connects_is_replaced(tmp_path: Path, how: str) -> None:
    recovery = Recovery(policy="reroute", respawn=True, respawn_delay_s=0.1)
    config = small_config(tmp_path, recovery=recovery, timeouts=_TIMEOUTS)
    with mock.patch.object(launch, "_rank_entry", partial(_fail_at_first, how)):
        ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == set()
    (lost,) = ended.events("join_failed")
    assert (lost["worker"], lost["incarnation"]) == (_WORKER, 1)
    cause = "SIGKILL" if how == "dies" else "hung: its process has not connected within 15 s"
    assert lost["cause"] == cause
    assert [event["incarnation"] for event in ended.events("respawn")] == [2]


def test_without_a_restart_the_run_says_so_at_once(tmp_path: Path) -> None:
    with mock.patch.object(launch, "_rank_entry", partial(_fail_at_first, "dies")):
        ended = train_here(small_config(tmp_path), tmp_path / "run")
    assert ended.code == 1
    assert ended.summary["reason"] == f"worker 2 ended before the run began: SIGKILL; see {ended.run.logs}"
