"""Carries out the commands of the state machine: decisions, orders, records and files.

`DecisionTasks` makes the decisions that the state machine asks for: how to start, and how to continue after a loss.
`Orders` sends the orders of the generations that follow from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from chameleon_ft.config import RunConfig, config_to_toml
from chameleon_ft.coordinator import commands, events
from chameleon_ft.coordinator.decisions.decisions import DecisionCache, Decisions
from chameleon_ft.coordinator.decisions.planner import Planner
from chameleon_ft.coordinator.peers import Peers, RendezvousStore
from chameleon_ft.coordinator.run_files import Examined, RunCheckpoints, RunFiles
from chameleon_ft.coordinator.state.checkpoints import describe_unreadable
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.cost.profile import Profile
from chameleon_ft.errors import ControlError, NoHolderError, ProfileError
from chameleon_ft.events import kinds
from chameleon_ft.events.decisions import Prepared
from chameleon_ft.plan import Plan
from chameleon_ft.protocol import messages
from chameleon_ft.protocol.background_tasks import BackgroundTasks
from chameleon_ft.protocol.job_info import JobInfo
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import Recorder
from chameleon_ft.storage.stores import checkpoint_storage, record_copies

_NO_CHECKPOINT: Final = "; there is no complete checkpoint in this run"


class DecisionTasks:
    """Carries out `Task.DECIDE` and `Task.CONSIDER_SCALE_UP`, at once or in the background.

    Args:
        resume: True if training begins with a checkpoint.
        changes: how the job differs from the one that it was written by.
        now: returns the time.
        handle: takes an answer that comes later.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        planner: Planner,
        decisions: Decisions,
        checkpoints: RunCheckpoints,
        recorder: Recorder,
        resume: bool,
        changes: Sequence[str],
        now: Callable[[], events.Moment],
        handle: Callable[[events.Event], None],
        tasks: BackgroundTasks,
    ) -> None:
        self._config = config
        self._planner = planner
        self._decisions = decisions
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._resume = resume
        self._changes = changes
        self._now = now
        self._handle = handle
        self._tasks = tasks

    def decide(self, state: State, damages: Mapping[int, str] | None = None) -> events.Event | None:
        """Decide on a plan, and if it begins with a checkpoint, on one without visible damage.

        Returns None if the disk does not tell at once whether a checkpoint is damaged; the answer is handled then.

        Args:
            damages: checkpoints that have been found damaged meanwhile, and how.
        """
        damages = damages or {}
        unreadable = {**state.checkpoints.unreadable, **damages}
        complete = self._checkpoints.steps()
        answer = self._decided(state, [step for step in complete if step not in unreadable], unreadable)
        if not isinstance(answer, events.Decided) or not isinstance(step := answer.spec.load, int):
            return answer

        def examined(found: Examined) -> events.Event | None:
            if found.damage is None:
                if state.active is None:
                    self._report_resumed(step, found)
                return replace(answer, at=self._now())
            if found.is_damaged:
                self._checkpoints.mark_damaged(step)
                message = describe_unreadable(step, found.damage)
            else:  # without an older one, it may be read in another start
                message = f"that of step {step} cannot be read here and is not used: {found.damage}"
            self._recorder.record(kinds.CheckpointUnreadable(step=step, error=found.damage, message=message))
            return self.decide(state, {**damages, step: found.damage})

        async def handle_later() -> None:
            if (later := examined(await asyncio.wrap_future(examining))) is not None:
                self._handle(later)

        examining = self._checkpoints.examine(step)
        if examining.done():
            return examined(examining.result())
        self._tasks.start(handle_later())
        return None

    def _decided(self, state: State, checkpoints: list[int], unreadable: Mapping[int, str]) -> events.Event:
        question = state.question
        damages = "".join(f"; {describe_unreadable(step, why)}" for step, why in sorted(unreadable.items()))
        checkpoint, members = None, state.members
        if state.holds_nothing:
            if self._resume and damages and not checkpoints:
                reason = f"there is no checkpoint that can be read{damages}"
                return events.DecisionFailed(at=self._now(), question=question, reason=reason)
            checkpoint = checkpoints[-1] if checkpoints and self._resume else None
            self._report_hints()
        try:
            if state.holds_nothing:
                spec = self._planner.start(
                    members.live(), members.hosts(), checkpoint=checkpoint, host_memory=members.host_memory()
                )
                return events.Decided(at=self._now(), question=question, spec=spec)
            found, chosen_at = self._decisions.decide(state, checkpoints)
        except NoHolderError as error:
            remedy = "" if self._config.checkpoint.every else ": set checkpoint.every to write some"
            reason = f"{error}{damages or _NO_CHECKPOINT + remedy}"
            return events.DecisionFailed(at=self._now(), question=question, reason=reason)
        except (ControlError, ProfileError) as error:
            return events.DecisionFailed(at=self._now(), question=question, reason=f"{error}{damages}")
        choice = None
        if found.decision is not None:
            chosen = found.decision.chosen
            choice = events.Choice(
                record=found.to_json(),
                step_s=None if chosen is None else chosen.step_s,
                stall_s=None if chosen is None else chosen.stall_s,
                is_prepared=found.is_prepared,
                chosen_at=chosen_at,
            )
        return events.Decided(
            at=self._now(),
            question=question,
            spec=found.spec,
            choice=choice,
            repeated_s=found.repeated_s,
            is_provisional=found.is_provisional,
        )

    def _report_hints(self) -> None:
        """Record what may be wrong with the job, as a run begins."""
        if optimizer := self._planner.undivided:
            message = (
                f"every holder of a layer keeps all of it: {optimizer} is not known to update each element of a "
                "parameter by itself; to share it by whole parameters, set parallel.optimizer_redundancy to a number "
                "of owners; a job says that its optimizer updates elements by themselves by Job(elementwise=True)"
            )
            self._recorder.record(kinds.OptimizerUndivided(optimizer=optimizer, message=message))
        for hint in self._planner.hints:
            self._recorder.record(kinds.Hint(message=hint))

    def _report_resumed(self, step: int, found: Examined) -> None:
        """Record which checkpoints a resumed run does not use, and in what its job differs."""
        for newer in found.incomplete:
            if newer > step:
                message = f"that of step {newer} is not complete and not used"
                self._recorder.record(kinds.CheckpointIncomplete(step=newer, message=message))
        if self._changes:
            message = f"training continues from step {step} with another job: {'; '.join(self._changes)}"
            self._recorder.record(kinds.JobChanged(step=step, changes=tuple(self._changes), message=message))

    async def consider(self, state: State) -> None:
        """Decide while training continues, and handle the answer."""
        try:
            answer = await self._decisions.consider(state, self._now)
        except Exception as error:  # noqa: BLE001 - the executor's process may be gone; training continues without
            reason = f"{type(error).__name__}: {error}"
            answer = events.Considered(at=self._now(), question=state.scale_up.question, error=reason)
        self._handle(answer)


