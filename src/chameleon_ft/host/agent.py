"""The agent of one host: starts its ranks, reaps them, and kills any that the coordinator gives up.

Ranks may outlive their agent. The next agent on their host adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence

from websockets.exceptions import InvalidHandshake

from chameleon_ft.errors import ControlError
from chameleon_ft.host.processes import HostProcess, examine, is_stopped, read_in_progress, reap_orphans
from chameleon_ft.protocol.address import CoordinatorAccess, own_address
from chameleon_ft.protocol.background_tasks import BackgroundTasks
from chameleon_ft.protocol.connection import ControlConnection
from chameleon_ft.protocol.messages import (
    Adopt,
    Drain,
    Examine,
    Exit,
    HangEvidence,
    HostExamined,
    HostHello,
    Kill,
    Probe,
    ProcessState,
    Refused,
    Spawn,
    WorkerExited,
)
from chameleon_ft.protocol.parts import HostReport, Member, RankProcess

# Ranks that are told to exit have this long.
_EXIT_GRACE_S = 5.0
_TOLD = "its workers were told to exit"
_NO_WORKER = "the coordinator is gone, and no worker of this host was in the run"

_logger = logging.getLogger(__name__)


class Agent:
    """Serves a run until it ends, its workers are drained or its coordinator is lost for good.

    Args:
        slots: workers to run on this host.
        host: address at which other hosts reach this one, or its network interface; None uses the local address
            towards the coordinator.
        start_rank: function that starts the process of a rank; keywords: access, member, host, local_index.
        examine: returns what is found on this host, see `Examine`; None if it need not be examined.
    """

    def __init__(
        self,
        access: CoordinatorAccess,
        *,
        slots: int,
        host: str | None,
        start_rank: Callable[..., Awaitable[HostProcess]],
        examine: Callable[[Examine], Awaitable[HostReport]] | None = None,
    ) -> None:
        self._coordinator = access.address
        self._id = secrets.token_hex(8)
        self._connection = ControlConnection(access, self._hello, is_needed=lambda: not self._were_told_to_exit())
        self._is_connected = False
        self._slots = slots
        self._host = own_address(host, towards=access.address)
        self._start_rank = start_rank
        self._examine_host = examine
        self._ranks: dict[Member, HostProcess] = {}
        # By worker, whose index on this host is that of all its incarnations.
        self._local_indexes: dict[int, int] = {}
        self._exit: Exit | None = None
        self._exit_grace_s = 0.0
        # The exit code of the last rank that has ended.
        self._last_exit_code: int | None = None
        # Ranks still to be started.
        self._pending: set[Member] = set()
        # Ranks to adopt whose processes are not found.
        self._unknown: set[Member] = set()
        self._spawn_lock = asyncio.Lock()
        # Why a rank could not be started.
        self._failure: ControlError | None = None
        self._tasks = BackgroundTasks()
        # The examination of this host.
        self._examination: asyncio.Task[None] | None = None

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that this agent has started or adopted, those that have ended included."""
        return tuple(self._local_indexes)

    async def serve(self) -> Exit | None:
        """Carry out the coordinator's orders.

        Returns:
            The coordinator's order to exit, because the run is over or all workers have left, or there never was any;
            None if the coordinator is lost, and no other has taken its place in time.

        Raises:
            ControlError: the coordinator does not answer, or refuses this host.
        """
        try:
            await self._connection.connect()
            self._is_connected = True
            await self._carry_out_orders()
        except (OSError, InvalidHandshake) as error:
            raise ControlError(
                f"cannot connect to the coordinator at {self._coordinator}: {error}; "
                "check the address, the token and --tls"
            ) from None
        finally:
            await self._connection.close()
            await self.end_all()
        return self._exit

    def _hello(self, resumes: int | None, term: int) -> HostHello:
        ranks = tuple({*self._ranks, *self._pending, *self._unknown})
        host = f"{socket.gethostname()} ({self._host})"
        return HostHello(
            host=host,
            slots=self._slots,
            id=self._id,
            resumes=resumes,
            ranks=ranks,
            examines=self._examine_host is not None,
            term=term,
        )

    def drain(self, number: signal.Signals = signal.SIGTERM) -> bool:
        """Ask the coordinator to drain this agent's workers; `serve` returns once they have left.

        If none would be left in the run, it ends with a checkpoint. Returns False if this agent is not connected.

        Args:
            number: the signal that asks for it: SIGTERM or SIGHUP.
        """
        if not self._is_connected:
            return False
        self._connection.send(Drain.model_validate({"signal": number.name}))
        return True

    async def end_all(self) -> None:
        """Wait until every rank has ended; kill any left, after a grace period if told to exit, else at once."""
        self._pending.clear()
        async with self._spawn_lock:
            # No rank is being started now, and none will be.
            pass
        deadline = asyncio.get_running_loop().time() + self._exit_grace_s
        while self._ranks:
            if asyncio.get_running_loop().time() >= deadline:
                self.kill_all()
            await asyncio.sleep(0.01)

    def kill_all(self) -> None:
        """Kill every rank at once."""
        for rank in self._ranks.values():
            rank.kill()

    async def _carry_out_orders(self) -> None:
        async for message in self._connection.messages():
            match message:
                case Spawn(members=members):
                    self._pending.update(members)
                    self._tasks.start(self._start(members))
                case Examine():
                    # It was begun for an earlier connection; two would disturb each other.
                    if self._examination is not None:
                        self._examination.cancel()
                    self._examination = self._tasks.start(self._report_host(message))
                case Adopt(ranks=adopted, given_up=given_up):
                    for member, process in adopted:
                        self._adopt(member, process)
                    self._tasks.start(self._end(given_up))
                case Kill(worker=worker, is_hung=is_hung):
                    self._kill(worker, is_hung=is_hung)
                case Probe(probe=probe, worker=only):
                    for member, rank in self._ranks.items():
                        if only in (None, member.worker):
                            state = ProcessState(
                                probe=probe,
                                member=member,
                                stopped=is_stopped(rank.pid),
                                doing=read_in_progress(rank.pid),
                            )
                            self._connection.send(state)
                case Exit():
                    self._exit = message
                    # Drained workers may still be writing their parts of a checkpoint.
                    self._exit_grace_s = math.inf if message.is_drained else _EXIT_GRACE_S
                    return
                case Drain(workers=workers):
                    _logger.info("workers %s are drained; this agent ends after them", workers)
                case Refused(reason=reason):
                    raise ControlError(reason)
                case _:
                    raise ControlError(f"an agent does not expect {message.type!r}")
        if self._failure is not None:
            raise self._failure
        # The coordinator has told them while this agent was not connected.
        if self._were_told_to_exit():
            is_terminated = self._last_exit_code == os.EX_TEMPFAIL
            self._exit = Exit(reason=_TOLD, status="terminated" if is_terminated else None)
        elif not self._local_indexes:
            self._exit = Exit(reason=_NO_WORKER)

    async def _start(self, members: Sequence[Member]) -> None:
        """Start the ranks, except any given up meanwhile; close the connection if one cannot be started."""
        async with self._spawn_lock:
            for member in members:
                # The rank was given up before it was started.
                if member not in self._pending:
                    self._connection.send(WorkerExited(member=member, exit_code=-signal.SIGKILL))
                    continue
                try:
                    rank = await self._spawn(member)
                except Exception as error:  # noqa: BLE001
                    self._failure = ControlError(f"{member} cannot be started here: {error}")
                    await self._connection.close()
                    return
                self._look_after(member, rank)
                if member not in self._pending:
                    rank.kill()
                self._pending.discard(member)

    async def _report_host(self, order: Examine) -> None:
        assert self._examine_host is not None
        report = await self._examine_host(order)
        self._connection.send(HostExamined(report=report, request=order.request))

    def _adopt(self, member: Member, process: RankProcess) -> None:
        """Look after a rank that another agent has started. Raises ControlError if it belongs to another user."""
        if member in self._ranks:
            return
        try:
            rank = HostProcess.found(process.pid, started=process.started)
        except ProcessLookupError as error:
            _logger.warning("%s cannot be adopted: %s", member, error)
            self._unknown.add(member)
            return
        except PermissionError:
            raise ControlError(
                f"the process {process.pid} of {member} belongs to another user; start the agent as that user"
            ) from None
        _logger.info("%s, process %d, is adopted", member, process.pid)
        self._local_indexes[member.worker] = process.local_index
        self._look_after(member, rank)

    async def _end(self, given_up: Sequence[RankProcess]) -> None:
        """Kill ranks of another agent, before any is started in their place."""
        async with self._spawn_lock:
            for process in given_up:
                with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
                    rank = HostProcess.found(process.pid, started=process.started)
                    rank.kill()
                    # The kernel itself may hold up the end of a process.
                    await asyncio.wait_for(rank.wait(), _EXIT_GRACE_S)

    def _kill(self, worker: int, *, is_hung: bool) -> None:
        self._pending = {member for member in self._pending if member.worker != worker}
        for member, process in self._ranks.items():
            if member.worker == worker and is_hung:
                self._tasks.start(self._examine(member, process))
            elif member.worker == worker:
                process.kill()
        for member in [member for member in self._unknown if member.worker == worker]:
            self._unknown.remove(member)
            self._connection.send(WorkerExited(member=member, exit_code=None))

    async def _examine(self, member: Member, rank: HostProcess) -> None:
        """Send evidence of the hang of a rank, and kill it."""
        try:
            process, activity = await examine(rank)
            self._connection.send(HangEvidence(member=member, process=process, activity=activity))
        finally:
            rank.kill()

    async def _spawn(self, member: Member) -> HostProcess:
        # Later incarnations run on the accelerator of the first one.
        worker = member.worker
        if worker not in self._local_indexes:
            taken = set(self._local_indexes.values())
            self._local_indexes[worker] = next(index for index in itertools.count() if index not in taken)
        return await self._start_rank(
            access=self._connection.access,
            member=member,
            host=self._host,
            local_index=self._local_indexes[worker],
        )

    def _look_after(self, member: Member, rank: HostProcess) -> None:
        self._ranks[member] = rank

        def reaped(reaping: asyncio.Task[None]) -> None:
            # The event loop may have cancelled it with all of its tasks: then `end_all` must not wait for it.
            if reaping.cancelled():
                del self._ranks[member]
                rank.kill()

        self._tasks.start(self._reap(member, rank)).add_done_callback(reaped)

    async def _reap(self, member: Member, rank: HostProcess) -> None:
        """Report the exit of a rank to the coordinator as soon as it ends."""
        exit_code = await rank.wait()
        self._last_exit_code = exit_code
        self._connection.send(WorkerExited(member=member, exit_code=exit_code))
        # Its loaders end with it.
        await reap_orphans("loader")
        del self._ranks[member]

    def _were_told_to_exit(self) -> bool:
        """Return whether all ranks have ended, the last one by an order: the run is over, or they have left it."""
        return not (self._ranks or self._pending) and self._last_exit_code in (0, os.EX_TEMPFAIL)
