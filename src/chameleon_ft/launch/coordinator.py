"""The coordinator of a run in this process."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Final, NoReturn, TypeAlias

from chameleon_ft.config import RunConfig
from chameleon_ft.control.command_runner import RunSetup
from chameleon_ft.control.coordinator import Coordinator
from chameleon_ft.control.journal import Journal, LastEntry
from chameleon_ft.control.leadership import Leadership, wait_for_silence
from chameleon_ft.control.lease import Claim, lease_of
from chameleon_ft.control.wire.address import TOKEN_VARIABLE, address_of_host, join_address
from chameleon_ft.control.wire.server import control_server, listening_socket
from chameleon_ft.errors import ChameleonError, DeposedError, LiveRunError
from chameleon_ft.launch.background import background
from chameleon_ft.launch.forked_process import FORK
from chameleon_ft.launch.processes import inspect, load_solvers, signals_handled, start_fork_server, unattended
from chameleon_ft.launch.start import RunStart, tls_directory
from chameleon_ft.observe import ControlAddress, Recorder, RunDirectory, RunStatus, View, detach
from chameleon_ft.observe.terminal import TerminalView

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
    view: View | None,
    beside: Beside,
    processes: BaseContext,
) -> RunStatus:
    """Coordinate a run from its beginning, and return how it ended; see `coordinate` and `serve_run`."""
    start = await started_job(config, run=run, resume=resume)
    host = address_of_host(config.control.host)
    with listening_socket(host, config.control.port) as listener:
        address = join_address(host, listener.getsockname()[1])
        # A token that the machines of the run have in common beforehand, such as a secret of Kubernetes.
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(16)
        tls = tls_directory(config, run)
        control = ControlAddress(address=address, token=token, pid=os.getpid(), tls=tls)
        return await serve_run(
            start,
            control,
            listener=listener,
            view=view or TerminalView(),
            beside=beside,
            processes=processes,
        )


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
    view: View,
    beside: Beside,
    processes: BaseContext,
    leadership: Leadership | None = None,
    terminate: Callable[[Coordinator, signal.Signals], None] = Coordinator.hand_over,
) -> RunStatus:
    """Coordinate a run until it ends.

    Args:
        listener: the socket at the address of `control`.
        beside: entered once the coordinator listens.
        processes: starts the process of background work. One that is forked has loaded what decisions need.
        leadership: a term that this process has claimed to continue the run of another coordinator; None: begin it.
        terminate: called when this process is asked to end; by default it leaves the run to one that stands by.

    Raises:
        DeposedError: another coordinator leads, or is to lead.
    """
    _collect_rarely()
    config, run = start.config, start.run
    last = None if leadership is None else LastEntry.newest(run)
    leadership = leadership or await _claim(start, control.address)
    for file in (run.metrics_file, run.events_file):  # a coordinator that is lost may have them open
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
        executor.replaced = partial(_record_replacement, recorder)
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


def _record_replacement(recorder: Recorder, why: str) -> None:
    message = f"the process of background work {why}; another one repeats its work"
    recorder.event("background_replaced", reason=why, message=message)


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
    except ChameleonError:  # damaged; it is not read by a run that begins or resumes
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
