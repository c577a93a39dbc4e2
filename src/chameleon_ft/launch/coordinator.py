"""The coordinator of a run in this process: it begins the run, or stands by and continues it when another is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import http
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Final, NoReturn, TypeAlias

from websockets.asyncio.server import Server, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from chameleon_ft.config import RunConfig
from chameleon_ft.coordinator.command_runner import RunSetup
from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.coordinator.journal import Journal, LastEntry
from chameleon_ft.coordinator.leadership import POLLS, Leadership, wait_for_silence
from chameleon_ft.coordinator.lease import Claim, Lease, lease_of
from chameleon_ft.errors import ChameleonError, ControlError, DeposedError, LeaseError, LiveRunError
from chameleon_ft.events.kinds import BackgroundReplaced
from chameleon_ft.events.records import RunStatus
from chameleon_ft.launch.background import background
from chameleon_ft.launch.processes import FORK, inspect, load_solvers, signals_handled, start_fork_server, unattended
from chameleon_ft.launch.start import RunStart, control_listener
from chameleon_ft.protocol.address import (
    TOKEN_VARIABLE,
    join_address,
    own_address,
    split_address,
    tls_context,
)
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.connection import control_connection
from chameleon_ft.protocol.messages import Acknowledged, Exit, StandbyHello
from chameleon_ft.protocol.server import DOES_NOT_LEAD, control_server, listening_socket
from chameleon_ft.report.terminal import TerminalView
from chameleon_ft.storage.files import ControlAddress, RunDirectory, detach
from chameleon_ft.storage.recorder import Recorder, View

EXIT_CODES: Final[dict[RunStatus, int]] = {"finished": 0, "failed": 1, "interrupted": 130, "terminated": os.EX_TEMPFAIL}
_COLLECTIONS: Final = (10_000, 20, 100)
"""Objects, and collections of younger generations, before each collection; as for `gc.set_threshold`."""
DEPOSED: Final = os.EX_UNAVAILABLE
"""Exit code of a coordinator that ends because another one leads the run."""


class InterruptCount:
    """Counts how often the end of a run was requested.

    A terminal sends Ctrl-C both to the coordinator and to its launcher, which passes it on.
    So the requests of the sender with most of them count.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._requests: Counter[str] = Counter()
        self._done = 0

    def request(self, sender: str) -> None:
        """Interrupt the run, unless another sender has been first."""
        self._requests[sender] += 1
        if self._requests[sender] > self._done:
            self._done += 1
            self._interrupt()


Beside: TypeAlias = Callable[[ControlAddress, Coordinator, InterruptCount], AbstractAsyncContextManager[None]]
"""A context beside a coordinator that listens."""


def coordinate(
    config: RunConfig,
    *,
    run: RunDirectory,
    resume: bool,
    view: View | None = None,
    beside: Beside | None = None,
) -> int:
    """Run the coordinator alone; the workers join from other processes. Returns the exit code.

    Args:
        view: displays the run, by default on the terminal.
        beside: entered once it listens; by default it prints how to join.
    """

    return run_coordinator(
        begin_run(config, run=run, resume=resume, view=view, beside=beside or partial(invite, run), processes=FORK)
    )


async def begin_run(
    config: RunConfig,
    *,
    run: RunDirectory,
    resume: bool,
    beside: Beside,
    processes: BaseContext,
    view: View | None = None,
) -> RunStatus:
    """Coordinate a run from its beginning, and return how it ended; see `coordinate` and `serve_run`."""
    start = await started_job(config, run=run, resume=resume)
    # A token that the machines of the run have in common beforehand, such as a secret of Kubernetes.
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(16)
    with control_listener(config, run, token=token) as (control, listener):
        return await serve_run(start, control, listener=listener, beside=beside, processes=processes, view=view)


def run_coordinator(coordinated: Coroutine[Any, Any, RunStatus]) -> int:
    """Run a coordinator, and return its exit code."""
    with unattended():
        try:
            return EXIT_CODES[asyncio.run(coordinated)]
        except DeposedError as error:
            print(error, file=sys.stderr, flush=True)
            return DEPOSED


