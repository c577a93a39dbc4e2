"""Starts the processes of a run: coordinator, agent and ranks."""

from __future__ import annotations

import asyncio
import gc
import importlib
import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import Pipe, active_children, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from chameleon_ft.config import RunConfig
from chameleon_ft.control.agent import Agent
from chameleon_ft.control.coordinator import Coordinator
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.control.journal import Journal, LastEntry
from chameleon_ft.control.start_plan import read_start_plan
from chameleon_ft.control.wire.address import local_address_towards, split_address
from chameleon_ft.control.wire.messages import Exit
from chameleon_ft.control.wire.server import control_server, listening_address
from chameleon_ft.control.wire.tls import generate_certificates
from chameleon_ft.errors import ChameleonError, CheckpointError, ConfigError, ControlError
from chameleon_ft.observe import (
    ControlAddress,
    Recorder,
    RunDirectory,
    RunStatus,
    checkpoint_model,
    sound_checkpoint,
)
from chameleon_ft.observe.terminal import TerminalView
from chameleon_ft.plan import Plan
from chameleon_ft.profiles import Profile, profile_of_run
from chameleon_ft.recovery import warm_up
from chameleon_ft.recovery.warm_up import COMPILING, COMPILING_AFTER_S
from chameleon_ft.runtime.fork_server import ForkServer
from chameleon_ft.runtime.process import SAME_SIGNAL_S, end_with, exit_immediately

__all__ = ["coordinate", "run_agent", "take_over", "train", "work"]

_RANK = "chameleon_ft.runtime.rank:spawned_rank_main"
_INSPECTION = "chameleon_ft.runtime.inspection:inspection_main"
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)
_NICENESS = 10  # yields to ranks that compute on all cores, and still makes progress
_EXIT_CODES: dict[RunStatus, int] = {"finished": 0, "failed": 1, "interrupted": 130, "terminated": os.EX_TEMPFAIL}


def train(config: RunConfig, *, run: RunDirectory, resume: bool) -> int:
    """Run everything on this machine: coordinator, agent and ranks. Returns the exit code."""
    return asyncio.run(_coordinate(config, run=run, resume=resume, agent_here=True))


def coordinate(config: RunConfig, *, run: RunDirectory, resume: bool) -> int:
    """Run the coordinator alone; the workers join from other processes. Returns the exit code."""
    return asyncio.run(_coordinate(config, run=run, resume=resume, agent_here=False))


def take_over(config: RunConfig, *, run: RunDirectory) -> int:
    """Continue a run whose coordinator is lost, at the address where that one was. Returns the exit code.

    Raises:
        ControlError: the run has no journal, or a damaged one.
    """
    return asyncio.run(_coordinate(config, run=run, resume=True, agent_here=False, lost=run.read_control()))


def run_agent(*, coordinator: str, token: str, tls: Path | None, workers: int, host: str | None) -> int:
    """Start and watch `workers` ranks of the run at `coordinator`, which is host:port. Returns the exit code.

    Raises:
        ControlError: the coordinator does not answer, or does not want this host.
    """
    return asyncio.run(_run_agent(coordinator=coordinator, token=token, tls=tls, workers=workers, host=host))


def work(*, coordinator: str, token: str, tls: Path | None, environ: Mapping[str, str]) -> NoReturn:
    """Be one rank, started by a launcher that sets RANK and LOCAL_RANK; ends the process.

    Raises:
        ControlError: the coordinator cannot be joined.
    """
    from chameleon_ft.runtime.rank import rank_main

    code = rank_main(
        coordinator=coordinator,
        token=token,
        tls=tls,
        worker=int(environ["RANK"]),
        host=environ.get("CHAMELEON_HOST") or local_address_towards(coordinator),
        local_index=int(environ["LOCAL_RANK"]),
    )
    exit_immediately(code)


