"""Heartbeats: the pings on a control connection, at both of its ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

__all__ = ["watch_heartbeat"]


async def watch_heartbeat(
    connection: Connection, *, every_s: float, timeout_s: float, silent: Callable[[float], None]
) -> None:
    """Ping the other end every `every_s` seconds until the connection is closed.

    Args:
        silent: called once a ping is unanswered for `timeout_s`, and from then on every `every_s` until it is answered,
            with the seconds since it was sent.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionClosed):
        while True:
            await asyncio.sleep(every_s)
            pong, sent_s, pause_s = asyncio.ensure_future(await connection.ping()), loop.time(), timeout_s
            # Unlike `wait_for`, this takes a pong that has come although this process has not run in time to see it.
            while not (await asyncio.wait({pong}, timeout=pause_s))[0]:
                silent(loop.time() - sent_s)
                pause_s = every_s
            await pong
