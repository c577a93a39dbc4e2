"""The coordinator and the agent of a run on one machine, in processes that are forked from its launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from chameleon_ft.config import RunConfig
from chameleon_ft.control.coordinator import Coordinator
from chameleon_ft.control.wire.address import CoordinatorAccess
from chameleon_ft.errors import ChameleonError
from chameleon_ft.launch.agent import create_agent
from chameleon_ft.launch.coordinator import InterruptCount, serve_run
from chameleon_ft.launch.forked_process import FORK, received
from chameleon_ft.launch.processes import inspect, start_fork_server
from chameleon_ft.launch.standby import is_succeeded, until_lost
from chameleon_ft.launch.start import RunStart
from chameleon_ft.observe import ControlAddress, RunStatus
from chameleon_ft.observe.terminal import TerminalView
from chameleon_ft.runtime.fork_server import receive
from chameleon_ft.runtime.process import Lifeline

ALIVE: Final = b"alive"
"""Sent by a coordinator once it leads, and as the answer to the same message while its event loop runs."""
STANDS_BY: Final = b"stands by"
"""Sent by a coordinator once the one that leads knows of it."""
ALONE: Final = b"alone"
"""The last message of a coordinator that was to leave the run to one that stands by, if none of these leads."""


def run_coordinator(
    start: RunStart,
    control: ControlAddress,
    listener: socket.socket,
    signals: Sequence[signal.Signals],
    pipe: Connection,
    *,
    takes_over: bool,
    gives_way: bool,
) -> None:
    """Coordinate the run, in place of one that is lost if it takes over, and send how it ended.

    Args:
        gives_way: whether to take over only after another coordinator, which stands by now, has led the run.
    """

    @asynccontextmanager
    async def obey(_: ControlAddress, coordinator: Coordinator, interrupts: InterruptCount) -> AsyncIterator[None]:
        def obey_order(order: object) -> None:
            match order:
                case signal.SIGINT:
                    interrupts.request("launcher")
                case signal.Signals():
                    coordinator.terminate(order)
                case str():
                    coordinator.end("failed", order)
                case bytes():
                    pipe.send(order)

        # The first one may have reached the coordinator before.
        for number in signals[1:] if coordinator.state.ending else signals:
            obey_order(number)
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), lambda: obey_order(received(pipe)))
        pipe.send(ALIVE)
        yield
        loop.remove_reader(pipe.fileno())

    async def coordinated() -> RunStatus | bytes:
        if gives_way and not await is_succeeded(start, control, listener):
            return ALONE
        stands_by = partial(pipe.send, STANDS_BY)
        leadership = await until_lost(start, control, listener, announced=stands_by) if takes_over else None
        if isinstance(leadership, str):
            return leadership
        view = TerminalView(steps=start.config.steps, files=str(start.run.path))
        return await serve_run(
            start,
            control,
            listener=listener,
            view=view,
            beside=obey,
            processes=FORK,
            leadership=leadership,
            terminate=Coordinator.terminate,  # all workers of the run are on this machine, and end with it
        )

    control = replace(control, pid=os.getpid())
    outcome: RunStatus | bytes | ChameleonError
    try:
        outcome = asyncio.run(coordinated())
    except ChameleonError as error:
        outcome = error
    pipe.send(outcome)


def run_agent(
    config: RunConfig, control: ControlAddress, listener: socket.socket, lifeline: Lifeline, pipe: Connection
) -> None:
    """Send the job in numbers; once told to, serve the run. Send the error if that fails."""

    async def answer() -> None:
        start_fork_server()
        pipe.send(await inspect(config, workers=config.workers))
        await receive(pipe)

    try:
        asyncio.run(answer())
    except ChameleonError as error:
        pipe.send(error)
    else:
        run_next_agent(config, control, listener, lifeline, pipe)


def run_next_agent(
    config: RunConfig, control: ControlAddress, listener: socket.socket, lifeline: Lifeline, pipe: Connection
) -> None:
    """Serve the run; drain the workers at a signal, and end after them. Send the error if that fails."""
    listener.close()

    async def serve() -> None:
        # It may begin while the coordinator is being replaced.
        access = replace(CoordinatorAccess.of(control), patience_s=config.timeouts.reconnect_s)
        agent = create_agent(
            access,
            workers=config.workers,
            lifeline=lifeline.descriptor,
        )
        serving = asyncio.ensure_future(agent.serve())

        def obey() -> None:
            loop.remove_reader(pipe.fileno())
            number = received(pipe)
            if isinstance(number, signal.Signals) and not agent.drain(number):
                serving.cancel()

        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), obey)
        try:
            await serving
        except asyncio.CancelledError:
            pass
        finally:
            agent.kill_all()

    try:
        asyncio.run(serve())
    except ChameleonError as error:
        pipe.send(error)
