"""A clock that is set while a run trains changes nothing in its records."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from chameleon_ft.clock import unix_s
from chameleon_ft.config import Batch, Failure, Parallel
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.storage.recorder import View
from tests.harness import small_config, train_here

SHOW = "from chameleon_ft.clock import unix_s; print(unix_s())"


def in_a_process(environ: dict[str, str]) -> float:
    return float(subprocess.check_output([sys.executable, "-c", SHOW], env={**os.environ, **environ}, text=True))


def test_processes_of_a_run_share_a_clock_but_not_with_those_of_another_host() -> None:
    before = unix_s()
    boot, _, seconds = os.environ["CHAMELEON_CLOCK"].partition("=")
    assert before <= in_a_process({}) <= unix_s()
    hour_behind = {"CHAMELEON_CLOCK": f"{boot}={float(seconds) - 3600!r}"}
    assert before - 3600 <= in_a_process(hour_behind) <= unix_s() - 3600
    other_host = {"CHAMELEON_CLOCK": "another-host=1.0"}
    assert in_a_process(other_host) >= before - 1800, "the environment came from another machine"


class SetBack(View):
    """Sets the clock of this process back by an hour in step 3 and forward by one in step 9."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def show(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.ahead_s = -3600.0 if 3 <= record.step < 9 else 3600.0 if record.step >= 9 else 0.0


@pytest.mark.multiprocess
def test_a_stall_and_the_end_are_those_of_a_clock_that_was_not_set(tmp_path: Path) -> None:
    view, real = SetBack(), time.time

    def set_clock() -> float:
        return real() + view.ahead_s

    config = small_config(
        tmp_path,
        steps=12,
        workers=2,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=2, micro_batch_size=1),
        failures=(Failure(step=6, worker=1, phase="backward"),),
    )
    with mock.patch.object(time, "time", set_clock):
        ended = train_here(config, tmp_path / "run", view=view)
    assert ended.code == 0
    (failure,) = ended.events("failure")
    assert 0 <= failure["detect_s"] <= failure["stall_s"] < 1800
    times = [row.time for row in ended.run.steps()]
    assert times == sorted(times)
    assert times[-1] - times[0] < 1800
    watcher = RunWatcher(ended.run)
    watcher.update()
    report = watcher.report()
    assert report.condition == "finished"
    assert report.last is not None
    assert report.last.step == 11
