"""Starting the processes of a run: coordinator, rendezvous store, agent and ranks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, NoReturn

from chameleon_ft.config import RunConfig
from chameleon_ft.control.agent import Agent
from chameleon_ft.control.coordinator import Coordinator
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.control.start_plan import read_start_plan
from chameleon_ft.control.wire.address import local_address_towards
from chameleon_ft.control.wire.server import control_server, listening_address
from chameleon_ft.errors import ChameleonError, CheckpointError, ConfigError, ControlError
from chameleon_ft.observe import (
    ControlAddress,
    Recorder,
    RunDirectory,
    RunStatus,
    checkpoint_model,
    complete_checkpoints,
)
from chameleon_ft.observe.terminal import TerminalView
from chameleon_ft.plan import Plan
from chameleon_ft.profiles import Profile, profile_of_run
from chameleon_ft.recovery import warm_up
from chameleon_ft.recovery.warm_up import COMPILING, COMPILING_AFTER_S
from chameleon_ft.runtime.process import end_now, end_with_parent, ignore_interrupts, signals_blocked

__all__ = ["coordinate", "run_agent", "train", "work"]

_POLL_S = 0.05
_NICENESS = 10  # little beside ranks that compute on all cores, and enough to get on
_EXIT_CODES: dict[RunStatus, int] = {"finished": 0, "failed": 1, "interrupted": 130}


def train(config: RunConfig, *, run: RunDirectory, resume: bool) -> int:
    """Run everything on this machine: coordinator, agent and ranks. Returns the exit code."""
    return asyncio.run(_coordinate(config, run=run, resume=resume, agent_here=True))


def coordinate(config: RunConfig, *, run: RunDirectory, resume: bool) -> int:
    """Run the coordinator alone; the workers join from other processes. Returns the exit code."""
    return asyncio.run(_coordinate(config, run=run, resume=resume, agent_here=False))


def run_agent(*, coordinator: str, token: str, workers: int, host: str | None) -> int:
    """Start and watch `workers` ranks of the run at `coordinator`, which is host:port. Returns the exit code.

    Raises:
        ControlError: the coordinator does not answer, or does not want this host.
    """
    return asyncio.run(_run_agent(coordinator=coordinator, token=token, workers=workers, host=host))


def work(*, coordinator: str, token: str, environ: Mapping[str, str]) -> NoReturn:
    """Be one rank, started by a launcher that sets RANK and LOCAL_RANK; ends the process.

    Raises:
        ControlError: the coordinator cannot be joined.
    """
    from chameleon_ft.runtime.rank import rank_main

    code = rank_main(
        coordinator=coordinator,
        token=token,
        worker=int(environ["RANK"]),
        host=environ.get("CHAMELEON_HOST") or local_address_towards(coordinator),
        local_index=int(environ["LOCAL_RANK"]),
    )
    end_now(code)


async def _coordinate(config: RunConfig, *, run: RunDirectory, resume: bool, agent_here: bool) -> int:
    context = _fork_server()
    solvers = _begun(_load_solvers)
    token = secrets.token_urlsafe(16)
    with _store(context, config.control.host) as ready:
        # Both wait for the fork server to have torch loaded.
        job, store_port = await _both(partial(_inspect, context, config), ready)
        # Nobody is started who would have to be heard while kernels are compiled.
        await _said_if_long(solvers)
        if resume:
            _require_same_model(run, job)
            run.write_config(config)
            config = run.own(config)
        if agent_here:
            _require_device(config, job)
        profile = _profile(config, job)
        plan = _plan(config, job)
        with Recorder(run, TerminalView()) as recorder, _background(context) as background:
            coordinator = Coordinator(
                config=config,
                run=run,
                recorder=recorder,
                job=job,
                profile=profile,
                plan=plan,
                store_port=store_port,
                resume=resume,
                executor=background,
            )
            async with control_server(
                coordinator,
                host=config.control.host,
                port=config.control.port,
                token=token,
                heartbeat_s=config.timeouts.heartbeat_timeout_s,
            ) as server:
                address = listening_address(server, config.control.host)
                run.write_control(ControlAddress(address=address, token=token, pid=os.getpid()))
                try:
                    async with _agent(context, config, address, token, coordinator, here=agent_here):
                        status = await _until_end(coordinator)
                finally:
                    run.remove_control()
    return _EXIT_CODES[status]


async def _both(
    inspect: Callable[[threading.Event], JobInfo], ready: Callable[[threading.Event], int]
) -> tuple[JobInfo, int]:
    """Run both in threads; on Ctrl-C tell them to come back, for a thread cannot be cancelled."""
    cancelled = threading.Event()
    try:
        return await asyncio.gather(asyncio.to_thread(inspect, cancelled), asyncio.to_thread(ready, cancelled))
    finally:
        cancelled.set()


def _begun(work: Callable[[], None]) -> asyncio.Future[None]:
    """Begin some work in a thread that nobody waits for if this process is to end first."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:  # noqa: BLE001 - it is raised where it is waited for
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, daemon=True).start()
    return done


