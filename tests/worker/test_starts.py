"""Real runs, of which a process dies or hangs before it has connected: another one is started in its place."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from chameleon_ft.config import Recovery, Timeouts
from chameleon_ft.launch import processes
from tests.harness import assert_trained_as_if_nothing_failed, small_config, train_here
from tests.worker import failing_ranks

pytestmark = pytest.mark.multiprocess

_TIMEOUTS = Timeouts(heartbeat_timeout_s=5.0, watchdog_min_s=7.0, collective_timeout_s=9.0, rendezvous_s=10.0)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_process_that_fails_before_it_connects_is_replaced(tmp_path: Path, how: str) -> None:
    recovery = Recovery(policy="reroute", respawn=True, respawn_delay_s=0.1)
    config = small_config(tmp_path, recovery=recovery, timeouts=_TIMEOUTS)
    with mock.patch.object(processes, "RANK", f"{failing_ranks.__name__}:{how}"):
        ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == set()
    (lost,) = ended.events("join_failed")
    assert (lost["worker"], lost["incarnation"]) == (failing_ranks.WORKER, 1)
    cause = "SIGKILL" if how == "dies" else "hung: its process has not connected within 10 s"
    assert lost["cause"] == cause
    assert [event["incarnation"] for event in ended.events("respawn")] == [2]
