"""The coordinator: the state machine of a run among sockets, clocks, executors and files."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, Final

from chameleon_ft.config import RunConfig, config_to_toml
from chameleon_ft.control import commands, events
from chameleon_ft.control.decisions.decision_cache import DecisionCache
from chameleon_ft.control.decisions.decisions import Decisions
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.control.journal import Journal, LastEntry
from chameleon_ft.control.rendezvous import RendezvousStore
from chameleon_ft.control.run_files import Examined, RunFiles
from chameleon_ft.control.state.checkpoint_events import describe_unreadable
from chameleon_ft.control.state.incident import Fault
from chameleon_ft.control.state.state import Phase, Settings, State
from chameleon_ft.control.state_machine import TICK_S, step
from chameleon_ft.control.wire import messages
from chameleon_ft.control.wire.server import Peer
from chameleon_ft.errors import ControlError, NoHolderError, ProfileError
from chameleon_ft.observe import GenerationPlan, Recorder, RunDirectory, RunStatus, line_of
from chameleon_ft.plan import Plan
from chameleon_ft.profiles import Profile

__all__ = ["Coordinator"]

_ACKNOWLEDGE_EVERY: Final = 64  # messages of a peer, which it keeps until then
_ALL_REJECTED: Final = 100  # rejected connections are recorded; after that those at every power of two
_NO_CHECKPOINT: Final = "; there is no complete checkpoint in this run"


class Coordinator:
    """Takes a run from its first worker to its end.

    All methods are called from the thread of the event loop. The commands of an event are carried out before the next
    event is handled. `executor` prepares decisions on losses while training goes on; without it, each is made after the
    loss. Every change is written to `journal` first, if the disk answers; see there. All file operations go through the
    queue of `recorder`, so that no disk can stop the event loop. With `last`, the entry of a journal, the coordinator
    continues the run of one that is lost.
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
        resume: bool,
        executor: Executor | None = None,
        journal: Journal | None = None,
        last: LastEntry | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._recorder = recorder
        self._job = job
        self._rendezvous = RendezvousStore()
        self._resume = resume
        self._planner = Planner(config, job, profile=profile, plan=plan)
        policy = config.recovery.policy
        cache = None if executor is None else DecisionCache(policy, executor, prepared=self._on_prepared)
        self._decisions = Decisions(planner=self._planner, cache=cache, executor=executor)
        self._files = RunFiles(
            run,
            recorder.files,
            model=job.fingerprint,
            num_layers=job.num_layers,
            keep=config.checkpoint.keep,
            base=config.forked.step if config.forked.run else None,
        )
        self._prepared: GenerationPlan | None = None  # of the generation that is being prepared, or was last
        self._peers: dict[int, Peer] = {}  # by number
        self._rejected = 0
        self._has_warned = False  # that a checkpoint has no checksums
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps none alive
        self._end: asyncio.Future[tuple[RunStatus, str]] = asyncio.get_running_loop().create_future()
        self._received: dict[int, int] = {}  # connection -> messages of its peer that were handled
        self._clock_ahead_s = 0.0
        settings = Settings.of(config, run, num_layers=job.num_layers)
        self.state = State.before(
            settings, last_generation=run.last_generation(), skipped=run.skipped_steps() if resume else ()
        )
        self._journal = journal
        if last is not None:
            self._take_over(last)

    # --- the run -----------------------------------------------------------------------------------------------------

    def _take_over(self, last: LastEntry) -> None:
        """Continue from the last state of another coordinator, and by its clock."""
        self.state = last.state
        self._received = dict(last.received)
        self._recorder.complete(last.records)
        passed_s = max(0.0, time.time() - last.at.unix_s)
        self._clock_ahead_s = last.at.monotonic_s + passed_s - asyncio.get_running_loop().time()
        if last.state.ended is not None:
            self._finish(*last.state.ended)
        if last.state.active is not None:
            planned, _ = self._orders(last.state, RecoveryPlan.kept(last.state.active, None), last.state.generation)
            self._planner.begin(planned, last.state.members.hosts())
        if (upcoming := last.state.switching_to) is not None:
            kept = RecoveryPlan.kept(upcoming.plan, None)
            self._prepared, _ = self._orders(last.state, kept, upcoming.number)
        # The new journal has to know these, too, until the peers have come back.
        self._handle(events.TookOver(at=self._now()), received=self._received)

    @property
    def first_connection(self) -> int:
        """The number of the first connection: no other coordinator of the run has used it."""
        members = self.state.members
        known = (
            *members.agents,
            *members.fenced,
            *self.state.waiting_hosts,
            *(worker.connection or 0 for worker in members),
        )
        return 1 + max(known, default=0)

    async def wait(self) -> RunStatus:
        """Return how the run ended, once it has; all records are written by then."""
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(self._task_done)
        try:
            status, reason = await asyncio.shield(self._end)
        finally:
            watching.cancel()
        await self._recorder.catch_up()
        self._recorder.finish(status, reason=reason)
        return status

    def interrupt(self) -> None:
        """End the run after the current step with a checkpoint; called again, or before training, at once."""
        self._handle(events.Interrupted(at=self._now()))

    def terminate(self) -> None:
        """End the run like `interrupt`, for whoever runs its machines; the user may resume it."""
        self._handle(events.Interrupted(at=self._now(), is_termination=True))

    def end(self, status: RunStatus, reason: str) -> None:
        """End the run."""
        self._handle(events.EndRequested(at=self._now(), status=status, reason=reason))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(events.Ticked(at=self._now()))
            self._recorder.watch_files()

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.broken(error)

    # --- what the server calls ---------------------------------------------------------------------------------------

    def message(self, peer: Peer, message: messages.Message) -> None:
        """Handle a message. Raises ControlError if the peer may not send it."""
        self._peers[peer.number] = peer
        number = peer.number
        if isinstance(message, messages.Hello | messages.HostHello):
            received = self._received.get(message.resumes or 0, 0)
        else:
            received = self._received.get(number, 0) + 1
        match message:
            case messages.Publish():
                self._send_all(self._rendezvous.publish(number, message))
            case messages.LookUp():
                self._send_all(self._rendezvous.look_up(number, message))
            case _:
                event = events.Received(at=self._now(), connection=number, message=message)
                self._handle(event, received={number: received})
        self._received[number] = received
        is_hello = isinstance(message, messages.Hello | messages.HostHello)  # a peer waits for its acknowledgement
        if is_hello or (received % _ACKNOWLEDGE_EVERY == 0 and self._recorder.files.wait()):
            reconnect_s = self._config.timeouts.reconnect_s
            peer.send(messages.Acknowledged(connection=number, received=received, reconnect_s=reconnect_s))

    def departed(self, peer: Peer) -> None:
        """Handle the end of a connection."""
        if self._peers.pop(peer.number, None) is not None:
            self._handle(events.Disconnected(at=self._now(), connection=peer.number))

    def silent(self, peer: Peer, since_s: float) -> None:
        """Handle missing heartbeats."""
        if peer.number in self._peers:
            self._handle(events.Silent(at=self._now(), connection=peer.number, since_s=since_s))
        else:
            peer.drop()

    def refused(self, address: str, reason: str) -> None:
        """Record that a connection was turned away; of very many, ever fewer are recorded."""
        self._rejected += 1
        is_recorded = self._rejected <= _ALL_REJECTED or self._rejected.bit_count() == 1
        if is_recorded and self.state.phase is not Phase.OVER:
            self._recorder.event("refused", address=address, reason=reason, count=self._rejected)

    def broken(self, error: Exception) -> None:
        """End the run because of an error of the coordinator itself, and log it."""
        log = self._files.log_error(error)
        reason = f"the coordinator failed: {type(error).__name__}: {error}; see {log}"
        try:
            self.end("failed", reason)
        except Exception:  # noqa: BLE001 - the end must not depend on the part that failed
            self._finish("failed", reason)

    # --- events and commands -----------------------------------------------------------------------------------------

    def _handle(self, event: events.Event, *, received: Mapping[int, int] | None = None) -> None:
        """Change the state by an event and by the answers to its commands. Raises ControlError, see `step`.

        Args:
            received: what `Journal.write` is to note of it.
        """
        self._refresh_faults(event)
        events = deque([event])
        while events:
            event = events.popleft()
            state, orders = step(self.state, event)
            self._require_costs(state, event)
            records = [line_of(order.record) for order in orders if isinstance(order, commands.Record)]
            if self._journal is not None:
                self._journal.write(state, event.at, received=received, records=records, waits=bool(orders))
            self.state, received = state, None
            self._planner.calibration.learn(state.detectors)
            for command in orders:
                if (answer := self._execute(command)) is not None:
                    events.append(answer)

    def _refresh_faults(self, event: events.Event) -> None:
        """Read the injected failures if the event may reveal a loss or be the time to record one."""
        if isinstance(event, events.Received):
            is_report = isinstance(event.message, messages.Quiesced)  # before the last one, nothing follows from them
            if is_report and len(self.state.quiesced) + 1 < len(self.state.members.live()):
                return
            if isinstance(event.message, messages.Committed):
                return
        if isinstance(event, events.Ticked) and self.state.phase is not Phase.STOPPING:
            return
        if self.state.phase in (Phase.GATHERING, Phase.OVER):
            return
        if (lines := self._files.faults()) is None:
            return
        faults = tuple(Fault(line["worker"], line["kind"], line["time"]) for line in lines)
        if faults != self.state.faults:
            self.state, _ = step(self.state, events.FaultsInjected(at=event.at, faults=faults))

    def _require_costs(self, state: State, event: events.Event) -> None:
        """Raise ControlError if a rank joins a running training and no costs of its links are known."""
        if not (isinstance(event, events.Received) and isinstance(event.message, messages.Hello)):
            return
        if self.state.phase in (Phase.GATHERING, Phase.OVER):
            return
        try:
            self._planner.require_costs(state.members.hosts())
        except ProfileError as error:
            raise ControlError(f"worker {event.message.worker} cannot take part: {error}") from None

    def _execute(self, command: commands.Command) -> events.Event | None:
        """Carry out a command; return the event that it leads to at once, if any."""
        state = self.state
        match command:
            case commands.Send(connection=connection, message=message):
                self._send(connection, message)
            case commands.Welcome(connection=connection, incarnation=incarnation):
                config, boundaries = config_to_toml(self._config), self._job.boundaries
                run = str(self._run.path)
                welcome = messages.Welcome(config=config, run=run, boundaries=boundaries, incarnation=incarnation)
                self._send(connection, welcome)
            case commands.Drop(connection=connection):
                if (peer := self._peers.get(connection)) is not None:
                    peer.drop()
            case commands.Record(record=record):
                self._recorder.record(record)
            case commands.Task.RECORD_SCALE_UP:
                if (fields := self._decisions.describe_scale_up()) is not None:
                    self._recorder.event("decision", generation=state.generation, **fields)
            case commands.Task.PREPARE_GENERATION:
                return self._prepare(state)
            case commands.Task.BEGIN_GENERATION:
                self._begin(state)
            case commands.Migrate():
                self._migrate(state, command)
            case commands.LogFault(worker=worker):
                self._files.log_kill(worker)
            case commands.SaveEvidence(file=file, text=text):
                self._files.save_evidence(file, text)
            case commands.CompleteCheckpoint(step=checkpoint, agreed=agreed, slices=slices):
                kept = agreed if self._config.health.check_every else None
                self._files.complete(checkpoint, agreed=kept, slices=slices)
            case commands.DiscardCheckpoint(step=checkpoint, agreed=agreed):
                self._files.discard(checkpoint, agreed=agreed if self._config.health.check_every else None)
            case commands.DistrustCheckpoints(after=agreed):
                self._files.distrust(agreed)
            case commands.MarkDamaged(step=checkpoint):
                self._files.mark_damaged(checkpoint)
            case commands.Finish(status=status, reason=reason):
                self._finish(status, reason)
            case commands.Task.DECIDE:
                return self._decide(state)
            case commands.Launch(plan=plan, is_first=is_first):
                return self._launch(state, plan, is_first=is_first)
            case commands.Task.CONSIDER_SCALE_UP:
                self._begin_task(self._consider(state))
            case commands.Task.PREPARE_DECISIONS:
                self._decisions.prepare(state)
            case commands.Task.FORESEE_DECISION:
                self._decisions.foresee(state)
            case commands.Task.FORGET_DECISIONS:
                self._decisions.forget()
            case commands.MeasureOperations(worker=worker, step=step, times=times):
                measured = self._planner.calibration.operations(worker, times)
                if measured is not None:
                    return events.OperationsMeasured(
                        at=self._now(),
                        worker=worker,
                        generation=state.generation,
                        step=step,
                        ratio=measured[0],
                        group=measured[1],
                        links=self._planner.calibration.links(worker, step, times),
                    )
            case commands.MeasureStep(step_s=step_s):
                self._planner.calibration.step(step_s)
            case commands.MeasureMigration(migration=migration, seconds=seconds):
                self._planner.migrated(migration, seconds, state.members.hosts())
            case commands.MeasureTransfer(transfer_s=transfer_s):
                if state.active is not None and state.active.transfer is not None:
                    self._planner.transferred(state.active.transfer, transfer_s, state.members.hosts())
        return None

    def _send(self, connection: int, message: messages.Message) -> None:
        if (peer := self._peers.get(connection)) is not None:
            peer.send(message)

    def _send_all(self, answers: Iterable[tuple[int, messages.Message]]) -> None:
        for connection, message in answers:
            self._send(connection, message)

    def _finish(self, status: RunStatus, reason: str) -> None:
        if not self._end.done():
            self._end.set_result((status, reason))

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, state: State, damages: Mapping[int, str] | None = None) -> events.Event | None:
        """Decide on a plan, and if it begins with a checkpoint, on one without visible damage.

        Returns None if the disk does not tell at once whether a checkpoint is damaged; the answer is handled then.

        Args:
            damages: checkpoints that have been found damaged meanwhile, and how.
        """
        damages = damages or {}
        unreadable = {**state.checkpoints.unreadable, **damages}
        complete = self._files.complete_checkpoints()
        answer = self._decided(state, [step for step in complete if step not in unreadable], unreadable)
        if not isinstance(answer, events.Decided) or not isinstance(step := answer.plan.load, int):
            return answer

        def examined(found: Examined) -> events.Event | None:
            if found.damage is None:
                self._report_checkpoint(state, step, found)
                return answer
            self._files.mark_damaged(step)
            message = describe_unreadable(step, found.damage)
            self._recorder.event("checkpoint_unreadable", step=step, error=found.damage, message=message)
            return self._decide(state, {**damages, step: found.damage})

        examining = self._files.examine(step)
        if examining.done():
            return examined(examining.result())
        self._begin_task(self._handle_later(examining, examined))
        return None

    async def _handle_later(
        self, examining: Future[Examined], examined: Callable[[Examined], events.Event | None]
    ) -> None:
        if (answer := examined(await asyncio.wrap_future(examining))) is not None:
            self._handle(replace(answer, at=self._now()))

    def _decided(self, state: State, checkpoints: list[int], unreadable: Mapping[int, str]) -> events.Event:
        question = state.question
        damages = "".join(f"; {describe_unreadable(step, why)}" for step, why in sorted(unreadable.items()))
        if state.holds_nothing:
            if self._resume and damages and not checkpoints:
                reason = f"there is no checkpoint that can be read{damages}"
                return events.DecisionFailed(at=self._now(), question=question, reason=reason)
            checkpoint = checkpoints[-1] if checkpoints and self._resume else None
            plan = self._planner.start(state.members.live(), state.members.hosts(), checkpoint=checkpoint)
            return events.Decided(at=self._now(), question=question, plan=plan)
        try:
            plan, chosen_at = self._decisions.decide(state, checkpoints)
        except NoHolderError as error:
            remedy = "" if self._config.checkpoint.every else ": set checkpoint.every to have some"
            reason = f"{error}{damages or _NO_CHECKPOINT + remedy}"
            return events.DecisionFailed(at=self._now(), question=question, reason=reason)
        except (ControlError, ProfileError) as error:
            return events.DecisionFailed(at=self._now(), question=question, reason=f"{error}{damages}")
        return events.Decided(at=self._now(), question=question, plan=plan, chosen_at=chosen_at)

    def _report_checkpoint(self, state: State, step: int, found: Examined) -> None:
        """Record which checkpoints a resumed run does not use, and whether the chosen one can be checked."""
        if state.active is None:
            for newer in found.incomplete:
                if newer > step:
                    message = f"that of step {newer} is not complete and not used"
                    self._recorder.event("checkpoint_incomplete", step=newer, message=message)
        if not found.has_checksums and not self._has_warned:
            self._has_warned = True
            message = f"that of step {step} was written by an earlier version, without checksums: it is not checked"
            self._recorder.event("checkpoint_unchecked", step=step, message=message)

    def _launch(self, state: State, plan: RecoveryPlan, *, is_first: bool) -> events.Event:
        """Send the orders of a generation."""
        generation = state.generation
        try:
            planned, orders = self._orders(state, plan, generation)
        except ProfileError as error:  # a link between hosts without costs
            return events.DecisionFailed(at=self._now(), question=state.question, reason=str(error))
        for connection, order in orders.items():
            self._send(connection, order)
        self._planner.begin(planned, state.members.hosts())
        launched = events.Launched(at=self._now(), generation=generation)
        # Before any answer is handled: records of a generation mean nothing without its plan.
        self._recorder.plan(planned, policy=plan.policy)
        if is_first:
            self._recorder.started(self._planner.describe(plan, run=str(self._run.path), generation=generation))
        return launched

    def _prepare(self, state: State) -> events.Event | None:
        """Send the orders of the next generation, to be prepared."""
        upcoming = state.next
        assert upcoming is not None
        try:
            self._prepared, orders = self._orders(state, self._decisions.to_prepare(upcoming.plan), upcoming.number)
        except ProfileError as error:
            return events.PrepareFailed(at=self._now(), generation=upcoming.number, reason=str(error))
        for connection, order in orders.items():
            self._send(connection, messages.Prepare(order=order))
        return None

    def _migrate(self, state: State, command: commands.Migrate) -> None:
        order = self._planner.migrate(command.plan, state.members.hosts(), generation=command.generation)
        for worker in command.workers:
            if (connection := state.members[worker].connection) is not None:
                self._send(connection, order)

    def _begin(self, state: State) -> None:
        """Record the plan of the generation that was prepared last, and begin to measure it."""
        planned, active = self._prepared, state.active
        assert active is not None
        assert planned is not None
        assert planned.generation == state.active_generation
        self._planner.begin(planned, state.members.hosts())
        self._recorder.plan(replace(planned, first_step=active.first_step), policy=active.policy)

    def _orders(
        self, state: State, plan: RecoveryPlan, generation: int
    ) -> tuple[GenerationPlan, dict[int, messages.StartGeneration]]:
        """Return the record of a generation and the orders of its workers, by connection."""
        self._rendezvous.forget_before(min(generation, state.active_generation))
        planned, orders = self._planner.orders(plan, state.members.hosts(), generation=generation)
        skipped = tuple(sorted(state.health.skipped))
        orders = {worker: order.model_copy(update={"skipped": skipped}) for worker, order in orders.items()}
        connections = {worker: state.members[worker].connection for worker in orders}
        return planned, {at: orders[worker] for worker, at in connections.items() if at is not None}

    async def _consider(self, state: State) -> None:
        question = state.scale_up.question
        try:
            found = await self._decisions.consider(state)
        except Exception as error:  # noqa: BLE001 - the executor's process may be gone; training goes on without
            reason = f"{type(error).__name__}: {error}"
            answer = events.Considered(at=self._now(), question=question, error=reason)
        else:
            answer = events.Considered(
                at=self._now(), question=question, staying=found.context.live, plans=found.plans, reason=found.reason
            )
        self._handle(answer)

    def _on_prepared(self, losses: int, prepare_s: float, error: str | None) -> None:
        generation = self.state.generation
        self._recorder.event("prepared", generation=generation, losses=losses, prepare_s=prepare_s, error=error)

    def _now(self) -> events.Moment:
        monotonic_s = asyncio.get_running_loop().time() + self._clock_ahead_s
        return events.Moment(unix_s=time.time(), monotonic_s=monotonic_s)
