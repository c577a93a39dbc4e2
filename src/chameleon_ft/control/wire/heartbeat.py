"""Heartbeats: the pings on a control connection, at both of its ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

__all__ = ["WILL_RETURN", "watch_heartbeat"]

WILL_RETURN: Final = 4000
"""Close code of a peer that gives up a silent connection, and makes another one."""


async def watch_heartbeat(
    connection: Connection,
    *,
    every_s: float,
    timeout_s: float,
    silent: Callable[[float], None],
    answered: Callable[[], None] = lambda: None,
) -> None:
    """Ping the other end every `every_s` seconds until the connection is closed.

    Seconds in which this process did not run do not count: the answer may have come meanwhile.

    Args:
        silent: called once a ping is unanswered for `timeout_s`, and from then on every `every_s` until it is answered,
            with the seconds since it was sent.
        answered: called after every answer.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionClosed):
        while True:
            await asyncio.sleep(every_s)
            pong, waited_s, silent_s = asyncio.ensure_future(await connection.ping()), 0.0, timeout_s
            while not pong.done():
                pause_s, before_s = min(every_s, silent_s - waited_s), loop.time()
                # Unlike `wait_for`, this takes a pong that came while this process did not run to see it.
                await asyncio.wait({pong}, timeout=pause_s)
                # After a stall, the pong may be behind other messages that have come meanwhile.
                if loop.time() - before_s < pause_s + every_s / 2:
                    waited_s += pause_s
                if waited_s >= silent_s and not pong.done():
                    silent(waited_s)
                    silent_s += every_s
            await pong
            answered()
