"""The fork server: its processes outlive it, it is replaced when it fails, and nothing outlives its starter."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from chameleon_ft.errors import ControlError
from chameleon_ft.host import fork_server
from chameleon_ft.host.fork_server import ForkServer
from chameleon_ft.host.processes import HostProcess
from tests.harness import every_process_ends
from tests.worker import failing_server

pytestmark = pytest.mark.multiprocess

FUNCTIONS = "tests.worker.forked_functions"
LIGHT = "chameleon_ft.quantities"


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer(LIGHT, (signal.SIGTERM,))
    yield made
    made.end()


async def ask(server: ForkServer, text: str = "hello") -> tuple[str, int, set[signal.Signals]]:
    ours, theirs = Pipe(duplex=False)
    with theirs:
        process = await server.fork(f"{FUNCTIONS}:echo", theirs.fileno(), text=text)
    answer: tuple[str, int, set[signal.Signals]] = await asyncio.to_thread(ours.recv)
    assert await process.wait() == 7
    assert not process.is_alive
    process.kill()  # which is over
    return answer


def test_it_calls_a_function_in_a_child_of_its_starter(server: ForkServer) -> None:
    text = "a" * 1_000_000
    assert asyncio.run(ask(server, text)) == (text, os.getpid(), {signal.SIGTERM})
    assert psutil.Process(server.pid).name() == "fork server", "ps and top show it"


def test_what_it_has_loaded_is_no_garbage_to_look_for(server: ForkServer) -> None:
    async def scene() -> int:
        ours, theirs = Pipe(duplex=False)
        with theirs:
            process = await server.fork(f"{FUNCTIONS}:count_frozen", theirs.fileno())
        frozen: int = await asyncio.to_thread(ours.recv)
        assert await process.wait() == 0
        return frozen

    assert asyncio.run(scene()) > 1000


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_one_that_is_stopped_or_killed_is_replaced_and_its_processes_live_on(
    number: signal.Signals, server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> int | None:
        before = await server.fork(f"{FUNCTIONS}:sleep")
        await ask(server)
        former = psutil.Process(server.pid)
        former.send_signal(number)
        assert (await ask(server))[0] == "hello"
        assert server.pid != former.pid
        assert not former.is_running()
        assert psutil.Process(before.pid).status() == psutil.STATUS_SLEEPING
        before.kill()
        return await before.wait()

    assert asyncio.run(scene()) == -signal.SIGKILL
    (record,) = caplog.records
    assert record.message.startswith("the fork server ")
    assert record.message.endswith("; it is replaced")


def test_the_end_of_one_is_noticed_before_a_process_is_to_be_started(server: ForkServer) -> None:
    async def scene() -> None:
        await ask(server)
        for _ in range(2):
            former = server.pid
            os.kill(former, signal.SIGKILL)
            while server.pid == former:
                await asyncio.sleep(0.01)
            await ask(server)

    asyncio.run(scene())


def test_one_that_is_stopped_while_it_loads_is_replaced() -> None:
    server = ForkServer("torch")

    async def scene() -> None:
        asking = asyncio.create_task(ask(server))
        await asyncio.sleep(0)
        os.kill(server.pid, signal.SIGSTOP)
        await asking

    asyncio.run(scene())
    server.end()


def test_one_that_a_debugger_stops_now_and_then_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = cycle([True, False])
    monkeypatch.setattr(fork_server, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(fork_server, "is_stopped", lambda _: next(looks))
    server = ForkServer("torch")  # which takes a while
    pid = server.pid
    asyncio.run(ask(server))
    assert server.pid == pid
    server.end()


def test_a_module_that_cannot_be_loaded_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer("no_such_module")
    with pytest.raises(ControlError, match=r"3 fork servers in a row failed.* has ended with exit code 1"):
        asyncio.run(server.fork(f"{FUNCTIONS}:sleep"))
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "why"),
    [("deaf", "does not answer for 0 s"), ("unable", "cannot fork: Resource temporarily unavailable")],
)
def test_one_that_does_not_answer_or_cannot_fork_is_replaced(
    how: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failing_server.FAILS, how)
    if how == "deaf":
        monkeypatch.setattr(fork_server, "_ANSWER_S", 0.1)
    server = ForkServer(failing_server.__name__)
    with pytest.raises(ControlError, match=f"3 fork servers in a row failed, and the last one {why}"):
        asyncio.run(server.fork(f"{FUNCTIONS}:sleep"))
    server.end()


def test_a_process_that_does_not_take_its_call_is_not_left_behind(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before it reads which function it is to call, and the request is given up."""
    forked = list[psutil.Process]()

    def stopped(pid: int) -> HostProcess:
        forked.append(psutil.Process(pid))
        forked[0].suspend()
        return HostProcess(pid)

    async def scene() -> None:
        asking = asyncio.create_task(server.fork(f"{FUNCTIONS}:echo", text="a" * 10_000_000))
        while not forked:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait({asking})

    monkeypatch.setattr(fork_server, "HostProcess", stopped)
    asyncio.run(scene())
    with every_process_ends(forked):
        pass


def test_a_request_that_is_given_up_leaves_no_process() -> None:
    server = ForkServer("torch")  # which takes a while
    before = set(psutil.Process().children())

    async def scene() -> None:
        giving_up = asyncio.create_task(server.fork(f"{FUNCTIONS}:sleep"))
        await asyncio.sleep(0)
        giving_up.cancel()
        await asyncio.wait({giving_up})
        process = await server.fork(f"{FUNCTIONS}:sleep")  # by now the server has forked for the first request, too
        process.kill()
        await process.wait()

    asyncio.run(scene())
    while left := [p for p in set(psutil.Process().children()) - before if p.status() != psutil.STATUS_ZOMBIE]:
        assert all(process.wait(30) is not None for process in left)
    server.end()


def test_a_process_that_is_no_child_can_be_watched_and_killed() -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL).pid)"
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    process = HostProcess(int(printed.stdout))

    async def scene() -> None:
        process.kill()
        await process.wait()

    asyncio.run(scene())
    assert not process.is_alive


STARTER = f"""
import asyncio
from chameleon_ft.host.fork_server import ForkServer

async def main():
    server = ForkServer("torch")
    await server.fork("{FUNCTIONS}:sleep")
    print("forked", flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("after_s", [0.0, 0.1, 1.0, None])
def test_a_starter_killed_at_any_moment_leaves_no_process(after_s: float | None, *, stopped: bool) -> None:
    """Kill it so long after its server has begun, or after it has forked; with the server stopped or running."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    try:
        process = psutil.Process(starter.pid)
        # A process that is stopped before its exec cannot end with another one yet.
        while not (servers := process.children()) or servers[0].cmdline() == process.cmdline():
            time.sleep(0.001)
        assert starter.stdout is not None
        if after_s is None:
            starter.stdout.readline()
        else:
            time.sleep(after_s)
        begun = process.children(recursive=True)
        if stopped:
            begun[0].suspend()
        with every_process_ends(begun):
            starter.kill()
    finally:
        starter.kill()
        starter.communicate()
