"""A rank without an agent, in a process of its own: it tells where it hangs, and does not outlive its run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.asyncio.server import ServerConnection, serve

from chameleon_ft.events.evidence import Evidence
from chameleon_ft.host.fork_server import Lifeline
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import Acknowledged, Exit, HangEvidence, Hello, Kill, Message, Ready, Refused
from tests.harness import every_process_ends

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import sys, threading
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.protocol.messages import Ready
from chameleon_ft.protocol.parts import Member
from chameleon_ft.worker import control_client

control_client._END_S = 0.1
access = CoordinatorAccess(address=sys.argv[1], token="t")
client = control_client.ControlClient(access, member=Member(3, 2), host="h")
client.activity.publish()
client.activity.begin("F3")
client.start()

def rank_main():
    client.send(Ready()); threading.Event().wait()  # the hang

rank_main()
"""

Talk = Callable[[ServerConnection], Coroutine[Any, Any, None]]


def play(directory: Path, talk: Talk) -> int:
    """Have a rank that hangs connect to a coordinator that says something; return its exit code."""
    script = directory / "script.py"
    script.write_text(SCRIPT)

    async def scene() -> int:
        mistakes: list[BaseException] = []

        async def handler(connection: ServerConnection) -> None:
            try:
                assert isinstance(decode(await connection.recv()), Hello)
                await tell(connection, Acknowledged(connection=1, received=0, term=1, lease_s=30.0, reconnect_s=0.0))
                await talk(connection)
            except BaseException as error:
                mistakes.append(error)
                raise

        async with serve(handler, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            process = await asyncio.create_subprocess_exec(sys.executable, script, f"127.0.0.1:{port}")
            try:
                code = await asyncio.wait_for(process.wait(), 60)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert not mistakes
        return code

    return asyncio.run(scene())


async def tell(connection: ServerConnection, message: Message) -> None:
    await connection.send(encode(message))


def test_it_tells_where_it_hangs_and_ends(tmp_path: Path) -> None:
    async def talk(connection: ServerConnection) -> None:
        assert isinstance(decode(await connection.recv()), Ready)
        await tell(connection, Kill(worker=3, is_hung=True))
        found = decode(await connection.recv())
        assert isinstance(found, HangEvidence)
        assert found.member == (3, 2)
        evidence = Evidence.parse(found.activity)
        assert str(evidence.last) == "in F3"
        line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "# the hang" in text)
        assert evidence.place == f"{tmp_path / 'script.py'}:{line} in rank_main"
        await connection.wait_closed()

    assert play(tmp_path, talk) == -signal.SIGKILL


@pytest.mark.parametrize("last", [Exit(reason="over"), Refused(reason="it was given up"), None])
def test_it_ends_with_its_run(tmp_path: Path, last: Message | None) -> None:
    """The run is over, has given it up, or has lost its coordinator for good."""

    async def talk(connection: ServerConnection) -> None:
        if last is not None:
            await tell(connection, last)
            await connection.wait_closed()

    assert play(tmp_path, talk) == -signal.SIGKILL


HOLDER = """
import os, subprocess, sys, time
from chameleon_ft.host.fork_server import Lifeline

lifeline = Lifeline()
forked = os.fork()  # which does not hold it
if not forked:
    time.sleep(1000)
watching = "from chameleon_ft.host.fork_server import end_with_holder; import sys, time"
watching += "; end_with_holder(int(sys.argv[1])); print('watches', flush=True); time.sleep(1000)"
print(forked, flush=True)
child = subprocess.Popen([sys.executable, "-c", watching, str(lifeline.descriptor)], pass_fds=[lifeline.descriptor])
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_process_ends_with_the_holder_of_its_lifeline(is_stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        forked, watching = psutil.Process(int(holder.stdout.readline())), psutil.Process(int(holder.stdout.readline()))
        assert holder.stdout.readline() == "watches\n"
        if is_stopped:
            watching.suspend()
        with every_process_ends([watching]):
            holder.kill()
        assert forked.is_running()
        forked.kill()


def test_a_process_ends_at_once_if_the_holder_of_its_lifeline_has_ended() -> None:
    lifeline = Lifeline()
    watching = "import sys; from chameleon_ft.host import fork_server as s; s.end_with_holder(int(sys.argv[1]))"
    descriptor = os.dup(lifeline.descriptor)
    lifeline.close()
    arguments = [sys.executable, "-c", f"{watching}; sys.exit(7)", str(descriptor)]
    assert subprocess.run(arguments, pass_fds=[descriptor], check=False).returncode == 1
    os.close(descriptor)
