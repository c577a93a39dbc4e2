"""The coordinator: the one place that knows who is in the run, decides what everyone does, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from chameleon_ft.config import RunConfig, config_to_toml
from chameleon_ft.control.checkpoints import CheckpointCollector
from chameleon_ft.control.decision import Decision, Situation
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.control.members import Members, Worker
from chameleon_ft.control.messages import (
    CheckpointSaved,
    Committed,
    Crashed,
    Exit,
    Finish,
    Finished,
    Hello,
    HostHello,
    Inject,
    Kill,
    Message,
    Parked,
    PeerFailed,
    Position,
    Probe,
    ProcessState,
    Refused,
    Started,
    Stop,
    Vote,
    Welcome,
    WorkerExited,
)
from chameleon_ft.control.outage import Loss, Outage, exit_in_words
from chameleon_ft.control.planner import Planner
from chameleon_ft.control.server import Departure, Peer
from chameleon_ft.control.suspicion import Suspicion
from chameleon_ft.control.watchdog import Watchdog
from chameleon_ft.errors import ControlError, NoHolderError
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
_REFUSALS_RECORDED = 100  # each; after that at every power of two
_UNEXPLAINED_RETRIES = 3  # generations that may fail in a row with nobody to blame


class _Phase(Enum):
    GATHERING = auto()  # workers are joining
    STOPPING = auto()  # a generation is over, and not all survivors have parked
    REGROUPING = auto()  # a new generation has its orders, and has not run an operation
    TRAINING = auto()
    OVER = auto()


class Coordinator:
    """Takes a run from its first worker to its end.

    All methods are called from the thread of the event loop; each runs to its end before the next message is looked at,
    so that every decision sees one consistent state. `await wait()` returns the exit code.
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
    ) -> None:
        self._config = config
        self._run = run
        self._recorder = recorder
        self._job = job
        self._store_port = store_port
        self._resume = resume
        self._members = Members(config.workers)
        self._faults = FaultLog(run.faults_file)
        self._watchdog = Watchdog(config.timeouts)
        self._planner = Planner(config, job, profile=profile, plan=plan)
        self._phase = _Phase.GATHERING
        # A run that goes on continues the numbers, for its records are kept by generation.
        self._generation = run.last_generation()
        self._plan: Plan | None = None
        self._decision: Decision | None = None
        self._committed = 0
        self._last_vote: Vote | None = None
        self._parked: dict[int, Parked] = {}
        self._park_by = 0.0  # by the event loop's clock
        self._suspicion = Suspicion()
        self._outage = Outage()
        self._crashes: dict[int, str] = {}  # step -> the error that ended a worker in it
        self._finished: set[int] = set()
        self._checkpoints = CheckpointCollector(
            run.checkpoints, num_layers=job.num_layers, model=job.fingerprint, keep=config.checkpoint.keep
        )
        self._interrupted = False
        self._refusals = 0
        self._began_at = time.time()
        self._end: asyncio.Future[tuple[RunStatus, str]] = asyncio.get_running_loop().create_future()

    # --- its life ----------------------------------------------------------------------------------------------------

    async def wait(self) -> RunStatus:
        """Watch over the run until it ends; everything is recorded when this returns."""
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(self._watch_ended)
        try:
            status, reason = await asyncio.shield(self._end)
        finally:
            watching.cancel()
        self._phase = _Phase.OVER
        if self._outage.losses:  # of workers that had done their part, or of a run that ended before it could go on
            self._record_outage(None if status == "failed" else self._decision, stop=reason)
        self._members.tell(Exit(reason=reason))
        for supervisor in self._members.supervisors:
            supervisor.send(Exit(reason=reason))
        self._recorder.finish(status, reason=reason)
        return status

    def interrupt(self) -> None:
        """End the run after the current step with a checkpoint; called again, or before training, at once."""
        if self._phase is _Phase.GATHERING or self._interrupted:
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
            if self._phase not in (_Phase.TRAINING, _Phase.REGROUPING, _Phase.STOPPING):
                continue
            if self._phase is _Phase.STOPPING and now > self._park_by:
                self._lose_the_unparked()
            if (probe := self._watchdog.ask(now)) is not None:
                self._members.tell(Probe(probe=probe))
                for supervisor in self._members.supervisors:
                    supervisor.send(Probe(probe=probe))

    def _lose_the_unparked(self) -> None:
        for worker in self._members.live():
            if worker not in self._parked:
                self._lose(self._members[worker], "watchdog", "hung: it does not leave its operation")

    # --- messages ----------------------------------------------------------------------------------------------------

    def message(self, peer: Peer, message: Message) -> None:
        """Act on what somebody says. Raises ControlError where that one may not say it."""
        if self._phase is _Phase.OVER or self._members.is_fenced(peer):
            return
        match message:
            case Hello():
                self._join(peer, message)
            case HostHello():
                self._members.add_host(peer, message)
            case Inject():
                peer.send(self._inject(message))
            case WorkerExited() if self._members.is_supervisor(peer):
                self._exited(self._members.started_by(peer, message.worker), message.exit_code)
            case ProcessState() if self._members.is_supervisor(peer):
                self._judge(self._members.started_by(peer, message.worker), message)
            case _:
                worker = self._members.worker_of(peer)
                if worker is None:
                    raise ControlError(f"{message.type!r} from somebody who has not joined")
                self._worker_message(worker, message)

    def departed(self, peer: Peer, how: Departure) -> None:
        """Give up the worker, or the host, at the other end of a connection that has ended."""
        if (host := self._members.remove_supervisor(peer)) is not None and self._phase is not _Phase.OVER:
            self._recorder.event("host_lost", host=host)
            if self._phase is _Phase.GATHERING:
                self.end("failed", f"host {host} was lost before the run began; see {self._run.logs}")
        worker = self._members.worker_of(peer)
        if worker is None:
            return
        worker.peer = None
        cause = "control connection closed" if how == "connection" else "no heartbeat"
        self._lose(worker, how, cause)

    def refused(self, address: str, reason: str) -> None:
        """Record that somebody was turned away; of very many, as from a scanner, ever fewer are written down."""
        self._refusals += 1
        if self._refusals <= _REFUSALS_RECORDED or self._refusals.bit_count() == 1:
            self._recorder.event("refused", address=address, reason=reason, count=self._refusals)

    def broken(self, error: Exception) -> None:
        """End the run because of a mistake of the coordinator itself, and write it down."""
        log = self._run.logs / "coordinator.log"
        self.end("failed", f"the coordinator failed: {type(error).__name__}: {error}; see {log}")
        # What has failed may well be this disk.
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)

    def _worker_message(self, worker: Worker, message: Message) -> None:
        match message:
            case Committed():
                self._on_committed(worker, message)
            case Position():
                self._judge(worker, message)
            case Parked(generation=generation) if generation == self._generation:
                self._parked[worker.id] = message
                self._proceed()
            case Started(generation=generation) if generation == self._generation:
                self._on_started()
            case PeerFailed(generation=generation) if generation == self._reported_generation:
                self._on_peer_failed(worker, message)
            case Finished(generation=generation) if generation == self._generation:
                self._finished.add(worker.id)
                self._end_if_finished()
            case Crashed(error=error):
                worker.crash = error
                self._on_crash(worker, error)
            case CheckpointSaved():
                self._on_saved(message)
            case Parked() | Started() | PeerFailed() | Finished():
                pass  # of a generation that is over
            case _:
                raise ControlError(f"a rank does not say {message.type!r}")

    def _send(self, worker: int, message: Message) -> None:
        peer = self._members[worker].peer
        if peer is not None:
            peer.send(message)

    # --- joining -----------------------------------------------------------------------------------------------------

    def _join(self, peer: Peer, hello: Hello) -> None:
        if self._phase is not _Phase.GATHERING:
            raise ControlError(f"worker {hello.worker} comes too late: the run has begun")
        self._members.join(peer, hello)
        peer.send(
            Welcome(config=config_to_toml(self._config), run=str(self._run.path), boundaries=self._job.boundaries)
        )
        if len(self._members.live()) == self._config.workers:
            self._begin()

    def _begin(self) -> None:
        checkpoints = self._checkpoints.complete() if self._resume else []
        decision = self._planner.start(self._members.live(), checkpoint=checkpoints[-1] if checkpoints else None)
        self._generation += 1
        self._launch(decision)
        self._recorder.started(
            self._planner.describe(
                decision.plan, run=str(self._run.path), first_step=decision.first_step, generation=self._generation
            )
        )

    # --- progress ----------------------------------------------------------------------------------------------------

    def _on_started(self) -> None:
        self._watchdog.progress(asyncio.get_running_loop().time())
        if self._phase is not _Phase.REGROUPING:
            return
        self._phase = _Phase.TRAINING
        if self._outage.losses:
            self._record_outage(self._decision)
        self._outage = Outage()

    def _on_committed(self, worker: Worker, message: Committed) -> None:
        decision = self._decision
        if decision is None:
            return
        self._watchdog.operation(message.times.longest_s)
        if message.generation == self._generation:
            self._planner.measure(worker.id, decision.plan, message.times)
        if message.step != self._committed:
            return  # another worker was first
        self._committed = message.step + 1
        self._last_vote = message.vote
        self._suspicion.settle()
        self._watchdog.committed(asyncio.get_running_loop().time(), step_s=message.step_s)
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
                workers=len(decision.plan.workers),
                generation=message.generation,
            )
        )

    def _on_saved(self, message: CheckpointSaved) -> None:
        if message.error is not None:
            self._recorder.event("checkpoint_failed", step=message.step, error=message.error)
            return
        if self._checkpoints.add(message):
            self._recorder.event("checkpoint", step=message.step)
            asyncio.get_running_loop().run_in_executor(None, self._checkpoints.prune)

    def _end_if_finished(self) -> None:
        plan = self._plan
        if plan is None or not self._finished.issuperset(plan.workers):
            return
        if self._committed < self._config.steps:
            self.end("interrupted", "interrupted by the user, with a checkpoint")
        else:
            self.end("finished", "all steps are trained")

    # --- failure -----------------------------------------------------------------------------------------------------

    def _judge(self, worker: Worker, answer: Position | ProcessState) -> None:
        verdict = self._watchdog.judge(worker.id, answer)
        if verdict is not None:
            self._lose(worker, "watchdog", verdict.reason)

    def _exited(self, worker: Worker, exit_code: int) -> None:
        worker.exit_code = exit_code
        self._lose(worker, "child", exit_in_words(exit_code))

    def _on_crash(self, worker: Worker, error: str) -> None:
        """A rank's own code failed: its loss, unless every other one would fail of the same."""
        if self._phase is _Phase.GATHERING or self._crashes.get(self._committed) == error or self._committed == 0:
            log = self._run.logs / f"worker-{worker.id}.log"
            self.end("failed", f"worker {worker.id} failed in step {self._committed}: {error}; see {log}")
            return
        self._crashes[self._committed] = error
        self._lose(worker, "self", error)

    @property
    def _reported_generation(self) -> int:
        """The generation whose failed messages matter: while it is being stopped, the one before this."""
        return self._generation - 1 if self._phase is _Phase.STOPPING else self._generation

    def _on_peer_failed(self, worker: Worker, message: PeerFailed) -> None:
        known = self._plan is not None and message.peer in self._plan.workers
        self._suspicion.report(worker.id, message.peer if known else None, message.error)
        if self._phase in (_Phase.TRAINING, _Phase.REGROUPING):
            self._stop()

    def _lose(self, worker: Worker, noticed_by: NoticedBy, cause: str) -> None:
        if worker.lost or self._phase is _Phase.OVER:
            return
        self._members.fence(worker)
        if self._phase is _Phase.GATHERING:
            self.end("failed", f"worker {worker.id} ended before the run began: {cause}; see {self._run.logs}")
            return
        fault = self._fault(worker)
        self._outage.losses.append(
            Loss(
                worker=worker.id,
                step=self._committed,
                noticed_by=noticed_by,
                cause=cause,
                noticed_at=time.time(),
                failed_at=None if fault is None else fault["time"],
            )
        )
        if self._phase is _Phase.STOPPING:
            self._parked.pop(worker.id, None)
            self._proceed()
        elif self._plan is not None and worker.id in self._plan.workers:
            if worker.id not in self._finished:
                self._stop()
        elif self._phase is _Phase.TRAINING:
            assert self._decision is not None
            spared = replace(
                self._decision,
                first_step=self._committed,
                policy="none",
                action="it was a spare: nothing changes",
                lost_layers=(),
            )
            self._record_outage(spared)

    def _stop(self) -> None:
        """End the generation: everyone leaves what it is doing and says what it holds."""
        self._generation += 1
        self._phase = _Phase.STOPPING
        self._parked.clear()
        self._finished.clear()
        self._members.tell(Stop(generation=self._generation))
        self._park_by = asyncio.get_running_loop().time() + self._config.timeouts.collective_s
        self._watchdog.progress(asyncio.get_running_loop().time())
        self._proceed()

    def _proceed(self) -> None:
        """Once all survivors have parked, decide and tell everyone how to go on."""
        if self._phase is not _Phase.STOPPING or not self._parked.keys() >= set(self._members.live()):
            return
        assert self._plan is not None
        if set(self._members.live()).issuperset(self._plan.workers) and self._blame():
            return
        self._suspicion.dismiss()
        self._outage.stopped_at = time.time()
        situation = Situation(
            plan=self._plan,
            live=self._members.live(),
            parked=self._parked,
            committed=self._committed,
            last_vote=self._last_vote,
            checkpoints=self._checkpoints.complete(),
        )
        try:
            if not situation.live:
                raise ControlError("no worker is left")
            decision = self._planner.go_on(situation, self._members.hosts())
        except (NoHolderError, ControlError) as error:
            self._give_up(error)
            return
        self._launch(decision)
        self._outage.decided_at = time.time()

    def _blame(self) -> bool:
        """Messages failed, and yet everyone is there: give up who is in most of them, or try again if nobody is named.

        Returns whether that changed who is live or ended the run, and so has taken care of going on.
        """
        suspicion = self._suspicion
        self._recorder.event("messages_failed", generation=self._generation - 1, reports=suspicion.reports)
        if (suspect := suspicion.suspect()) is not None:
            self._lose(self._members[suspect], "peer", f"messages with it failed: {suspicion.last_error}")
            return True
        if suspicion.unexplained > _UNEXPLAINED_RETRIES:
            self.end(
                "failed",
                f"messages failed {suspicion.unexplained} times in a row though no worker is lost, at last because "
                f"{suspicion.last_error}; check that the workers reach each other at the addresses of --host",
            )
            return True
        return False

    def _give_up(self, error: NoHolderError | ControlError) -> None:
        reason = str(error)
        if isinstance(error, NoHolderError):
            reason += "; there is no complete checkpoint in this run: set checkpoint.every to have some"
        self._record_outage(None, stop=reason)
        self.end("failed", reason)

    def _launch(self, decision: Decision) -> None:
        """Give every member of the plan its orders for the current generation."""
        plan = decision.plan
        planned, told = self._planner.orders(
            decision, self._members.hosts(), generation=self._generation, store_port=self._store_port
        )
        self._plan = plan
        self._decision = decision
        self._committed = decision.first_step
        self._finished.clear()
        if decision.load != "keep":
            self._checkpoints.forget(self._generation)
        self._phase = _Phase.REGROUPING
        self._watchdog.progress(asyncio.get_running_loop().time())
        for worker, order in told.items():
            self._send(worker, order)
        self._recorder.plan(planned, policy=decision.policy)

    def _record_outage(self, decision: Decision | None, *, stop: str = "") -> None:
        now = time.time()
        outage, self._outage = self._outage, Outage()
        outage = replace(
            outage, stopped_at=outage.stopped_at or now, decided_at=outage.decided_at or outage.stopped_at or now
        )
        for record in outage.records(
            decision, generation=self._generation, resumed_at=now, cause_of=self._cause, stop=stop
        ):
            self._recorder.failure(record)

    def _fault(self, worker: Worker) -> dict[str, Any] | None:
        """Return the failure that was injected into a worker in this life of the run."""
        fault = self._faults.last(worker.id)
        return fault if fault is not None and fault["time"] >= self._began_at else None

    def _cause(self, loss: Loss) -> str:
        worker = self._members[loss.worker]
        return loss.cause_in_words(crash=worker.crash, exit_code=worker.exit_code, fault=self._fault(worker))

    def _inject(self, message: Inject) -> Message:
        if message.worker not in self._members.live():
            return Refused(reason=f"worker {message.worker} is not live; live are {self._members.live()}")
        worker = self._members[message.worker]
        if message.kind == "kill" and message.phase is None and worker.supervisor is not None:
            self._faults.append(worker=worker.id, kind="kill", phase=None, step=None)
            worker.supervisor.send(Kill(worker=worker.id))
        else:
            self._send(worker.id, message)
        return message