async def serve_run(
    start: RunStart,
    control: ControlAddress,
    *,
    listener: socket.socket,
    beside: Beside,
    processes: BaseContext,
    view: View | None = None,
    leadership: Leadership | None = None,
    terminate: Callable[[Coordinator, signal.Signals], None] = Coordinator.hand_over,
) -> RunStatus:
    """Coordinate a run until it ends.

    Args:
        listener: the socket at the address of `control`.
        beside: entered once the coordinator listens.
        processes: starts the process of background work. One that is forked has loaded what decisions need.
        view: displays the run, by default on the terminal.
        leadership: a term that this process has claimed to continue the run of another coordinator; None: begin it.
        terminate: called when this process is asked to end; by default it leaves the run to one that stands by.

    Raises:
        DeposedError: another coordinator leads, or is to lead.
    """
    _collect_rarely()
    config, run = start.config, start.run
    last = None if leadership is None else LastEntry.newest(run)
    leadership = leadership or await _claim(start, control.address)
    view = view or TerminalView(steps=config.steps, files=str(run.path))
    # A coordinator that is lost may have them open.
    for file in (run.metrics_file, run.events_file):
        detach(file, may_write=leadership.holds)
    with Recorder(run, view, may_write=leadership.holds) as recorder, background(processes) as executor:
        setup = RunSetup(
            config=config,
            run=run,
            recorder=recorder,
            job=start.job,
            profile=start.profile,
            plan=start.plan,
            resume=start.resume or last is not None,
            changes=start.changes,
            takes_over=last is not None,
            executor=executor,
        )
        coordinator = Coordinator(
            setup,
            journal=Journal(run.journal_file(leadership.term), recorder.files),
            last=last,
            leadership=leadership,
        )
        replaced = "the process of background work {}; another one repeats its work"
        executor.replaced = lambda why: recorder.record(BackgroundReplaced(reason=why, message=replaced.format(why)))
        # Its own journal has the whole state by now, or it begins a run anew.
        for journal in run.journals():
            if journal < run.journal_file(leadership.term):
                recorder.files.submit(journal, partial(journal.unlink, missing_ok=True))
        async with control_server(
            coordinator,
            listener=listener,
            token=control.token,
            tls=control.tls,
            heartbeat_timeout_s=config.timeouts.heartbeat_timeout_s,
            expected=config.workers,
            first_number=coordinator.first_connection,
            leads=coordinator.leads,
        ):
            recorder.files.submit(run.control_file, partial(run.write_control, control))
            try:
                interrupts = InterruptCount(coordinator.interrupt)
                interrupt = partial(interrupts.request, "signal")
                async with beside(control, coordinator, interrupts):
                    with signals_handled(interrupt=interrupt, terminate=partial(terminate, coordinator)):
                        return await coordinator.wait()
            finally:
                recorder.files.submit(run.control_file, run.remove_control)


def _collect_rarely() -> None:
    """Make full garbage collections rare: with thousands of peers each stops the event loop for half a second.

    What a coordinator makes, such as connections and plans, lives long or is freed without them.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)


async def _claim(start: RunStart, address: str) -> Leadership:
    """Claim the next term, once the leader of an earlier start is gone.

    Raises:
        LiveRunError: it is not, or another coordinator has claimed a term at the same moment.
    """
    lease, lease_s = lease_of(start.config, start.run), start.config.control.lease_s

    def lives(claim: Claim) -> NoReturn:
        raise LiveRunError(
            start.run.path, f"process {claim.pid} on {claim.host.split()[0]}, which leads in term {claim.term}"
        )

    while True:
        before = await lease.newest()
        if before is not None and not _has_ended(start.run, before.term):
            before = await wait_for_silence(lease, lease_s=lease_s, lives=lives)
        term = 1 if before is None else before.term + 1
        if (leadership := await Leadership.claimed(lease, term, address=address, lease_s=lease_s)) is not None:
            return leadership


def _has_ended(run: RunDirectory, term: int) -> bool:
    """Return whether the coordinator of a term has ended the run, as its journal says."""
    try:
        last = LastEntry.newest(run)
    except ChameleonError:
        # A run that begins or resumes does not read the journal, which may be damaged.
        return False
    return last is not None and last.state.term == term and last.status is not None


@asynccontextmanager
async def invite(
    run: RunDirectory, control: ControlAddress, coordinator: Coordinator, interrupts: InterruptCount
) -> AsyncIterator[None]:
    """Print how to join."""
    print(
        f"waiting for {coordinator.state.settings.workers} workers; on each machine, with the token in CHAMELEON_TOKEN:"
    )
    # The token goes to a terminal and to no log file.
    secret = control.token if sys.stdout.isatty() else "..."
    tls = "" if control.tls is None else " --tls DIRECTORY"
    print(f"  CHAMELEON_TOKEN={secret} chameleon agent --coordinator {control.address}{tls} --workers N")
    print(f"or, where the run directory can be read: chameleon agent --run {run.path} --workers N", flush=True)
    yield


async def started_job(config: RunConfig, *, run: RunDirectory, resume: bool) -> RunStart:
    """Inspect the job and load the solvers. Raises what `inspect` and `RunStart.of` raise."""
    start_fork_server()
    solvers = _start_loading_solvers()
    job = await inspect(config, workers=0)
    # No rank is started before the kernels are compiled: compiling blocks the event loop and its heartbeats.
    await solvers
    return RunStart.of(config, run=run, job=job, resume=resume)


def _start_loading_solvers() -> asyncio.Task[None]:
    """Run `load_solvers` in a daemon thread: Ctrl-C does not wait for it, as for a thread of the loop's executor."""
    done: Future[None] = Future()

    def load() -> None:
        done.set_running_or_notify_cancel()
        try:
            load_solvers()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where the task is awaited
            done.set_exception(error)

    async def wait() -> None:
        await asyncio.wrap_future(done)

    threading.Thread(target=load, daemon=True).start()
    return asyncio.create_task(wait())


