"""A signal of a cluster asks for a checkpoint or the end, whichever processes get it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from chameleon_ft.config import RunConfig
from chameleon_ft.config.validation import parse_config
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.kinds import CheckpointComplete, Lost
from chameleon_ft.storage.files import RunDirectory
from tests.session.test_debugging import job_in


@pytest.mark.parametrize("actions", ["USR1", "USR1=restart", "TERM=stop", "USR1=stop,"])
def test_an_action_that_does_not_exist_is_refused(actions: str) -> None:
    with pytest.raises(ConfigError, match="on_signal"):
        parse_config(RunConfig, {"job": "my_job.py", "on_signal": actions}, source="the configuration")


def events_of(run: RunDirectory) -> list[object]:
    return list(run.readable_events()[0]) if run.events_file.exists() else []


def until(run: RunDirectory, process: subprocess.Popen[bytes], steps: int) -> None:
    while not run.metrics_file.exists() or len(run.readable_steps()[0]) < steps:
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.multiprocess
def test_signals_to_all_processes_of_a_run_write_a_checkpoint_and_end_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    flags = "--workers 2 --parallel.dp 1 --parallel.pp 2 --batch.micro-batches 4 --batch.micro-batch-size 2"
    flags += " --steps 1000000 --checkpoint.every 0 --on-signal USR1=checkpoint,USR2=stop"
    command = [sys.executable, "-m", "chameleon_ft", "run", str(job_in(tmp_path)), "--output-dir", str(run.path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, *flags.split()], stdout=log, stderr=log)
    try:
        until(run, process, 3)
        for each in (process, *psutil.Process(process.pid).children(recursive=True)):
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGUSR1)
        while not any(isinstance(event, CheckpointComplete) for event in events_of(run)):
            assert process.poll() is None
            time.sleep(0.05)
        until(run, process, len(run.readable_steps()[0]) + 3)
        os.kill(process.pid, signal.SIGUSR2)
        process.wait()
    finally:
        process.kill()
    assert not any(isinstance(event, Lost) for event in events_of(run))
    assert '"interrupted"' in run.summary_file.read_text()