async def _coordinate(
    config: RunConfig, *, run: RunDirectory, resume: bool, agent_here: bool, lost: ControlAddress | None = None
) -> int:
    """Coordinate a run until it ends; with `lost`, from where the coordinator at that address has left it."""
    server = _fork_server()
    solvers = _start_loading_solvers()
    job = await _inspect(server, config)
    # No rank is started before the kernels are compiled: compiling blocks the event loop and its heartbeats.
    await asyncio.wait({solvers}, timeout=COMPILING_AFTER_S)
    if not solvers.done():
        print(COMPILING, flush=True)
    await solvers
    if resume:
        _require_same_model(run, job, config)
        run.write_config(config)
        config = run.own(config)
    if agent_here:
        _require_device(config, job)
    if lost is None:
        host, port, last = config.control.host, config.control.port, None
        token, tls = secrets.token_urlsafe(16), _tls_directory(config, run)
    else:
        host, port = split_address(lost.address)
        token, tls, last = lost.token, lost.tls, LastEntry.read(run.journal_file)
    profile = _profile(config, job)
    plan = _plan(config, job)
    with (
        Recorder(run, TerminalView()) as recorder,
        Journal(run.journal_file) as journal,
        _background() as background,
    ):
        coordinator = Coordinator(
            config=config,
            run=run,
            recorder=recorder,
            job=job,
            profile=profile,
            plan=plan,
            resume=resume,
            executor=background,
            journal=journal,
            last=last,
        )
        async with control_server(
            coordinator,
            host=host,
            port=port,
            token=token,
            tls=tls,
            heartbeat_timeout_s=config.timeouts.heartbeat_timeout_s,
            first_number=coordinator.first_connection,
        ) as control:
            address = listening_address(control, host)
            at = ControlAddress(address=address, token=token, pid=os.getpid(), tls=tls)
            run.write_control(at)
            try:
                async with _agent(server, config, at, coordinator, here=agent_here):
                    with _signals_handled(SIGINT=coordinator.interrupt, SIGTERM=coordinator.terminate):
                        status = await coordinator.wait()
            finally:
                run.remove_control()
    return _EXIT_CODES[status]


def _start_loading_solvers() -> asyncio.Task[None]:
    """Run `_load_solvers` in a daemon thread: Ctrl-C does not wait for it, as for a thread of the loop's executor."""
    done: Future[None] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            _load_solvers()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where the task is awaited
            done.set_exception(error)

    async def wait() -> None:
        await asyncio.wrap_future(done)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.create_task(wait())


@contextmanager
def _signals_handled(**handlers: Callable[[], object]) -> Iterator[None]:
    """Call these handlers, by the names of their signals, inside the block."""
    loop = asyncio.get_running_loop()
    for name, handler in handlers.items():
        loop.add_signal_handler(signal.Signals[name], handler)
    try:
        yield
    finally:
        for name in handlers:
            loop.remove_signal_handler(signal.Signals[name])


@asynccontextmanager
async def _agent(
    server: ForkServer, config: RunConfig, control: ControlAddress, coordinator: Coordinator, *, here: bool
) -> AsyncIterator[None]:
    """Run this machine's agent inside the block; only print how to join if the workers come from elsewhere."""
    if not here:
        print(f"waiting for {config.workers} workers; on each machine, with the token in CHAMELEON_TOKEN:")
        # The token goes to a terminal and to no log file.
        secret = control.token if sys.stdout.isatty() else "..."
        tls = "" if control.tls is None else " --tls DIRECTORY"
        print(f"  CHAMELEON_TOKEN={secret} chameleon agent --coordinator {control.address}{tls} --workers N")
        print(
            f"or, where the run directory can be read: chameleon agent --run {config.output_dir} --workers N",
            flush=True,
        )
        yield
        return
    agent = Agent(
        coordinator=control.address,
        token=control.token,
        tls=control.tls,
        slots=config.workers,
        host=None,
        start_rank=partial(server.fork, _RANK),
    )
    serving = asyncio.create_task(agent.serve())
    serving.add_done_callback(partial(_fail_with, coordinator))
    try:
        yield
    finally:
        try:
            await serving  # which ends every rank after the coordinator's exit message
        finally:
            agent.kill_all()


