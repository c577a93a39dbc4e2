"""A coordinator that stands by, and continues the run at its own address when the one that leads is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import Final

from websockets.asyncio.server import Server, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from chameleon_ft.config import RunConfig
from chameleon_ft.control.journal import LastEntry
from chameleon_ft.control.leadership import POLLS, Leadership, wait_for_silence
from chameleon_ft.control.lease import Lease, lease_of
from chameleon_ft.control.wire.address import join_address, own_address, split_address
from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.connection import control_connection
from chameleon_ft.control.wire.messages import Acknowledged, Exit, StandbyHello
from chameleon_ft.control.wire.server import DOES_NOT_LEAD, listening_socket
from chameleon_ft.control.wire.tls import tls_context
from chameleon_ft.errors import ControlError, LeaseError, LiveRunError
from chameleon_ft.launch.coordinator import Beside, invite, run_coordinator, serve_run, started_job
from chameleon_ft.launch.forked_process import FORK
from chameleon_ft.launch.start import RunStart
from chameleon_ft.observe import ControlAddress, RunDirectory, RunStatus
from chameleon_ft.observe.terminal import TerminalView

_RETRY_S: Final = 0.5
_LEASES_TO_SUCCEED: Final = 2  # a coordinator that stands by claims the next term after one, by its own clock


def stand_by(config: RunConfig, *, run: RunDirectory, host: str | None = None) -> int:
    """Wait until the coordinator of a run is lost, and continue the run. Returns the exit code.

    Args:
        host: address at which the other machines reach this one, or its network interface; by default that of the
            route to the coordinator.

    Raises:
        ControlError: the lease cannot be used, or the journal is damaged.
    """

    async def stood_by() -> RunStatus:
        start = replace(await started_job(config, run=run, resume=False), resume=True)
        leader = run.read_control()
        own_host = own_address(host, towards=leader.address)
        # Beside the coordinator that leads, its port is taken.
        port = 0 if own_host == split_address(leader.address)[0] else config.control.port
        with ExitStack() as stack:
            listener = stack.enter_context(listening_socket(own_host, port))
            address = join_address(own_host, listener.getsockname()[1])
            control = ControlAddress(address=address, token=leader.token, pid=os.getpid(), tls=leader.tls)
            # Peers look for this one from now on, and not before.
            text = f"standing by at {address} for the coordinator of {run.path}"
            leadership = await until_lost(start, control, listener, announced=partial(print, text, flush=True))
            if not isinstance(leadership, Leadership):
                return leadership
            print(f"the coordinator is lost; this one leads in term {leadership.term}", flush=True)
            if (found := leadership.claim.address) != address:
                listener.close()
                listener = stack.enter_context(listening_socket(*split_address(found)))
            return await serve_run(
                start,
                replace(control, address=found),
                listener=listener,
                view=TerminalView(steps=config.steps, files=str(run.path)),
                beside=_alone,
                processes=FORK,
                leadership=leadership,
            )

    return run_coordinator(stood_by())


def take_over(config: RunConfig, *, run: RunDirectory) -> int:
    """Continue a run whose coordinator is lost, at the address where that one was. Returns the exit code.

    Raises:
        ControlError: the run has a damaged journal, or its lease cannot be used.
    """

    return run_coordinator(continue_run(config, run=run, beside=partial(invite, run), processes=FORK))


async def continue_run(config: RunConfig, *, run: RunDirectory, beside: Beside, processes: BaseContext) -> RunStatus:
    """Continue a run whose coordinator is lost, and return how it ended; see `take_over` and `serve_run`."""
    start = await started_job(config, run=run, resume=True)
    lost = run.read_control()
    try:
        listening = listening_socket(*split_address(lost.address))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise LiveRunError(run.path, f"another process, which listens at {lost.address}") from None
    with listening as listener:
        control = ControlAddress(address=lost.address, token=lost.token, pid=os.getpid(), tls=lost.tls)
        leadership = await until_lost(start, control, listener)
        if not isinstance(leadership, Leadership):
            return leadership
        return await serve_run(
            start,
            control,
            listener=listener,
            view=TerminalView(steps=config.steps, files=str(run.path)),
            beside=beside,
            processes=processes,
            leadership=leadership,
        )


async def is_succeeded(start: RunStart, control: ControlAddress, listener: socket.socket) -> bool:
    """Return whether a coordinator at another address leads the run, as soon as one does or has had the time for that.

    This process refuses all connections to its own meanwhile.
    """
    lease, lease_s = lease_of(start.config, start.run), start.config.control.lease_s
    until_s = time.monotonic() + _LEASES_TO_SUCCEED * lease_s
    async with _refusing(listener, control):
        while time.monotonic() < until_s:
            with contextlib.suppress(LeaseError):
                newest = await lease.newest()
                if newest is not None and newest.address != control.address:
                    return True
            await asyncio.sleep(lease_s / POLLS)
    return False


async def until_lost(
    start: RunStart,
    control: ControlAddress,
    listener: socket.socket,
    *,
    announced: Callable[[], None] = lambda: None,
) -> Leadership | RunStatus:
    """Stand by until this process has claimed a term, or the run is over; print and return how it ended then.

    The claim has the address at which to lead: another one than that of `control` if peers know only that of the
    coordinator that is lost, and it is one of this host.

    Args:
        control: of this process.
        listener: the socket at its address, where it refuses all connections meanwhile.
        announced: called once the coordinator that leads has told all peers that this one stands by.
    """
    lease, lease_s = lease_of(start.config, start.run), start.config.control.lease_s
    is_known = asyncio.Event()

    def noted() -> None:
        is_known.set()
        announced()

    claiming = asyncio.create_task(_claim(lease, start.run, control.address, lease_s, is_known))
    following = asyncio.create_task(_follow(lease, control, noted))
    try:
        async with _refusing(listener, control):
            done, _ = await asyncio.wait({claiming, following}, return_when=asyncio.FIRST_COMPLETED)
        found = done.pop().result()
        if not isinstance(found, Leadership):
            print(f"the run is over: {found}", flush=True)
        return found
    finally:
        claiming.cancel()
        following.cancel()


async def _claim(
    lease: Lease, run: RunDirectory, address: str, lease_s: float, is_known: asyncio.Event
) -> Leadership | RunStatus:
    """Claim the next term once the leader of this one is gone; return how the run ended if it is over.

    Before `is_known`, peers find this coordinator only where the leader was, or by the run directory.
    """
    has_failed = False
    while True:
        lost = None
        try:
            lost = await wait_for_silence(lease, lease_s=lease_s)
        except LeaseError as error:
            if not has_failed:
                has_failed = True
                print(f"waiting for the lease of the run: {error}", flush=True)
            await asyncio.sleep(_RETRY_S)
            continue
        if not run.control_file.exists():
            last = LastEntry.newest(run)
            return last.status or "failed" if last is not None else "failed"
        at = lost.address if lost is not None and not is_known.is_set() and _is_free(lost.address) else address
        try:
            term = 1 if lost is None else lost.term + 1
            leadership = await Leadership.claimed(lease, term, address=at, lease_s=lease_s)
            if leadership is not None:
                return leadership
        except LeaseError as error:
            if not has_failed:
                has_failed = True
                print(f"the run cannot be continued yet: {error}", flush=True)
        await asyncio.sleep(lease_s / POLLS)


def _is_free(address: str) -> bool:
    """Return whether this process can listen at an address: it is one of this host, and no other process does."""
    try:
        listening_socket(*split_address(address)).close()
    except OSError:
        return False
    return True


async def _follow(lease: Lease, own: ControlAddress, announced: Callable[[], None]) -> RunStatus:
    """Tell whichever coordinator leads that this one stands by; return how the run ended once it says so."""
    is_announced = False
    while True:
        errors = (OSError, InvalidHandshake, ConnectionClosed, EOFError, TimeoutError, ControlError)
        with contextlib.suppress(*errors):
            leader = await lease.newest()
            if leader is not None and leader.address != own.address:
                async with control_connection(leader.address, own.token, tls=own.tls) as connection:
                    await connection.send(encode(StandbyHello(address=own.address, term=leader.term)))
                    async for text in connection:
                        order = decode(text)
                        if isinstance(order, Acknowledged) and not is_announced:
                            is_announced = True
                            announced()
                        if isinstance(order, Exit) and order.status is not None:
                            return order.status
        await asyncio.sleep(_RETRY_S)


def _refusing(listener: socket.socket, own: ControlAddress) -> Server:
    """Refuse all connections to the address at which this coordinator listens once it leads."""
    return serve(
        lambda connection: connection.close(),
        sock=listener.dup(),
        ssl=tls_context(own.tls, server=True),
        process_request=lambda connection, _: connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, DOES_NOT_LEAD),
    )


@asynccontextmanager
async def _alone(*_: object) -> AsyncIterator[None]:
    yield