class Orders:
    """Sends the orders of each generation, records it, and has it measured.

    Args:
        peers: the connected peers.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        planner: Planner,
        rendezvous: RendezvousStore,
        recorder: Recorder,
        peers: Peers,
    ) -> None:
        self._run = run
        self._planner = planner
        self._rendezvous = rendezvous
        self._recorder = recorder
        self._peers = peers

    def continue_from(self, state: State) -> None:
        """Begin to measure the generation in force, which trains already; send nothing."""
        if state.active is not None:
            self._planner.begin(state.active, state.members.hosts())

    def launch(self, state: State, spec: GenerationSpec, *, is_first: bool) -> None:
        """Send the orders of a generation, which begins."""
        self._send(state, spec, messages.StartGeneration)
        # Before any answer is handled: records of a generation mean nothing without its plan.
        self.begin(state)
        if is_first:
            self._recorder.record(self._planner.describe(spec, run=str(self._run.path)))

    def prepare(self, state: State) -> None:
        """Send the orders of the next generation, to be prepared."""
        assert state.switches.next is not None
        self._send(state, state.switches.next.spec, messages.Prepare)

    def migrate(self, state: State, command: commands.Migrate) -> None:
        """Send the orders to move layers."""
        order = messages.Migrate.of(command.spec)
        for worker in command.workers:
            if (connection := state.members[worker].connection) is not None:
                self._peers.send(connection, order)

    def begin(self, state: State) -> None:
        """Record the generation that is in force, and begin to measure it."""
        assert state.active is not None
        self._planner.begin(state.active, state.members.hosts())
        self._recorder.plan(state.active)

    def _send(
        self, state: State, spec: GenerationSpec, kind: type[messages.StartGeneration | messages.Prepare]
    ) -> None:
        """Send the orders of a generation to its workers.

        While the disk is full or does not answer, workers keep the whole generation in place of the journal.
        """
        self._rendezvous.forget_before(min(spec.generation, state.active_generation))
        complete = state.snapshots.complete
        orders = spec.orders(
            finish=state.ending is not None and state.ending.trains_no_step,
            skipped=tuple(sorted(state.health.skipped)),
            left_out=tuple(sorted(each for each in state.health.left_out if each[0] >= spec.first_step)),
            snapshot=None if complete is None else complete.step,
            spec=spec.to_json() if self._recorder.files.is_late else "",
        )
        connections = {worker: state.members[worker].connection for worker in orders}
        self._peers.send_alike(
            {at: kind(orders=orders[worker]) for worker, at in connections.items() if at is not None}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The inputs of a coordinator.

    Attributes:
        profile: measured costs, if there are any.
        plan: the plan to start with, if one was given.
        resume: True if training begins with a checkpoint.
        changes: how the job differs from the one that the checkpoint was written by.
        takes_over: True if the run is training already, without a coordinator.
        executor: prepares decisions on losses during training; without it, each is made after the loss.
    """

    config: RunConfig
    run: RunDirectory
    recorder: Recorder
    job: JobInfo
    resume: bool
    changes: tuple[str, ...] = ()
    takes_over: bool = False
    profile: Profile | None = None
    plan: Plan | None = None
    executor: Executor | None = None


