"""SIGTERM to an agent, whose workers are drained."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import Acknowledged, Drain, Exit, Hello, HostHello, Spawn
from chameleon_ft.protocol.parts import Member
from tests.harness import Command, every_process_ends

pytestmark = pytest.mark.multiprocess


def acknowledged(connection: int) -> Acknowledged:
    return Acknowledged(connection=connection, received=0, term=1, lease_s=30.0, reconnect_s=0.0)


@contextmanager
def coordinator_that(*, drains: bool) -> Iterator[tuple[str, threading.Event]]:
    """Run a coordinator that has an agent start worker 0, and drains it or never does.

    Yields its address, and an event that is set once the worker has joined.
    """
    ranks: list[ServerConnection] = []
    has_joined = threading.Event()

    def handler(connection: ServerConnection) -> None:
        for text in connection:
            match decode(text):
                case HostHello():
                    connection.send(encode(acknowledged(1)))
                    connection.send(encode(Spawn(members=(Member(0, 1),))))
                case Hello():
                    connection.send(encode(acknowledged(2)))
                    ranks.append(connection)
                    has_joined.set()
                case Drain() if drains:
                    connection.send(encode(Drain(workers=(0,))))
                    for member in {*ranks, connection}:
                        with suppress(ConnectionClosed):  # a rank that has been told before
                            member.send(encode(Exit(reason="drained", is_drained=True)))

    with serve(handler, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.socket.getsockname()[1]}", has_joined
        finally:
            server.shutdown()
            thread.join()


def test_sigterm_drains_the_workers_of_an_agent() -> None:
    with (
        coordinator_that(drains=True) as (address, has_joined),
        Command("agent", "--coordinator", address, "--workers", "1", "--token", "t") as host,
    ):
        assert has_joined.wait(60)
        with every_process_ends(host.session()):
            os.killpg(host.pid, signal.SIGTERM)  # a batch system sends it to the workers as well
            assert host.wait() == 0, host.printed
        assert "draining the workers of this agent" in host.printed


def test_a_second_sigterm_ends_an_agent_whose_workers_do_not_leave() -> None:
    with (
        coordinator_that(drains=False) as (address, has_joined),
        Command("agent", "--coordinator", address, "--workers", "1", "--token", "t") as host,
    ):
        assert has_joined.wait(60)
        with every_process_ends(host.session()):
            host.signal(signal.SIGTERM)
            host.read_until("draining the workers of this agent")
            time.sleep(1.1)  # signals that come earlier are the same one
            host.signal(signal.SIGTERM)
            assert host.wait() == os.EX_TEMPFAIL
