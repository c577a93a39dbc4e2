"""Carries out the commands of the state machine: decisions, orders, records and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice

from chameleon_ft.config import RunConfig, config_to_toml
from chameleon_ft.control import commands, events
from chameleon_ft.control.background_tasks import BackgroundTasks
from chameleon_ft.control.decision_tasks import DecisionTasks
from chameleon_ft.control.decisions.decision_cache import DecisionCache
from chameleon_ft.control.decisions.decisions import Decisions
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.control.orders import Orders
from chameleon_ft.control.peers import Peers
from chameleon_ft.control.rendezvous import RendezvousStore
from chameleon_ft.control.run_checkpoints import RunCheckpoints
from chameleon_ft.control.run_files import RunFiles
from chameleon_ft.control.state.state import Phase, State
from chameleon_ft.control.wire import messages
from chameleon_ft.errors import ControlError, ProfileError
from chameleon_ft.observe import Recorder, RunDirectory, checkpoint_storage, record_copies
from chameleon_ft.plan import Plan
from chameleon_ft.profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The inputs of a coordinator.

    Attributes:
        profile: measured costs, if there are any.
        plan: the plan to start with, if one was given.
        resume: whether to begin with a checkpoint.
        changes: how the job differs from the one that the checkpoint was written by.
        takes_over: whether the run is training already, without a coordinator.
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
            decisions=self.decisions,
            rendezvous=self.rendezvous,
            recorder=recorder,
            peers=peers,
            now=now,
        )
        self._welcome = messages.Welcome(
            config=config_to_toml(config),
            run=str(run.path),
            boundaries=job.boundaries,
            built_in_full=job.built_in_full,
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
            raise ControlError(f"worker {event.message.worker} cannot take part: {error}") from None

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
            case commands.Welcome():
                own = {"incarnation": command.incarnation}
                self._peers.send(command.connection, self._welcome.model_copy(update=own))
            case commands.Record(record=record):
                self._recorder.record(record)
            case commands.Task.RECORD_SCALE_UP:
                if (fields := self.decisions.describe_scale_up()) is not None:
                    self._recorder.event("decision", generation=state.generation, **fields)
            case commands.Task.PREPARE_GENERATION:
                return self.orders.prepare(state)
            case commands.Task.BEGIN_GENERATION:
                self.orders.begin(state)
            case commands.Migrate():
                self.orders.migrate(state, command)
            case commands.LogFault(worker=worker):
                self.files.log_kill(worker)
            case commands.SaveEvidence(file=file, text=text):
                self.files.save_evidence(file, text)
            case commands.CompleteCheckpoint(step=checkpoint, agreed=agreed, slices=slices, seals=seals):
                kept = agreed if self._config.health.check_every else None
                self.checkpoints.complete(checkpoint, agreed=kept, slices=slices, seals=seals)
            case commands.DiscardCheckpoint(step=checkpoint, agreed=agreed):
                self.checkpoints.discard(checkpoint, agreed=agreed if self._config.health.check_every else None)
            case commands.DistrustCheckpoints(after=agreed):
                self.checkpoints.distrust(agreed)
            case commands.MarkDamaged(step=checkpoint):
                self.checkpoints.mark_damaged(checkpoint)
            case commands.Task.DECIDE:
                self._cancel_speculation()
                return self.decision_tasks.decide(state)
            case commands.Launch(plan=plan, is_first=is_first):
                return self.orders.launch(state, plan, is_first=is_first)
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
        return events.OperationsMeasured(
            at=self._now(),
            worker=command.worker,
            generation=state.generation,
            step=command.step,
            ratio=measured[0],
            group=measured[1],
            links=self.planner.calibration.links(command.worker, command.step, command.times),
        )

    async def _speculate(self, state: State) -> None:
        self.decisions.speculate(state)

    def _cancel_speculation(self) -> None:
        """Cancel the speculation about an outdated state: the losses of the workers of a host arrive one by one."""
        if self._speculation is not None:
            self._speculation.cancel()
            self._speculation = None

    def _on_prepared(self, losses: int, prepare_s: float, error: str | None) -> None:
        self._recorder.event("prepared", generation=self._generation, losses=losses, prepare_s=prepare_s, error=error)

    def _on_not_marked(self, step: int, error: str) -> None:
        """Note, in the thread of files, that a checkpoint could not be marked."""

        def note() -> None:
            self._handle(events.MarkFailed(at=self._now(), step=step, error=error))

        with contextlib.suppress(RuntimeError):  # the run has ended without waiting any longer for the store
            self._loop.call_soon_threadsafe(note)