async def _said_if_long(solvers: asyncio.Future[None]) -> None:
    """Wait for what decisions are made with, and say why where that takes long: after an installation it does."""
    await asyncio.wait({solvers}, timeout=COMPILING_AFTER_S)
    if not solvers.done():
        print(COMPILING, flush=True)
    await solvers


async def _until_end(coordinator: Coordinator) -> RunStatus:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, coordinator.interrupt)
    try:
        return await coordinator.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def _agent(
    context: ForkServerContext, config: RunConfig, address: str, token: str, coordinator: Coordinator, *, here: bool
) -> AsyncIterator[None]:
    """Run this machine's agent inside the block; a no-op where the workers come from elsewhere."""
    if not here:
        print(f"waiting for {config.workers} workers; on each machine, with the token in CHAMELEON_TOKEN:")
        # The token is shown to the person at the terminal, and to no log file.
        secret = token if sys.stdout.isatty() else "..."
        print(f"  CHAMELEON_TOKEN={secret} chameleon agent --coordinator {address} --workers N")
        print(
            f"or, where the run directory can be read: chameleon agent --run {config.output_dir} --workers N",
            flush=True,
        )
        yield
        return
    agent = Agent(coordinator=address, token=token, slots=config.workers, host=None, context=context, entry=_rank_entry)
    serving = asyncio.create_task(agent.serve())
    serving.add_done_callback(partial(_fail_with, coordinator))
    try:
        yield
    finally:
        try:
            await serving  # told to exit, it sees to it that every rank has ended
        finally:
            agent.kill_all()


def _fail_with(coordinator: Coordinator, serving: asyncio.Task[bool]) -> None:
    """End the run where its agent could not even begin: nobody else would tell the coordinator."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        coordinator.end("failed", f"the agent of this machine failed: {error}")


async def _run_agent(*, coordinator: str, token: str, workers: int, host: str | None) -> int:
    context = _fork_server()
    agent = Agent(coordinator=coordinator, token=token, slots=workers, host=host, context=context, entry=_rank_entry)
    serving = asyncio.ensure_future(agent.serve())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    try:
        if await serving:
            return 0
        print("the connection to the coordinator is lost; the ranks of this host have been ended", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 130


def _fork_server() -> ForkServerContext:
    """Return a fork server that loads everything a rank needs, and have it begin at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chameleon_ft.runtime.preload"])
    # A terminal's Ctrl-C, and a batch system's SIGTERM, reach every process of the group. To the fork server and all
    # that it forks they mean nothing, from before its first import: the coordinator sees to the end. What is blocked
    # here stays blocked there.
    resource_tracker.ensure_running()  # its own start, which the fork server's includes, would lift the block
    with signals_blocked(signal.SIGINT, signal.SIGTERM):
        forkserver.ensure_running()
    return context


@contextmanager
def _background(context: ForkServerContext) -> Iterator[Executor]:
    """A process for what takes long and is not urgent; it is ended without waiting for what it is at."""
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=_be_in_the_background)
    pid = executor.submit(os.getpid)
    try:
        yield executor
    finally:
        with contextlib.suppress(BrokenExecutor, TimeoutError, ProcessLookupError):
            os.kill(pid.result(timeout=0), signal.SIGKILL)
        executor.shutdown(cancel_futures=True)


def _be_in_the_background() -> None:
    ignore_interrupts()
    end_with_parent()
    # First what takes a second: beside ranks that compute on all cores it would take a minute, once it gives way.
    _load_solvers()
    os.nice(_NICENESS)


