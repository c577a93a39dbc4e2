"""SIGTERM in the first and the last moments of commands, and SIGHUP of a terminal that is closed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import psutil
import pytest

from chameleon_ft.config import Batch, Parallel
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from tests.configs import write_config
from tests.harness import Command, Ended, every_process_ends, small_config

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+{}\s"  # the line of a step
EVERY_S = 0.0005


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def written(directory: Path, *, steps: int) -> Path:
    layout = {"workers": 2, "parallel": Parallel(dp=2, pp=1), "batch": Batch(micro_batches=4)}
    return write_config(small_config(directory, steps=steps, **layout), directory)


def terminated_again_and_again(*commands: Command) -> list[int]:
    """Send SIGTERM to commands until they have ended, and return their exit codes."""

    def terminate(command: Command) -> None:
        while command.is_running:
            command.signal(signal.SIGTERM)
            time.sleep(EVERY_S)

    threads = [threading.Thread(target=terminate, args=(command,)) for command in commands]
    for thread in threads:
        thread.start()
    codes = [command.wait() for command in commands]
    for thread in threads:
        thread.join()
    return codes


def catches_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_sigterm_after_the_end_of_a_run_does_not_change_its_exit_code(tmp_path: Path, run: RunDirectory) -> None:
    with Command("train", written(tmp_path, steps=5), "--output-dir", run.path, own_interpreter=True) as training:
        training.read_until("all steps are trained")
        (code,) = terminated_again_and_again(training)
    assert code in (0, os.EX_TEMPFAIL), training.printed
    assert Ended(code, run).summary["status"] == "finished"
    assert not run.control_file.exists()


def test_many_sigterms_while_a_run_starts_ask_to_resume_it(tmp_path: Path, run: RunDirectory) -> None:
    with Command("train", written(tmp_path, steps=5), "--output-dir", run.path, own_interpreter=True) as training:
        while not catches_sigterm(training.pid):
            time.sleep(EVERY_S)
        assert terminated_again_and_again(training) == [os.EX_TEMPFAIL], training.printed
    assert not run.path.exists()


def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(tmp_path: Path, run: RunDirectory) -> None:
    screen, terminal = pty.openpty()
    training = subprocess.Popen(
        [sys.executable, "-m", "chameleon_ft", "train", written(tmp_path, steps=100_000), "--output-dir", run.path],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    with os.fdopen(screen, errors="replace") as lines:
        while not re.search(STEP.format(3), lines.readline()):
            pass
        processes = [psutil.Process(training.pid), *psutil.Process(training.pid).children(recursive=True)]
    with every_process_ends(processes):
        assert training.wait(60) == os.EX_TEMPFAIL
    ended = Ended(os.EX_TEMPFAIL, run)
    assert (ended.summary["status"], ended.failures) == ("terminated", [])
    assert ended.summary["reason"] == "terminated by SIGHUP, with a checkpoint"
    assert complete_checkpoints(run.checkpoints) == [len(ended.steps)]


def test_under_nohup_sighup_does_nothing(tmp_path: Path, run: RunDirectory) -> None:
    config = written(tmp_path, steps=100_000)
    with Command("train", config, "--output-dir", run.path, prefix=("nohup",)) as training:
        training.read_until(STEP.format(3))
        os.killpg(training.pid, signal.SIGHUP)
        steps = len(run.steps())
        training.read_until(STEP.format(steps + 5))
        training.signal(signal.SIGTERM)
        assert training.wait() == os.EX_TEMPFAIL
    assert Ended(os.EX_TEMPFAIL, run).failures == []
