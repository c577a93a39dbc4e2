"""The process of one rank."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.config import RunConfig, config_type, parse_config
from chameleon_ft.errors import ChameleonError
from chameleon_ft.host.fork_server import (
    SAME_SIGNAL_S,
    end_with_holder,
    exit_immediately,
    ignore_interrupts,
    name_process,
    outlive_parent,
    terminations,
)
from chameleon_ft.host.processes import start_time
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.models.compilation import tell_of_compilations
from chameleon_ft.protocol.address import CoordinatorAccess, require_worker_ports
from chameleon_ft.protocol.job_info import LOOPBACK
from chameleon_ft.protocol.messages import Crashed, Exit, Ready, Refused, Welcome
from chameleon_ft.protocol.parts import Member, RankProcess
from chameleon_ft.registry import EMULATION
from chameleon_ft.storage.files import FaultLog, RunDirectory
from chameleon_ft.storage.profiles import costs_of_run, profile_of_run
from chameleon_ft.worker.communicators.base import Communicators
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.control_client import ControlClient
from chameleon_ft.worker.device import claim_device, communicators_for
from chameleon_ft.worker.execution.bad_steps import describe_error
from chameleon_ft.worker.execution.compilation import compile_layers
from chameleon_ft.worker.fault_injection import FaultInjector, failures_of_incarnation
from chameleon_ft.worker.inspection import boundary_of_message, load_examined
from chameleon_ft.worker.loaders import LoaderServer
from chameleon_ft.worker.preflight import available_bytes
from chameleon_ft.worker.trainer import Trainer

_COMPILED_LATER: Final = (
    "torch compiles a part of a layer during training, because it is called with another shape or value than before; "
    "TORCH_LOGS=recompiles shows why"
)


def spawned_rank_main(*lifelines: int, member: Member, **arguments: Any) -> NoReturn:
    """Run `rank_main`, with its arguments, in a process that an agent's fork server started, and end the process.

    It outlives the agent, and ends with the process that holds its lifeline, if there is one.
    """
    name_process(str(member))
    for lifeline in lifelines:
        end_with_holder(lifeline)
    outlive_parent()
    try:
        code = rank_main(member=member, **arguments)
    except ChameleonError as error:
        print(f"{member}: {error}", file=sys.stderr)
        code = 1
    exit_immediately(code)


def rank_main(access: CoordinatorAccess, *, member: Member, host: str, local_index: int) -> int:
    """Join a run, train until told to stop, and return the process's exit code.

    Args:
        host: The address by which other ranks reach this one.
        local_index: The number of this rank on its host, which picks its accelerator.

    Raises:
        ControlError: the coordinator cannot be joined.
    """
    ignore_interrupts()
    own, loaders = os.getpid(), LoaderServer()
    client = ControlClient(
        access,
        member=member,
        host=host,
        process=RankProcess(pid=own, started=start_time(own) or 0, local_index=local_index),
        memory_bytes=available_bytes(),
    )
    _drain_on_termination(client)
    client.start()
    try:
        welcome = client.orders.get()
        if isinstance(welcome, Refused):
            print(f"{member} is refused: {welcome.reason}", file=sys.stderr)
        if not isinstance(welcome, Welcome):
            return welcome.exit_code or 1 if isinstance(welcome, Exit) else 1
        trainer = _trainer(welcome, client, loaders, worker=member.worker, host=host, local_index=local_index)
        client.send(Ready())
        code = trainer.serve()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the job may call sys.exit
        client.send(Crashed(error=describe_error(error)))
        if not isinstance(error, ChameleonError):
            traceback.print_exc()
        code = 1
    with contextlib.suppress(TimeoutError, RuntimeError):
        client.flush()
    return code


def _drain_on_termination(client: ControlClient) -> None:
    """Have SIGTERM or SIGHUP drain this rank, and a later one end it; those of less than a second count as one.

    A batch system may send it to this process and to its agent, which has the rank drained, too.
    """
    own, first_s = os.getpid(), math.inf

    def drain(number: int, _: object) -> None:
        nonlocal first_s
        now = time.monotonic()
        # A process that the job has forked has no connection.
        if os.getpid() != own or now - first_s > SAME_SIGNAL_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        elif first_s == math.inf:
            first_s = now
            client.drain(signal.Signals(number))

    for number in terminations():
        signal.signal(number, drain)
    # A cluster may send it to all processes of a job, as a warning; the launcher acts on it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # The fork server has blocked it until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _trainer(
    welcome: Welcome, client: ControlClient, loaders: LoaderServer, *, worker: int, host: str, local_index: int
) -> Trainer:
    run = RunDirectory(Path(welcome.run))
    data = tomllib.loads(welcome.config)
    config = run.own(parse_config(config_type(data), data, source="the coordinator's configuration"))
    _redirect_output(run.logs / f"worker-{worker}.log")
    require_worker_ports(config.control.worker_ports)
    client.activity.publish()
    device = claim_device(config, local_index)
    failures = failures_of_incarnation(config.failures, worker, welcome.incarnation)
    faults = FaultInjector(worker, failures, log=FaultLog(run.faults_file), disconnect=client.disconnect)
    client.enable_faults(faults)
    emulated = EMULATION["device"](config, worker) if config.is_emulated else None
    on_device = partial(communicators_for, config, address=host, device=device)

    def new_communicators() -> Communicators:
        slowed: Communicators = EMULATION["links"](
            on_device() if emulated is None else emulated.links(on_device()),
            partial(_usual_links, config),
            lambda: faults.link_share,
            scale=1 if emulated is None else emulated.scale,
        )
        return slowed

    samples = json.loads(welcome.samples)
    loaders.serve(config, samples)
    job = load_examined(config, samples)
    reads_ahead = config.loading.processes > 0 and not config.is_emulated
    if is_stream(job.dataset):
        loaders.load()
        reads_ahead = True
    elif not reads_ahead:
        loaders.close()
    layers = welcome.layers
    context = RankContext(
        worker=worker,
        job=replace(job, built_in_full=layers.built_in_full, side_outputs=layers.side_outputs, fields=layers.fields),
        boundaries=tuple(map(boundary_of_message, layers.boundaries)),
        device=device,
        activity=client.activity,
        faults=faults,
        pace=None if emulated is None else emulated.pace,
        stand_in_scale=None if emulated is None else emulated.scale,
    )
    if layers.micro_batch is not None:
        client.activity.idle("compiling layers")
        read = boundary_of_message(layers.micro_batch)
        compile_layers(context.job, context.boundaries, read, seed=config.seed, device=device)
        tell_of_compilations(partial(print, _COMPILED_LATER, file=sys.stderr))
    return Trainer(
        context,
        config=config,
        run=run,
        client=client,
        new_communicators=new_communicators,
        loaders=loaders if reads_ahead else None,
    )


def _usual_links(config: RunConfig, workers: Sequence[int]) -> Cluster:
    """Return the links that injected slowness is a share of: the profile's, or `LOOPBACK` without one."""
    if config.profile is None:
        return Cluster(tuple(Worker(worker, "") for worker in workers), LOOPBACK, LOOPBACK)
    return costs_of_run(config, profile_of_run(config), dict.fromkeys(workers, "")).cluster


def _redirect_output(path: Path) -> None:
    """Send all output of this process to its log, that of native libraries included."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"there will be no log of this worker: {error}", file=sys.stderr)
        return
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _Log.text(1), _Log.text(2)


class _Log(io.FileIO):
    """A log on a disk that may be full, which must not be an error of the code that prints."""

    @classmethod
    def text(cls, descriptor: int) -> io.TextIOWrapper:
        """Return it as a text file that is flushed after each line."""
        buffer = io.BufferedWriter(cls(descriptor, "w", closefd=False))
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
