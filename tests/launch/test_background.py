"""The process of background work ends with the process that has started it."""

from __future__ import annotations

import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from chameleon_ft.launch.processes import background
from tests.harness import every_process_ends

pytestmark = pytest.mark.multiprocess

STARTER = """
import time
from multiprocessing import get_context
from unittest import mock
from chameleon_ft.launch import processes

with mock.patch.object(processes, "load_solvers", lambda: time.sleep(1000)), processes.background(get_context("fork")):
    print("begun", flush=True)
    time.sleep(1000)
"""


def test_it_ends_with_a_starter_that_is_killed() -> None:
    """Also while it loads what it needs, which takes longest."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    try:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"begun\n"
        (begun,) = psutil.Process(starter.pid).children()
        with every_process_ends([begun]):
            starter.kill()
    finally:
        starter.kill()
        starter.communicate()


def test_it_ends_with_its_block_whatever_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_ft.launch.processes.load_solvers", lambda: None)
    before = set(psutil.Process().children())
    with background(get_context("fork")) as executor:
        executor.submit(time.sleep, 1000)
        begun = set(psutil.Process().children()) - before
        assert begun
    assert not [process for process in begun if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
