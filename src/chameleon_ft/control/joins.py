"""Workers that come while the run goes on: spares until they are weighed, and part of the plan where that pays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from chameleon_ft.control.decisions.decision_cache import decide_and_check
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.decisions.recovery_plan import Prepared
from chameleon_ft.control.deliberation import Deliberation
from chameleon_ft.control.generations import Generations, Phase
from chameleon_ft.control.newcomers import Newcomers
from chameleon_ft.control.state.members import Members, Worker
from chameleon_ft.control.state.respawns import Respawns
from chameleon_ft.control.wire.messages import Hello, HostHello, Preallocate, Preallocated
from chameleon_ft.control.wire.server import Peer
from chameleon_ft.errors import ControlError, ProfileError
from chameleon_ft.observe import Recorder

__all__ = ["Joins"]

_QUIET_S: Final = 0.5  # without anybody new, before those that have come are weighed together
_PATIENCE_S: Final = 10.0  # for those that are still on their way, or are making room


@dataclass(frozen=True, slots=True)
class _Weighing:
    generation: int
    task: asyncio.Task[Prepared]


@dataclass(frozen=True, slots=True)
class _Change:
    """What everyone is going to stop for."""

    generation: int
    prepared: Prepared
    by: float
    """When not to wait any longer for those that make room for it."""


class Joins:
    """Looks after newcomers until the plan has a place for them or it is decided that it need not.

    Nothing here holds up training, and whoever fails before it takes part changes nothing for those who do. What to do
    with them is decided in `executor`; None: in a thread.
    """

    def __init__(
        self,
        *,
        members: Members,
        generations: Generations,
        newcomers: Newcomers,
        deliberation: Deliberation,
        planner: Planner,
        respawns: Respawns,
        recorder: Recorder,
        executor: Executor | None,
    ) -> None:
        self._members = members
        self._generations = generations
        self._newcomers = newcomers
        self._deliberation = deliberation
        self._planner = planner
        self._respawns = respawns
        self._recorder = recorder
        self._executor = executor
        self._waiting: list[Worker] = []  # that have loaded what they need
        self._first_at = self._last_at = 0.0  # when the first and the last of those to be weighed became spares
        self._weighing: _Weighing | None = None
        self._change: _Change | None = None

    def add_host(self, peer: Peer, hello: HostHello) -> None:
        """Have an agent that comes while the run goes on start its workers."""
        workers = self._members.add_late_host(peer, hello, banned=self._respawns.banned)
        names = ", ".join(map(str, workers))
        self._recorder.event(
            "host_joined", host=hello.host, workers=workers, message=f"{hello.host} starts workers {names}"
        )

    def add(self, peer: Peer, hello: Hello) -> Worker:
        """Take in a rank that comes while the run goes on. Raises ControlError that says why it cannot be."""
        self._members.require_number(hello.worker)
        self._respawns.require_welcome(hello.worker)
        try:
            self._planner.require_costs({**self._members.hosts(), hello.worker: hello.host})
        except ProfileError as error:
            raise ControlError(f"worker {hello.worker} cannot take part: {error}") from None
        return self._members.join(peer, hello)

    def ready(self, worker: Worker) -> None:
        """A rank has loaded what it needs. Of those that were there from the beginning, that is no news."""
        if worker.takes_part or worker in self._waiting:
            return
        worker.first_step = self._generations.committed
        self._waiting.append(worker)
        self._recorder.event(
            "joined",
            worker=worker.id,
            incarnation=worker.incarnation,
            host=worker.host,
            message=f"worker {worker.id} has joined as a spare",
        )

    def failed(self, worker: Worker, cause: str) -> None:
        """A worker was lost before it took part."""
        cause = worker.crash or cause
        self._recorder.event(
            "join_failed",
            worker=worker.id,
            incarnation=worker.incarnation,
            cause=cause,
            message=f"worker {worker.id} was lost before it took part: {cause}",
        )

    def look(self, now: float) -> None:
        """Do what is to be done at this time, by the event loop's clock: to be called again and again."""
        generations = self._generations
        if generations.phase is not Phase.TRAINING or self._newcomers.is_pausing:
            return
        if self._change is not None:
            self._pause_for(self._change, now)
        elif self._weighing is None:
            self._admit(now)
            if self._newcomers.workers and self._all_have_come(now):
                self._weighing = _Weighing(generations.number, asyncio.create_task(self._weighed()))
        elif self._weighing.task.done():
            weighing, self._weighing = self._weighing, None
            error = weighing.task.exception()
            if weighing.generation != generations.number:
                return
            if error is None:
                self._was_weighed(weighing.task.result(), now)
            else:
                self._leave_as_spares(f"{type(error).__name__}: {error}")

    def made_room(self, worker: Worker, message: Preallocated) -> None:
        """A worker has room for all that it was told of."""
        self._newcomers.made_room(worker.id, message.layers)

    def _was_weighed(self, prepared: Prepared, now: float) -> None:
        """Have room made for a change, or go on as before."""
        generations = self._generations
        if not self._is_of_those_live(prepared):
            return
        if prepared.is_change:
            self._change = _Change(generations.number, prepared, by=now + _PATIENCE_S)
            self._tell(self._newcomers.expect(prepared))
        else:
            self._deliberation.goes_on(prepared, step=generations.committed, generation=generations.number)
            self._newcomers.settle()

    def _pause_for(self, change: _Change, now: float) -> None:
        """Have everyone stop after this step, if there is room by now. Until then training goes on."""
        if change.generation != self._generations.number:
            self._change = None
        elif not self._is_of_those_live(change.prepared):
            self._change = None
            self._tell(self._newcomers.let_down())
        elif not self._newcomers.making_room or now >= change.by:
            self._change = None
            self._generations.pause_for(change.prepared)

    def _is_of_those_live(self, prepared: Prepared) -> bool:
        return prepared.outlook.live == tuple(self._members.live())

    def _tell(self, told: Mapping[int, Preallocate]) -> None:
        for worker, expect in told.items():
            self._members.send(worker, expect)

    def _leave_as_spares(self, error: str) -> None:
        """Weighing has failed, its process is gone perhaps. Training does not depend on it."""
        workers = sorted(self._newcomers.workers)
        self._newcomers.settle()
        if workers:
            names = ", ".join(map(str, workers))
            who, them = (
                (f"worker {names} stays a spare", "it")
                if len(workers) == 1
                else (f"workers {names} stay spares", "them")
            )
            self._recorder.event(
                "not_weighed",
                workers=workers,
                error=error,
                message=f"{who}, for it cannot be weighed what to do with {them}: {error}",
            )

    def _admit(self, now: float) -> None:
        """Make spares of those who are ready."""
        waiting, self._waiting = self._waiting, []
        for worker in waiting:
            if worker.lost:
                continue
            if not self._newcomers.workers:
                self._first_at = now
            self._last_at = now
            worker.takes_part = True
            self._newcomers.workers.add(worker.id)
            self._deliberation.live()

    def _all_have_come(self, now: float) -> bool:
        if now < self._last_at + _QUIET_S:
            return False
        return not self._members.are_coming() or now >= self._first_at + _PATIENCE_S

    async def _weighed(self) -> Prepared:
        """Decide while training goes on."""
        training = self._generations.decision
        assert training is not None
        outlook, rate = self._deliberation.on_newcomers(training)
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        decision = await loop.run_in_executor(self._executor, decide_and_check, outlook, self._planner.policy, rate)
        return Prepared(outlook=outlook, rate=rate, decision=decision, search_s=time.perf_counter() - start)