_RETRY_S: Final = 0.5
# A coordinator that stands by claims the next term after one, by its own clock.
_LEASES_TO_SUCCEED: Final = 2


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
        with listening_socket(own_host, port) as listener:
            address = join_address(own_host, listener.getsockname()[1])
            control = ControlAddress(address=address, token=leader.token, pid=os.getpid(), tls=leader.tls)
            return await succeed_coordinator(
                start,
                control,
                listener=listener,
                beside=lambda *_: contextlib.nullcontext(),
                processes=FORK,
                # Peers look for this one from now on, and not before.
                announced=partial(print, f"standing by at {address} for the coordinator of {run.path}", flush=True),
                leading=lambda term: print(f"the coordinator is lost; this one leads in term {term}", flush=True),
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
        return await succeed_coordinator(start, control, listener=listener, beside=beside, processes=processes)


async def succeed_coordinator(
    start: RunStart,
    control: ControlAddress,
    *,
    listener: socket.socket,
    beside: Beside,
    processes: BaseContext,
    announced: Callable[[], None] = lambda: None,
    leading: Callable[[int], None] = lambda _: None,
    terminate: Callable[[Coordinator, signal.Signals], None] = Coordinator.hand_over,
) -> RunStatus:
    """Stand by until the coordinator of a run is lost, then coordinate the run until it ends; see `serve_run`.

    Args:
        announced: called once the coordinator that leads has told all peers that this one stands by.
        leading: called with the term in which this one leads.
    """
    leadership = await _until_lost(start, control, listener, announced=announced)
    if not isinstance(leadership, Leadership):
        return leadership
    leading(leadership.term)
    with ExitStack() as stack:
        if (found := leadership.claim.address) != control.address:
            listener.close()
            listener = stack.enter_context(listening_socket(*split_address(found)))
            control = replace(control, address=found)
        return await serve_run(
            start,
            control,
            listener=listener,
            beside=beside,
            processes=processes,
            leadership=leadership,
            terminate=terminate,
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


async def _until_lost(
    start: RunStart, control: ControlAddress, listener: socket.socket, *, announced: Callable[[], None]
) -> Leadership | RunStatus:
    """Stand by until this process has claimed a term, or the run is over; print and return how it ended then.

    The claim has the address at which to lead: another one than that of `control` if peers know only that of the
    coordinator that is lost, and it is one of this host.

    Args:
        control: The address of this process.
        listener: the socket at its address, where it refuses all connections meanwhile.
        announced: called once the coordinator that leads has told all peers that this one stands by.
    """
    lease, lease_s = lease_of(start.config, start.run), start.config.control.lease_s
    is_known = asyncio.Event()

    def noted() -> None:
        is_known.set()
        announced()

    claiming = asyncio.create_task(_claim_term(lease, start.run, control.address, lease_s, is_known))
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


async def _claim_term(
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