def _fail_with(coordinator: Coordinator, serving: asyncio.Task[Exit | None]) -> None:
    """End the run if its agent fails before it connects, which the coordinator cannot notice."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        coordinator.end("failed", f"the agent of this machine failed: {error}")


async def _run_agent(*, coordinator: str, token: str, tls: Path | None, workers: int, host: str | None) -> int:
    start_rank = partial(_fork_server().fork, _RANK)
    agent = Agent(coordinator=coordinator, token=token, tls=tls, slots=workers, host=host, start_rank=start_rank)
    serving = asyncio.ensure_future(agent.serve())

    loop, terminated_s = asyncio.get_running_loop(), math.inf

    def terminate() -> None:
        nonlocal terminated_s
        if loop.time() - terminated_s > SAME_SIGNAL_S or (terminated_s == math.inf and not agent.drain()):
            serving.cancel()
        elif terminated_s == math.inf:
            print("draining the workers of this agent; SIGTERM or Ctrl-C ends them at once", flush=True)
        terminated_s = min(terminated_s, loop.time())

    try:
        with _signals_handled(SIGINT=serving.cancel, SIGTERM=terminate):
            order = await serving
        if order is not None:
            return order.exit_code
        print("the connection to the coordinator is lost; the ranks of this host have been ended", file=sys.stderr)
        return 1 if terminated_s == math.inf else os.EX_TEMPFAIL
    except asyncio.CancelledError:
        return 130 if terminated_s == math.inf else os.EX_TEMPFAIL


@cache
def _fork_server() -> ForkServer:
    """Start a fork server that loads everything a rank needs; all runs of this process share it."""
    return ForkServer("chameleon_ft.runtime.preload", _HELD_BACK)


@contextmanager
def _background() -> Iterator[Executor]:
    """Yield an executor of one process for long work that is not urgent; it is killed at the end of the block."""
    context, others = get_context("spawn"), set(active_children())
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=_init_background, initargs=(os.getpid(),))
    resource_tracker.ensure_running()  # its own start, which that of the process includes, would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        executor.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield executor
    finally:
        for process in set(active_children()) - others:
            process.kill()
        executor.shutdown(cancel_futures=True)


def _init_background(parent: int) -> None:
    end_with(parent)
    # Before lowering the priority, which makes this second a minute beside ranks that compute on all cores.
    _load_solvers()
    os.nice(_NICENESS)


def _load_solvers() -> None:
    """Import, and after an installation compile, what decisions need, so that the first one does not wait for it."""
    for name in ("rustworkx", "scipy.optimize", "scipy.sparse.csgraph"):
        importlib.import_module(name)
    warm_up()
    # All of this stays; a garbage collection that scans it takes as long as half a decision.
    gc.collect()
    gc.freeze()


def _require_same_model(run: RunDirectory, job: JobInfo, config: RunConfig) -> None:
    """Raise CheckpointError if the newest sound checkpoint of `run` is of another model than `job`."""
    step, _ = sound_checkpoint(run.checkpoints)
    expected = job.fingerprint
    if config.forked.run and step == config.forked.step:
        expected = job.fingerprint_with(config.forked.micro_batch_size, instead_of=config.batch.micro_batch_size)
    if step is not None and checkpoint_model(run.checkpoints, step) != expected:
        raise CheckpointError(
            f"--resume {run.path}: its checkpoint of step {step} is of a model with other layers than the job has "
            "now; undo the change to the model, or begin a new run"
        )


def _require_device(config: RunConfig, job: JobInfo) -> None:
    """Raise ConfigError if this host, which the workers are on, lacks their device."""
    if config.device != "emulated" and not job.device:
        raise ConfigError(f'device = "{config.device}": this host has none that torch can use; take "cpu"')


def _profile(config: RunConfig, job: JobInfo) -> Profile | None:
    """Return the profile of the run, if it has one. Raises ProfileError if it is not of this job on this device."""
    if config.profile is None:
        return None
    profile = profile_of_run(config)
    if config.device != "emulated":
        wanted = asdict(job.profiled_as(config))
        if not job.device:
            del wanted["device"]  # the workers are on other hosts
        profile.require(wanted)
    return profile


def _tls_directory(config: RunConfig, run: RunDirectory) -> Path | None:
    """Return the directory for TLS, with new certificates where they are to be generated. Raises ConfigError."""
    match config.control.tls:
        case "off":
            return None
        case "generate":
            generate_certificates(run.tls)
            return run.tls
        case directory:
            return Path(directory)


def _plan(config: RunConfig, job: JobInfo) -> Plan | None:
    """Return the plan to start with, if the run was given one. Raises ConfigError if it is of another model."""
    plan = read_start_plan(config)
    if plan is not None and plan.placement.num_layers != job.num_layers:
        raise ConfigError(
            f"plan {config.plan}: places {plan.placement.num_layers} layers, and the job has {job.num_layers}; "
            "make one for this job by `chameleon plan`"
        )
    return plan


async def _inspect(server: ForkServer, config: RunConfig) -> JobInfo:
    """Load the job in a process of its own. Raises the error of loading it."""
    ours, theirs = Pipe(duplex=False)
    with ours:
        with theirs:
            process = await server.fork(_INSPECTION, theirs.fileno(), config=config)
        try:
            found = await _receive(ours)
        except EOFError:
            raise ControlError(f"job {config.job}: the process that loads it ended without a word") from None
        finally:
            process.kill()
            await process.wait()
    if isinstance(found, ChameleonError):
        raise found
    assert isinstance(found, JobInfo)
    return found


async def _receive(pipe: Connection) -> Any:
    """Return what comes through `pipe`. Raises EOFError if its other end is closed."""
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()
