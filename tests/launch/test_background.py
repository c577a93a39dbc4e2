"""The process of background work ends with the process that has started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psutil
import pytest

from chameleon_ft.errors import ControlError
from chameleon_ft.launch.background import BackgroundProcess, background
from tests.harness import every_process_ends

pytestmark = pytest.mark.multiprocess

STARTER = """
import asyncio, time
from multiprocessing import get_context
from unittest import mock
from chameleon_ft.launch import background

async def scene():
    with background.background(get_context("fork")):
        print("begun", flush=True)
        time.sleep(1000)

with mock.patch.object(background, "load_solvers", lambda: time.sleep(1000)):
    asyncio.run(scene())
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


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[BackgroundProcess]]:
    monkeypatch.setattr("chameleon_ft.launch.background.load_solvers", lambda: None)
    return partial(background, get_context("fork"))


Begun = Callable[[], AbstractContextManager[BackgroundProcess]]


def test_it_ends_with_its_block_whatever_it_is_at(begun: Begun) -> None:
    async def scene() -> int:
        with begun() as process:
            process.submit(time.sleep, 1000)
            return process.pid

    assert not psutil.pid_exists(asyncio.run(scene()))


def test_one_that_is_lost_is_replaced_and_its_work_repeated(begun: Begun) -> None:
    """It is killed while it has no work, and with work, which others wait behind; and it is stopped."""

    async def scene() -> list[str]:
        said: list[str] = []
        replaced = asyncio.Event()

        def note(why: str) -> None:
            said.append(why)
            replaced.set()

        with begun() as process:
            process.replaced = note
            await do(process, abs, -1)
            os.kill(process.pid, signal.SIGKILL)
            await replaced.wait()
            replaced.clear()
            first = process.pid
            works = [do(process, kill_once, first), do(process, abs, -2), do(process, int, "three")]
            assert await asyncio.gather(*works, return_exceptions=True) == [process.pid, 2, ANY]
            assert isinstance(works[2].exception(), ValueError)
            replaced.clear()
            os.kill(process.pid, signal.SIGSTOP)
            assert await do(process, abs, -4) == 4
            assert replaced.is_set()
        return said

    killed = "was ended by SIGKILL"
    assert asyncio.run(scene()) == [killed, killed, "was stopped"]


def test_work_that_always_ends_it_is_given_up_and_other_work_done(
    begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chameleon_ft.launch.background._SPAWN", get_context("fork"))

    async def scene() -> None:
        with begun() as process:
            fatal, following = do(process, os._exit, 3), do(process, abs, -5)
            with pytest.raises(ControlError):
                await fatal
            assert await following == 5

    asyncio.run(scene())


def do(process: BackgroundProcess, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().run_in_executor(process, function, *arguments)


def kill_once(pid: int) -> int:
    """Kill the process that does this if it has that number, and return its number otherwise."""
    if os.getpid() == pid:
        os.kill(pid, signal.SIGKILL)
    return os.getpid()