def _load_solvers() -> None:
    """Import, and after an installation compile, what decisions are made with: the first one would wait for it else."""
    for name in ("rustworkx", "scipy.optimize", "scipy.sparse.csgraph"):
        importlib.import_module(name)
    warm_up()
    # All of this stays. To go through it in search of garbage takes as long as half a decision.
    gc.collect()
    gc.freeze()


def _rank_entry(*, coordinator: str, token: str, worker: int, incarnation: int, host: str, local_index: int) -> None:
    from chameleon_ft.runtime.rank import spawned_rank_main

    spawned_rank_main(
        coordinator=coordinator, token=token, worker=worker, incarnation=incarnation, host=host, local_index=local_index
    )


def _store_entry(host: str, pipe: Connection) -> None:
    from chameleon_ft.runtime.store import store_main

    store_main(host, pipe)


def _inspection_entry(config: RunConfig, pipe: Connection) -> None:
    from chameleon_ft.runtime.inspection import inspection_main

    inspection_main(config, pipe)


def _require_same_model(run: RunDirectory, job: JobInfo) -> None:
    """Raise CheckpointError where the newest checkpoint of `run` is of another model than `job`."""
    for step in complete_checkpoints(run.checkpoints)[-1:]:
        if checkpoint_model(run.checkpoints, step) != job.fingerprint:
            raise CheckpointError(
                f"--resume {run.path}: its checkpoint of step {step} is of a model with other layers than the job has "
                "now; undo the change to the model, or begin a new run"
            )


def _require_device(config: RunConfig, job: JobInfo) -> None:
    """Raise ConfigError where the workers, which are on this host, would not find their device."""
    if config.device != "emulated" and not job.device:
        raise ConfigError(f'device = "{config.device}": this host has none that torch can use; take "cpu"')


def _profile(config: RunConfig, job: JobInfo) -> Profile | None:
    """Return the profile of the run, if it has one. Raises ProfileError where it is not of this job on this device."""
    if config.profile is None:
        return None
    profile = profile_of_run(config)
    if config.device != "emulated":
        wanted = asdict(job.profiled_as(config))
        if not job.device:
            del wanted["device"]  # the workers are on other hosts
        profile.require(wanted)
    return profile


def _plan(config: RunConfig, job: JobInfo) -> Plan | None:
    """Return the plan to start with, if the run was given one. Raises ConfigError where it is of another model."""
    plan = read_start_plan(config)
    if plan is not None and plan.placement.num_layers != job.num_layers:
        raise ConfigError(
            f"plan {config.plan}: places {plan.placement.num_layers} layers, and the job has {job.num_layers}; "
            "make one for this job by `chameleon plan`"
        )
    return plan


def _inspect(context: ForkServerContext, config: RunConfig, cancelled: threading.Event) -> JobInfo:
    """Look at the job in a process of its own. Raises what is wrong with it."""
    with _child(context, _inspection_entry, config) as pipe:
        try:
            found = _receive(pipe, cancelled)
        except EOFError:
            raise ControlError(f"job {config.job}: the process that loads it ended without a word") from None
    if isinstance(found, ChameleonError):
        raise found
    assert isinstance(found, JobInfo)
    return found


@contextmanager
def _store(context: ForkServerContext, host: str) -> Iterator[Callable[[threading.Event], int]]:
    """Run the rendezvous store inside the block, which gets a function that waits for its port."""
    with _child(context, _store_entry, host) as pipe:

        def ready(cancelled: threading.Event) -> int:
            try:
                return int(_receive(pipe, cancelled))
            except EOFError:
                raise ControlError(f"the rendezvous store could not be started on {host}") from None

        yield ready


def _receive(pipe: Connection, cancelled: threading.Event) -> Any:
    """Return what comes through `pipe`. Raises EOFError where its other end is closed, ControlError when cancelled."""
    while not pipe.poll(_POLL_S):
        if cancelled.is_set():
            raise ControlError("interrupted before the run began")
    return pipe.recv()


@contextmanager
def _child(context: ForkServerContext, entry: Callable[[Any, Connection], None], argument: Any) -> Iterator[Connection]:
    """Run ``entry(argument, pipe)`` in a process of its own for as long as the block lasts."""
    ours, theirs = context.Pipe()
    child = context.Process(target=entry, args=(argument, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        child.join(timeout=2)
        with contextlib.suppress(ProcessLookupError):
            if child.is_alive():
                child.kill()
                child.join()
