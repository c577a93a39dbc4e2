"""A run on one machine: a launcher forks the coordinator and the agent, and replaces each of them when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Final

from chameleon_ft.config import RunConfig
from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.coordinator.journal import LastEntry
from chameleon_ft.errors import ChameleonError, ConfigError, DeposedError
from chameleon_ft.events.records import RunStatus
from chameleon_ft.host.fork_server import SAME_SIGNAL_S, Lifeline, receive
from chameleon_ft.launch.agent import create_agent
from chameleon_ft.launch.coordinator import EXIT_CODES, InterruptCount, is_succeeded, serve_run, succeed_coordinator
from chameleon_ft.launch.processes import (
    FORK,
    ForkedProcess,
    describe_end,
    inspect,
    load_solvers,
    received,
    signals_deferred,
    signals_not_lost,
    signals_passed_to,
    start_fork_server,
    unattended,
)
from chameleon_ft.launch.start import RunStart, control_listener
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.report.terminal import TerminalView
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from chameleon_ft.storage.recorder import Recorder

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
        gives_way: Take over only after another coordinator, which stands by now, has led the run.
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
        # All workers of the run are on this machine, and end with it.
        coordinate = partial(
            succeed_coordinator if takes_over else serve_run,
            start,
            control,
            listener=listener,
            beside=obey,
            processes=FORK,
            terminate=Coordinator.terminate,
        )
        return await (coordinate(announced=partial(pipe.send, STANDS_BY)) if takes_over else coordinate())

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


_MAX_DEATHS: Final = 3
"""Coordinators, or agents, that may die without a step between them; then the run ends."""
_MAX_SIGNALS: Final = 2
"""Signals that a coordinator acts on: the first ends the run with a checkpoint, the second at once."""
_ASKS_PER_LEASE: Final = 5
# An agent gives its ranks less time.
_AGENT_GRACE_S: Final = 10.0


def train(config: RunConfig, *, run: RunDirectory, resume: bool) -> int:
    """Run everything on this machine: coordinator, agent and ranks. Returns the exit code.

    Raises:
        ChameleonError: the run cannot be started.
    """
    with (
        unattended(),
        control_listener(config, run, token=secrets.token_urlsafe(16)) as (control, listener),
        closing(Lifeline()) as lifeline,
    ):
        agent = ForkedProcess(partial(run_agent, config, control, listener, lifeline))
        try:
            # Before any process is forked that needs them, and while the agent loads the job.
            with signals_not_lost():
                load_solvers()
            start = RunStart.of(config, run=run, job=agent.answer(), resume=resume)
        except BaseException:
            agent.kill()
            raise
        return EXIT_CODES[_Launcher(start, control, listener, lifeline, agent).wait()]


class _Launcher:
    """Keeps the coordinator and the agent of a run alive until it ends. It has one thread, so it can fork at any time.

    Ranks live on when their agent is killed. They end with the launcher, which holds their lifeline.
    """

    def __init__(
        self,
        start: RunStart,
        control: ControlAddress,
        listener: socket.socket,
        lifeline: Lifeline,
        agent: ForkedProcess,
    ) -> None:
        self._start = start
        self._control = control
        self._listener = listener
        self._lifeline = lifeline
        self._agent = agent
        self._coordinator: ForkedProcess | None = None
        self._signals: list[signal.Signals] = []
        # When the signals came.
        self._signalled_s: list[float] = []
        # Whether another coordinator leads the run.
        self._stands_by = False
        # Whether a coordinator has said how the run ended.
        self._has_ended = False
        # How this process ends if no coordinator says so.
        self._given_up: RunStatus | None = None
        # Whether the agent has been told to drain its workers.
        self._is_draining = False
        self._coordinator_deaths, self._agent_deaths = _Deaths(start.run), _Deaths(start.run)
        self._ask_every_s = start.config.control.lease_s / _ASKS_PER_LEASE
        # How long the coordinator has not answered; None before it has begun.
        self._silent_s: float | None = None
        # How many coordinators have died, and why, once these are too many.
        self._too_many_deaths = ""
        # Why this process has ended the coordinator.
        self._end_reason: str | None = None

    def wait(self) -> RunStatus:
        """Run coordinators until one says how the run ended, and return that. Raises the ChameleonError of one."""
        with signals_passed_to(self._pass_on):
            self._start_coordinator()
            try:
                self._agent.begin()
                outcome = self._watch()
                self._has_ended = True
                if not isinstance(outcome, ChameleonError) and self._given_up is None:
                    self._agent.process.join(_AGENT_GRACE_S)
            finally:
                self._listener.close()
                if self._coordinator is not None:
                    self._coordinator.kill()
                self._agent.kill()
        if isinstance(outcome, ChameleonError):
            raise outcome
        return outcome

    def _watch(self) -> RunStatus | ChameleonError:
        agent: list[Connection] = [self._agent.pipe]
        while True:
            coordinator = self._coordinator
            assert coordinator is not None
            began_s = time.monotonic()
            ready = connection.wait([coordinator.pipe, *agent], self._ask_every_s)
            if coordinator.pipe in ready:
                outcome = received(coordinator.pipe)
                if outcome == ALIVE:
                    self._silent_s, self._stands_by = 0.0, False
                elif outcome == STANDS_BY:
                    print("another coordinator leads the run; one stands by here", flush=True)
                    self._stands_by = True
                    self._give_up_if_unheard()
                elif outcome is None and self._given_up is not None:
                    why = "another coordinator leads the run" if self._stands_by else "the coordinator does not answer"
                    print(f"{why}; this machine and its workers leave it", flush=True)
                    return self._given_up
                elif outcome == ALONE:
                    coordinator.process.join()
                    return self._end_without_coordinator(f"{self._too_many_deaths}, and no standby has taken over")
                elif isinstance(outcome, DeposedError):
                    print(outcome, flush=True)
                    coordinator.process.join()
                    self._start_coordinator(stands_by=True)
                elif outcome is not None:
                    coordinator.process.join()
                    return outcome  # type: ignore[no-any-return]
                elif (lost := self._replace(coordinator)) is not None:
                    return lost
            elif not ready:
                self._ask(coordinator, time.monotonic() - began_s)
                self._give_up_if_unheard()
            elif agent:
                error = received(self._agent.pipe)
                agent.clear()
                self._agent.process.join()
                if error is None and self._agent.process.exitcode == 0:
                    self._give_up_if_unheard()
                    # Its workers have been drained, and others train on.
                    continue
                if error is None and self._replace_agent():
                    agent.append(self._agent.pipe)
                    continue
                error = error or f"it was ended by {describe_end(self._agent.process)}"
                with contextlib.suppress(OSError):
                    coordinator.pipe.send(f"the agent of this machine failed: {error}")

    def _ask(self, coordinator: ForkedProcess, waited_s: float) -> None:
        """Ask a coordinator whether its event loop runs, and end it if it has not answered for the lease.

        Its disk may hang meanwhile, which is no reason. Before it has said that it is alive, it starts or stands by.

        Args:
            waited_s: for which this process has waited for an answer, or has not run itself.
        """
        if self._silent_s is None:
            return
        if self._silent_s == 0.0:
            with contextlib.suppress(OSError):
                coordinator.pipe.send(ALIVE)
        self._silent_s += min(waited_s, self._ask_every_s)
        if self._silent_s > self._start.config.control.lease_s:
            self._end_reason = f"SIGKILL, because it did not answer for {self._silent_s:.1f} s"
            coordinator.process.kill()

    def _start_coordinator(self, *, stands_by: bool = False, gives_way: bool = False) -> None:
        # So a signal reaches the new coordinator, or it has been told of it.
        with signals_deferred():
            self._silent_s, self._end_reason, self._stands_by = None, None, stands_by
            self._coordinator = ForkedProcess(
                partial(
                    run_coordinator,
                    self._start,
                    self._control,
                    self._listener,
                    tuple(self._signals),
                    takes_over=self._coordinator is not None,
                    gives_way=gives_way,
                )
            )

    def _replace(self, coordinator: ForkedProcess) -> RunStatus | None:
        """Start another coordinator in place of one that has died.

        If too many have, leave the run to one that stands by elsewhere, or end it.
        """
        coordinator.process.join()
        why = self._end_reason or describe_end(coordinator.process)
        if (deaths := self._coordinator_deaths.count()) < _MAX_DEATHS:
            self._start_coordinator()
            print(f"the coordinator was ended by {why}; another one continues the run", flush=True)
            return None
        self._too_many_deaths = f"{deaths} coordinators have died without a step between them, the last one by {why}"
        # Once: the next one dies although it only waits for those that stand by.
        if deaths == _MAX_DEATHS and (others := _standbys(self._start.run)):
            print(f"{self._too_many_deaths}; the run is left to the one that stands by at {others}", flush=True)
            self._start_coordinator(gives_way=True)
            return None
        return self._end_without_coordinator(self._too_many_deaths)

    def _end_without_coordinator(self, reason: str) -> RunStatus:
        run = self._start.run
        self._agent.kill()
        self._lifeline.close()
        with contextlib.suppress(ConfigError):
            if run.read_control().address != self._control.address:
                why = f"{reason}; another coordinator leads the run"
                print(f"{why}, and this machine and its workers leave it", flush=True)
                return "failed"
        run.remove_control()
        with Recorder(run, TerminalView(steps=self._start.config.steps, files=str(run.path))) as recorder:
            recorder.finish("failed", reason=reason)
        return "failed"

    def _replace_agent(self) -> bool:
        """Start another agent in place of one that was killed; return False if too many have been."""
        if (self._agent.process.exitcode or 0) >= 0 or self._agent_deaths.count() >= _MAX_DEATHS:
            return False
        why, config = describe_end(self._agent.process), self._start.config
        self._agent = ForkedProcess(partial(run_next_agent, config, self._control, self._listener, self._lifeline))
        self._is_draining = False
        print(f"the agent of this machine was ended by {why}; another one adopts its workers", flush=True)
        return True

    def _pass_on(self, number: signal.Signals) -> None:
        """Tell the coordinator of a signal, and act on it here if that may have no effect."""
        self._signals.append(number)
        self._signalled_s.append(time.monotonic())
        if self._has_ended:
            self._agent.process.kill()
        elif self._coordinator is not None:
            # The next one is told when it starts.
            with contextlib.suppress(OSError):
                self._coordinator.pipe.send(number)
            self._give_up_if_unheard()

    def _give_up_if_unheard(self) -> None:
        """End the coordinator if it has been told to end the run and does not, so that this process ends.

        Before it has begun, that is at the second signal or after the lease, by which it may have found out that
        another one leads the run. If that is known, it is at once; but at SIGTERM, the agent drains its workers first.
        Later, that is at the third signal.
        """
        if not self._signals or self._coordinator is None or self._given_up is not None:
            return
        waited_s = time.monotonic() - self._signalled_s[0]
        number = 1 + sum(after > before + SAME_SIGNAL_S for before, after in itertools.pairwise(self._signalled_s))
        has_begun, lease_s = self._silent_s is not None, self._start.config.control.lease_s
        is_termination = self._signals[-1] != signal.SIGINT
        if number <= _MAX_SIGNALS and has_begun:
            return
        if self._stands_by and is_termination and number == 1 and self._agent.process.is_alive():
            if not self._is_draining:
                self._is_draining = True
                # The agent may have ended by itself.
                with contextlib.suppress(OSError):
                    self._agent.pipe.send(self._signals[-1])
        elif self._stands_by or number > 1 or waited_s > lease_s:
            self._given_up = "terminated" if is_termination else "interrupted"
            self._coordinator.process.kill()


def _standbys(run: RunDirectory) -> str:
    """Return the addresses of the coordinators that stand by, as the journal of the last one has them."""
    # The journal may be damaged.
    with contextlib.suppress(ChameleonError):
        if (last := LastEntry.newest(run)) is not None:
            return " or ".join(sorted({*last.state.standbys.values()}))
    return ""


@dataclass(slots=True)
class _Deaths:
    """Counts processes of a run that die without a step between them."""

    run: RunDirectory
    number: int = 0
    metrics_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.metrics_bytes = self._metrics_bytes_now()

    def count(self) -> int:
        """Add one, and return how many there have been since the last step."""
        before, self.metrics_bytes = self.metrics_bytes, self._metrics_bytes_now()
        self.number = 1 if self.metrics_bytes > before else self.number + 1
        return self.number

    def _metrics_bytes_now(self) -> int:
        file = self.run.metrics_file
        return file.stat().st_size if file.exists() else 0
