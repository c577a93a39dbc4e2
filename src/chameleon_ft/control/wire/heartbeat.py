"""Heartbeats: the pings on a control connection, at both of its ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Final

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

_PEERS_PER_S: Final = 600
"""Peers that a coordinator asks for a sign of life in a second."""

_PARTS: Final = 4
"""Parts of the wait for the answer to a ping."""

WILL_RETURN: Final = 4000
"""Close code of a peer that gives up a silent connection, and makes another one."""


class HeardConnection(Connection):
    """A connection that notes when data of its other end has arrived, by the clock of the event loop.

    Attributes:
        heard: called then.
    """

    heard_at_s: float = -math.inf
    heard: Callable[[], None] | None = None

    def data_received(self, data: bytes) -> None:
        self.heard_at_s = self.loop.time()
        if self.heard is not None:
            self.heard()
        super().data_received(data)


def heartbeat_interval_s(timeout_s: float, peers: int) -> float:
    """Return the seconds of silence after which a coordinator of so many peers pings one of them.

    With thousands of peers these seconds grow, because their heartbeats must leave it time for all else.
    """
    return max(timeout_s / 4, peers / _PEERS_PER_S)


async def watch_heartbeat(
    connection: HeardConnection,
    *,
    every_s: float,
    timeout_s: float,
    silent: Callable[[float], None],
) -> None:
    """Ping the other end once nothing has arrived from it for `every_s` seconds, until the connection is closed.

    Seconds in which this process did not run do not count: the answer may have come meanwhile, and the ping itself may
    have waited behind orders that only this process hands to the network. Nor do those in which other data has arrived:
    after a reconnection, thousands of messages may be ahead of a ping or of its answer.

    Args:
        silent: called once a ping is unanswered for `timeout_s` and nothing else arrives, and from then on every
            `every_s` until it is answered, with these seconds.
    """
    loop, part_s = asyncio.get_running_loop(), min(every_s, timeout_s / _PARTS)
    with contextlib.suppress(ConnectionClosed):
        while True:
            left_s = every_s
            while left_s > 0:
                await asyncio.sleep(left_s)
                left_s = connection.heard_at_s + every_s - loop.time()
            # A ping may also wait behind messages that the network does not take.
            pong, waited_s, silent_s = asyncio.create_task(_ping(connection)), 0.0, timeout_s
            try:
                while not pong.done():
                    # In small parts, to distinguish time in which this process was busy from time spent waiting.
                    pause_s, before_s = min(part_s, silent_s - waited_s), loop.time()
                    # Unlike `wait_for`, this takes a pong that came while this process did not run to see it.
                    await asyncio.wait({pong}, timeout=pause_s)
                    # After a stall, the pong may be behind other messages that have come meanwhile.
                    if connection.heard_at_s > before_s:
                        waited_s, silent_s = 0.0, timeout_s
                    elif loop.time() - before_s < pause_s + part_s:
                        waited_s += pause_s
                    if waited_s >= silent_s and not pong.done():
                        silent(waited_s)
                        silent_s += every_s
                await pong
            finally:
                pong.cancel()


async def _ping(connection: Connection) -> None:
    """Send a ping, and wait for its answer."""
    await (await connection.ping())
