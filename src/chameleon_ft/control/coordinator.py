"""The coordinator: the one place that knows who is in the run, decides what everyone does, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from concurrent.futures import Executor

from chameleon_ft.config import RunConfig, config_to_toml
from chameleon_ft.control.decisions.decision_cache import DecisionCache
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.deliberation import Deliberation
from chameleon_ft.control.detectors.crash import Crashes
from chameleon_ft.control.detectors.watchdog import Watchdog
from chameleon_ft.control.disk import Disk
from chameleon_ft.control.generations import Generations, Phase
from chameleon_ft.control.injected import Injected
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.control.joins import Joins
from chameleon_ft.control.newcomers import Newcomers
from chameleon_ft.control.refusals import Refusals
from chameleon_ft.control.state.checkpoint_events import CheckpointCollector
from chameleon_ft.control.state.failure_history import FailureHistory
from chameleon_ft.control.state.incident import describe_exit
from chameleon_ft.control.state.members import Members, Worker
from chameleon_ft.control.state.outcomes import Outcomes
from chameleon_ft.control.state.respawns import Respawns
from chameleon_ft.control.wire.messages import (
    CheckpointSaved,
    Committed,
    Crashed,
    Exit,
    Finish,
    Finished,
    Hello,
    HostHello,
    Inject,
    Message,
    PeerFailed,
    Position,
    Preallocated,
    Probe,
    ProcessState,
    Quiesced,
    Ready,
    SlowIO,
    Started,
    Switched,
    Welcome,
    WorkerExited,
)
from chameleon_ft.control.wire.server import Departure, Peer
from chameleon_ft.errors import ControlError, ProfileError
from chameleon_ft.observe import (
    FaultLog,
    NoticedBy,
    Recorder,
    RunDirectory,
    RunStatus,
    StepRecord,
)
from chameleon_ft.plan import Plan
from chameleon_ft.profiles import Profile

__all__ = ["Coordinator"]

_TICK_S = 0.05


class Coordinator:
    """Takes a run from its first worker to its end.

    All methods are called from the thread of the event loop; each runs to its end before the next message is looked at,
    so that every decision sees one consistent state. `await wait()` returns the exit code. In `executor`, decisions on
    the losses that may come are made while training goes on; without it, each is made when the loss is there.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run: RunDirectory,
        recorder: Recorder,
        job: JobInfo,
        profile: Profile | None = None,
        plan: Plan | None = None,
        store_port: int,
        resume: bool,
        executor: Executor | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._recorder = recorder
        self._job = job
        self._resume = resume
        self._members = Members(config.workers)
        self._injected = Injected(self._members, FaultLog(run.faults_file))
        self._watchdog = Watchdog(config.timeouts)
        self._planner = Planner(config, job, profile=profile, plan=plan)
        self._outcomes = Outcomes(recorder.outcome)
        self._crashes = Crashes()
        self._checkpoints = CheckpointCollector(
            run.checkpoints, num_layers=job.num_layers, model=job.fingerprint, keep=config.checkpoint.keep
        )
        self._disk = Disk(run.checkpoints, self._checkpoints, recorder)
        newcomers = Newcomers()
        deliberation = Deliberation(
            members=self._members,
            planner=self._planner,
            history=FailureHistory(config.recovery),
            forethought=None
            if executor is None
            else DecisionCache(config.recovery.policy, executor, prepared=self._on_prepared),
            recorder=recorder,
        )
        self._generations = Generations(
            owner=self,
            cause_of=self._injected.cause,
            members=self._members,
            planner=self._planner,
            recorder=recorder,
            watchdog=self._watchdog,
            checkpoints=self._checkpoints,
            deliberation=deliberation,
            newcomers=newcomers,
            outcomes=self._outcomes,
            timeouts=config.timeouts,
            store_port=store_port,
            # A run that goes on continues the numbers, for its records are kept by generation.
            last=run.last_generation(),
        )
        self._respawns = Respawns(self._members, recorder, config.recovery)
        self._joins = Joins(
            members=self._members,
            generations=self._generations,
            newcomers=newcomers,
            deliberation=deliberation,
            planner=self._planner,
            respawns=self._respawns,
            recorder=recorder,
            executor=executor,
        )
        self._interrupted = False
        self._refusals = Refusals(recorder)
        self._end: asyncio.Future[tuple[RunStatus, str]] = asyncio.get_running_loop().create_future()

    # --- the run ------------------------------------------------------------------------------------------------------

    async def wait(self) -> RunStatus:
        """Watch over the run until it ends; everything is recorded when this returns."""
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(self._watch_ended)
        try:
            status, reason = await asyncio.shield(self._end)
        finally:
            watching.cancel()
        self._generations.close(status, reason)
        self._members.tell_everyone(Exit(reason=reason))
        self._recorder.finish(status, reason=reason)
        return status

    def interrupt(self) -> None:
        """End the run after the current step with a checkpoint; called again, or before training, at once."""
        if self._generations.nothing_trained or self._interrupted:
            self.end("interrupted", "interrupted by the user")
            return
        self._interrupted = True
        self._recorder.event("interrupt", message="ending after this step with a checkpoint; again to end at once")
        self._members.tell(Finish())

    def end(self, status: RunStatus, reason: str) -> None:
        """End the run."""
        if not self._end.done():
            self._end.set_result((status, reason))

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and isinstance(error := watching.exception(), Exception):
            self.broken(error)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(_TICK_S)
            now = loop.time()
            self._watchdog.forgive(max(0.0, now - last - 2 * _TICK_S))
            last = now
            if self._generations.phase not in (Phase.TRAINING, Phase.REGROUPING, Phase.STOPPING):
                continue
            for worker in self._generations.overdue(now):
                self.lose(worker, "watchdog", "hung: it does not leave its operation")
            if not self._interrupted:
                self._respawns.start_due(now)
                self._joins.look(now)
            if (probe := self._watchdog.ask(now)) is not None:
                self._members.tell(Probe(probe=probe))
                for agent in self._members.agents:
                    agent.send(Probe(probe=probe))

    # --- messages ----------------------------------------------------------------------------------------------------

    def message(self, peer: Peer, message: Message) -> None:
        """Act on what somebody says. Raises ControlError where that one may not say it."""
        if self._generations.phase is Phase.OVER or self._members.is_fenced(peer):
            return
        match message:
            case Hello():
                self._join(peer, message)
            case HostHello() if self._generations.phase is Phase.GATHERING:
                self._members.add_host(peer, message)
            case HostHello():
                self._joins.add_host(peer, message)
            case Inject():
                peer.send(self._injected.inject(message, committed=self._generations.committed))
            case WorkerExited() if self._members.is_agent(peer):
                self._exited(self._members.started_by(peer, message.worker, message.incarnation), message.exit_code)
            case ProcessState() if self._members.is_agent(peer):
                self._judge(self._members.started_by(peer, message.worker, message.incarnation), message)
            case _:
                worker = self._members.worker_of(peer)
                if worker is None:
                    raise ControlError(f"{message.type!r} from somebody who has not joined")
                self._worker_message(worker, message)

    def departed(self, peer: Peer, how: Departure) -> None:
        """Give up the worker, or the host, at the other end of a connection that has ended."""
        host = self._members.remove_agent(peer)
        if host is not None and self._generations.phase is not Phase.OVER:
            self._recorder.event("host_lost", host=host)
            if self._generations.phase is Phase.GATHERING:
                self.end("failed", f"host {host} was lost before the run began; see {self._run.logs}")
        worker = self._members.worker_of(peer)
        if worker is None:
            return
        worker.peer = None
        cause = "control connection closed" if how == "connection" else "no heartbeat"
        self.lose(worker.id, how, cause)

    def refused(self, address: str, reason: str) -> None:
        """Record that somebody was turned away."""
        self._refusals.add(address, reason)

    def broken(self, error: Exception) -> None:
        """End the run because of a mistake of the coordinator itself, and write it down."""
        log = self._run.logs / "coordinator.log"
        self.end("failed", f"the coordinator failed: {type(error).__name__}: {error}; see {log}")
        # What has failed may well be this disk.
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)

    def _worker_message(self, worker: Worker, message: Message) -> None:
        generations = self._generations
        match message:
            case Ready():
                self._joins.ready(worker)
            case Preallocated():
                self._joins.made_room(worker, message)
            case Committed():
                self._on_committed(worker, message)
            case Position():
                self._judge(worker, message)
            case Quiesced(generation=generation) if generation == generations.number:
                generations.quiesced(worker.id, message)
            case Switched(generation=generation) if generation == generations.number:
                generations.switched(message)
            case Started(generation=generation) if generation == generations.number:
                generations.started()
            case PeerFailed(generation=generation) if generation == generations.reported:
                generations.peer_failed(worker.id, message)
            case Finished(generation=generation) if generation == generations.number:
                if generations.finished(worker.id):
                    self._end_of_training()
            case Crashed(error=error):
                worker.crash = error
                self._on_crash(worker, error)
            case CheckpointSaved():
                self._disk.saved(message)
            case SlowIO():
                self._disk.waits(worker.id, message)
            case Quiesced() | Switched() | Started() | PeerFailed() | Finished():
                pass  # of a generation that is over
            case _:
                raise ControlError(f"a rank does not say {message.type!r}")

    # --- joining -----------------------------------------------------------------------------------------------------

    def _join(self, peer: Peer, hello: Hello) -> None:
        gathering = self._generations.phase is Phase.GATHERING
        worker = self._members.join(peer, hello) if gathering else self._joins.add(peer, hello)
        peer.send(
            Welcome(
                config=config_to_toml(self._config),
                run=str(self._run.path),
                boundaries=self._job.boundaries,
                incarnation=worker.incarnation,
            )
        )
        if gathering:
            worker.takes_part, worker.first_step = True, 0
            if len(self._members.live()) == self._config.workers:
                self._begin()

    def _begin(self) -> None:
        checkpoints = self._checkpoints.complete() if self._resume else []
        decision = self._planner.start(self._members.live(), checkpoint=checkpoints[-1] if checkpoints else None)
        try:
            self._generations.begin(decision)
        except ProfileError as error:  # of the links between hosts that have turned out to be several
            self.end("failed", str(error))
            return
        self._recorder.started(
            self._planner.describe(decision, run=str(self._run.path), generation=self._generations.number)
        )

    # --- progress ----------------------------------------------------------------------------------------------------

    def _on_committed(self, worker: Worker, message: Committed) -> None:
        plan = self._generations.plan
        if plan is None:
            return
        self._watchdog.operation(message.times.longest_s)
        if message.generation == self._generations.number:
            self._planner.measure(worker.id, message.times)
        if not self._generations.step_committed(message):
            return  # another worker was first
        vote = message.vote
        self._recorder.step(
            StepRecord(
                step=message.step,
                loss=vote.loss_sum / vote.terms,
                grad_norm=message.grad_norm,
                lr=message.lr,
                samples=vote.samples,
                tokens=vote.terms,
                step_s=message.step_s,
                workers=len(plan.workers),
                generation=message.generation,
            )
        )
        self._planner.stepped(message.step_s)
        self._outcomes.committed(message.step_s, time.time())
        if vote.pause and not vote.finish and message.step + 1 < self._config.steps:
            self._generations.paused(message)

    def _on_prepared(self, losses: int, seconds: float, error: str | None) -> None:
        number = self._generations.number
        self._recorder.event("prepared", generation=number, losses=losses, prepare_s=seconds, error=error)

    def _end_of_training(self) -> None:
        if self._generations.committed < self._config.steps:
            self.end("interrupted", "interrupted by the user, with a checkpoint")
        else:
            self.end("finished", "all steps are trained")

    # --- failure -----------------------------------------------------------------------------------------------------

    def _judge(self, worker: Worker, answer: Position | ProcessState) -> None:
        verdict = self._watchdog.judge(worker.id, answer)
        if verdict is not None and worker.is_live:
            self.lose(worker.id, "watchdog", verdict.reason)

    def _exited(self, worker: Worker, exit_code: int) -> None:
        worker.exit_code = exit_code
        if self._members[worker.id] is not worker:
            return  # it was in an earlier incarnation
        self.lose(worker.id, "child", describe_exit(exit_code))
        self._respawns.reaped(worker, asyncio.get_running_loop().time())

    def _on_crash(self, worker: Worker, error: str) -> None:
        """A rank's own code failed: its loss, unless every other one would fail of the same."""
        step = self._generations.committed
        if self._crashes.is_everyones(worker, error, step=step):
            log = self._run.logs / f"worker-{worker.id}.log"
            self.end("failed", f"worker {worker.id} failed in step {step}: {error}; see {log}")
            return
        self.lose(worker.id, "self", error)

    def lose(self, worker: int, noticed_by: NoticedBy, cause: str) -> None:
        """Give up a worker: fence it, and go on without it."""
        lost = self._members[worker]
        if lost.lost or self._generations.phase is Phase.OVER:
            return
        self._members.fence(lost)
        if self._generations.phase is Phase.GATHERING:
            self.end("failed", f"worker {worker} ended before the run began: {cause}; see {self._run.logs}")
            return
        self._respawns.died(lost, committed=self._generations.committed)
        if not lost.takes_part:
            self._joins.failed(lost, cause)
            return
        step = self._generations.committed
        self._generations.lost(self._injected.loss(lost, step=step, noticed_by=noticed_by, cause=cause))