class CommandRunner:
    """Carries out all commands but those that end the run, or the term of the coordinator.

    Args:
        peers: the connected peers.
        now: returns the time.
        handle: takes an event that answers a command later.
    """

    def __init__(
        self,
        setup: RunSetup,
        *,
        peers: Peers,
        now: Callable[[], events.Moment],
        handle: Callable[[events.Event], None],
        tasks: BackgroundTasks,
    ) -> None:
        config, run, recorder, job, executor = setup.config, setup.run, setup.recorder, setup.job, setup.executor
        self._config = config
        self._recorder = recorder
        self._peers = peers
        self._now = now
        self._tasks = tasks
        self._generation = 0  # of the newest state
        self.rendezvous = RendezvousStore()
        self.planner = Planner(config, job, profile=setup.profile, plan=setup.plan)
        policy = config.recovery.policy
        cache = None if executor is None else DecisionCache(policy, executor, prepared=self._on_prepared)
        self.decisions = Decisions(planner=self.planner, cache=cache, executor=executor)
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._speculation: asyncio.Task[None] | None = None  # of the decision that follows the loss
        self.files = RunFiles(run, recorder.files)
        self.checkpoints = RunCheckpoints(
            checkpoint_storage(config, run),
            recorder.files,
            model=job.fingerprint,
            num_layers=job.num_layers,
            job=job.record,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            keep_best=config.checkpoint.keep_best,
            base=config.forked.step if config.forked.run else None,
            not_marked=self._on_not_marked,
            copy_records=record_copies(config, run),
            takes_over=setup.takes_over,
        )
        self.decision_tasks = DecisionTasks(
            config,
            planner=self.planner,
            decisions=self.decisions,
            checkpoints=self.checkpoints,
            recorder=recorder,
            resume=setup.resume,
            changes=setup.changes,
            now=now,
            handle=handle,
            tasks=tasks,
        )
        self.orders = Orders(
            run,
            planner=self.planner,
            rendezvous=self.rendezvous,
            recorder=recorder,
            peers=peers,
        )
        self._welcome = messages.Welcome(
            config=config_to_toml(config),
            run=str(run.path),
            layers=job.layers,
            samples=json.dumps(dict(islice(job.record.data.items(), 3))),
        )

    def require_costs(self, before: State, event: events.Event, after: State) -> None:
        """Raise ControlError if a rank joins a running training and no costs of its links are known."""
        if not (isinstance(event, events.Received) and isinstance(event.message, messages.Hello)):
            return
        if before.phase in (Phase.GATHERING, Phase.OVER):
            return
        try:
            self.planner.require_costs(after.members.hosts())
        except ProfileError as error:
            raise ControlError(f"{event.message.member} cannot take part: {error}") from None

    def execute(self, state: State, command: commands.Command) -> events.Event | None:
        """Carry out a command; return the event that it leads to at once, if any."""
        self._generation = state.generation
        match command:
            case commands.Send(connection=connection, message=message):
                self._peers.send(connection, message)
            case commands.Acknowledge(connection=connection):
                self.acknowledge(state, connection)
            case commands.Drop(connection=connection):
                self._peers.drop(connection)
            case commands.Welcome(connection=connection, incarnation=incarnation):
                self._peers.send(connection, self._welcome.model_copy(update={"incarnation": incarnation}))
            case commands.Record(record=record):
                self._recorder.record(record)
            case commands.Task.PREPARE_GENERATION:
                self.orders.prepare(state)
            case commands.Task.BEGIN_GENERATION:
                self.orders.begin(state)
            case commands.Task.BEGIN_STAGE:
                self.orders.continue_from(state)
            case commands.Migrate():
                self.orders.migrate(state, command)
            case commands.LogFault(worker=worker):
                self.files.log_kill(worker)
            case commands.SaveEvidence(file=file, text=text):
                self.files.save_evidence(file, text)
            case commands.CompleteCheckpoint(
                step=checkpoint, agreed=agreed, slices=slices, seals=seals, evaluation=found
            ):
                kept = agreed if self._config.health.check_every else None
                self.checkpoints.complete(checkpoint, agreed=kept, slices=slices, seals=seals, evaluation=found)
            case commands.NoteEvaluation(step=checkpoint, values=values):
                self.checkpoints.evaluated(checkpoint, values)
            case commands.DiscardCheckpoint(step=checkpoint, agreed=agreed):
                self.checkpoints.discard(checkpoint, agreed=agreed if self._config.health.check_every else None)
            case commands.DistrustCheckpoints(after=agreed):
                self.checkpoints.distrust(agreed)
            case commands.MarkDamaged(step=checkpoint):
                self.checkpoints.mark_damaged(checkpoint)
            case commands.Task.DECIDE:
                self._cancel_speculation()
                return self.decision_tasks.decide(state)
            case commands.Launch(spec=spec, is_first=is_first):
                self.orders.launch(state, spec, is_first=is_first)
            case commands.Task.CONSIDER_SCALE_UP:
                self._tasks.start(self.decision_tasks.consider(state))
            case commands.Task.PREPARE_DECISIONS:
                self.decisions.prepare(state)
            case commands.Task.SPECULATE:
                self._cancel_speculation()
                self._speculation = self._tasks.start(self._speculate(state))
            case commands.Task.FORGET_DECISIONS:
                self._cancel_speculation()
                self.decisions.forget()
            case commands.MeasureOperations():
                return self._measure(state, command)
            case commands.MeasureStep(step_s=step_s):
                self.planner.calibration.step(step_s)
            case commands.MeasureMigration(migration=migration, seconds=seconds):
                self.planner.migrated(migration, seconds, state.members.hosts())
            case commands.MeasureTransfer(transfer_s=transfer_s):
                if state.active is not None and state.active.transfer is not None:
                    self.planner.transferred(state.active.transfer, transfer_s, state.members.hosts())
        return None

    def acknowledge(self, state: State, connection: int) -> None:
        """Tell a peer how many of its messages were handled, and which coordinators it may turn to."""
        if not self._recorder.files.is_late:  # otherwise the journal may not have the newest ones
            self._peers.mark_written(connection)
        lease_s, standbys = self._config.control.lease_s, tuple(state.standbys.values())
        self._peers.send(
            connection,
            messages.Acknowledged(
                connection=connection,
                received=self._peers.received.get(connection, 0),
                written=self._peers.written.get(connection, 0),
                term=state.term,
                lease_s=lease_s,
                # A standby leads only once the lease is over.
                reconnect_s=self._config.timeouts.reconnect_s + (lease_s if standbys else 0.0),
                standbys=standbys,
            ),
        )

    def _measure(self, state: State, command: commands.MeasureOperations) -> events.Event | None:
        measured = self.planner.calibration.operations(command.worker, command.times)
        if measured is None:
            return None
        links = self.planner.calibration.links(command.worker, command.step, command.times)
        return events.OperationsMeasured(
            at=self._now(),
            worker=command.worker,
            generation=state.generation,
            step=command.step,
            ratio=measured[0],
            group=measured[1],
            links=tuple((*ends, *measured) for ends, measured in links.items()),
        )

    async def _speculate(self, state: State) -> None:
        self.decisions.speculate(state)

    def _cancel_speculation(self) -> None:
        """Cancel the speculation about an outdated state: the losses of the workers of a host arrive one by one."""
        if self._speculation is not None:
            self._speculation.cancel()
            self._speculation = None

    def _on_prepared(self, losses: int, prepare_s: float, error: str | None) -> None:
        self._recorder.record(Prepared(generation=self._generation, losses=losses, prepare_s=prepare_s, error=error))

    def _on_not_marked(self, step: int, error: str) -> None:
        """Note, in the thread of files, that a checkpoint could not be marked."""

        def note() -> None:
            self._handle(events.MarkFailed(at=self._now(), step=step, error=error))

        with contextlib.suppress(RuntimeError):  # the run has ended without waiting any longer for the store
            self._loop.call_soon_threadsafe(note)
