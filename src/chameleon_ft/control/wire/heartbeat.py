"""Heartbeats: the pings on a control connection, at both of its ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Final

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

__all__ = ["WILL_RETURN", "HeardConnection", "watch_heartbeat"]

WILL_RETURN: Final = 4000
"""Close code of a peer that gives up a silent connection, and makes another one."""


class HeardConnection(Connection):
    """A connection that notes when data of its other end has arrived, by the clock of the event loop."""

    heard_at_s: float = -math.inf

    def data_received(self, data: bytes) -> None:
        self.heard_at_s = self.loop.time()
        super().data_received(data)


async def watch_heartbeat(
    connection: HeardConnection,
    *,
    every_s: float,
    timeout_s: float,
    silent: Callable[[float], None],
    answered: Callable[[], None] = lambda: None,
) -> None:
    """Ping the other end every `every_s` seconds until the connection is closed.

    Seconds in which this process did not run do not count: the answer may have come meanwhile. Nor do those in which
    other data has arrived: after a reconnection, thousands of messages may be ahead of a ping or of its answer.

    Args:
        silent: called once a ping is unanswered for `timeout_s` and nothing else arrives, and from then on every
            `every_s` until it is answered, with these seconds.
        answered: called after every answer.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionClosed):
        while True:
            await asyncio.sleep(every_s)
            # A ping may also wait behind messages that the network does not take.
            pong, waited_s, silent_s = asyncio.create_task(_ping(connection)), 0.0, timeout_s
            try:
                while not pong.done():
                    pause_s, before_s = min(every_s, silent_s - waited_s), loop.time()
                    # Unlike `wait_for`, this takes a pong that came while this process did not run to see it.
                    await asyncio.wait({pong}, timeout=pause_s)
                    # After a stall, the pong may be behind other messages that have come meanwhile.
                    if connection.heard_at_s > before_s:
                        waited_s, silent_s = 0.0, timeout_s
                    elif loop.time() - before_s < pause_s + every_s / 2:
                        waited_s += pause_s
                    if waited_s >= silent_s and not pong.done():
                        silent(waited_s)
                        silent_s += every_s
                await pong
            finally:
                pong.cancel()
            answered()


async def _ping(connection: Connection) -> None:
    """Send a ping, and wait for its answer."""
    await (await connection.ping())
