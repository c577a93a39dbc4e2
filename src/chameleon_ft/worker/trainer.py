"""The training thread of a rank: form a generation, bring its state to the right step, train, and leave it again."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import CheckpointError, ControlError, DamagedCheckpointError
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.protocol.messages import (
    Begin,
    CheckpointUnreadable,
    Crashed,
    Exit,
    Finished,
    PeerFailed,
    Refused,
    SnapshotTaken,
    Started,
    StartGeneration,
    StateDiffers,
    Stop,
)
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.run_storage import checkpoint_storage
from chameleon_ft.storage.timelines import TimelineLog
from chameleon_ft.worker.checkpoint import CheckpointWriter
from chameleon_ft.worker.communicators import CommunicationError, Communicators
from chameleon_ft.worker.control_client import ControlClient
from chameleon_ft.worker.execution.bad_steps import BadStepError, JobError, noting
from chameleon_ft.worker.execution.commit import Committer, StateCheck, StateDiffersError
from chameleon_ft.worker.execution.executor import Executor, Pace
from chameleon_ft.worker.execution.layers import micro_batches_of
from chameleon_ft.worker.execution.steps import StepRecorder
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.generation import Generation, Preparations
from chameleon_ft.worker.rank_state import RankState
from chameleon_ft.worker.snapshots.taker import SnapshotTaker
from chameleon_ft.worker.state_transfer.migration import LayerMigration
from chameleon_ft.worker.step_loop import Outcome, StepLoop

_POLL_S = 0.005


@dataclass(kw_only=True)
class Trainer:
    """Carries out a rank's orders in the training thread. The fields stay the same for the life of the rank.

    Attributes:
        pace, stand_in_scale: of an emulated device, which trains stand-ins for layers; see `lab.stand_in`.
    """

    worker: int
    config: RunConfig
    run: RunDirectory
    job: Job
    boundaries: tuple[BoundarySpec, ...]
    device: torch.device
    new_communicators: Callable[[], Communicators]
    pace: Pace | None
    stand_in_scale: int | None
    client: ControlClient
    faults: FaultInjector

    def __post_init__(self) -> None:
        self._activity = self.client.activity
        self._micro_batches = micro_batches_of(
            self.job,
            self.config.batch,
            seed=self.config.seed,
            device=self.device,
            first_sample=self.config.first_sample,
            reading=self._reading,
        )
        self._state = RankState(
            worker=self.worker,
            config=self.config,
            run=self.run,
            job=self.job,
            boundaries=self.boundaries,
            device=self.device,
            stand_in_scale=self.stand_in_scale,
            client=self.client,
            faults=self.faults,
        )
        self.client.snapshot_resolved = lambda step, is_complete: self._state.snapshots.resolve(
            step, is_complete=is_complete
        )
        self._migration: LayerMigration | None = None
        self._snapshots: SnapshotTaker | None = None
        self._has_quiesced = False
        self._generation = 0  # the newest that it takes part in
        # Of generations that other ranks may not have left yet.
        self._former: list[tuple[Communicators, SnapshotTaker | None]] = []
        self._preparations = Preparations(
            self.worker,
            client=self.client,
            new_communicators=self.new_communicators,
            faults=self.faults,
            allocator=self._state.allocator,
            is_training=lambda: self._state.committer is not None,
        )
        log = TimelineLog(self.run.timeline_file(self.worker))
        self._recorder = StepRecorder(log=log, worker=self.worker, every=self.config.timelines.every)
        self._writer = CheckpointWriter(
            checkpoint_storage(self.config, self.run),
            saved=self.client.send,
            before_write=lambda step: self.faults.at("checkpoint", step),
        )

    @contextmanager
    def _reading(self, doing: str) -> Iterator[None]:
        if self.client.is_over(self._generation):  # other workers wait for this one, which may read long
            raise CommunicationError(None, "the generation is over")
        with noting(doing), self._activity.waiting(doing, is_reading=True):
            yield

    def serve(self) -> int:
        """Carry out orders until told to exit; return the process's exit code.

        Raises:
            Exception: of the job's own code or the device; this rank is lost, and others may continue.
        """
        try:
            while True:
                match order := self.client.orders.get():
                    case Exit():
                        if order.is_drained:
                            self._writer.join(unless=lambda: not self.client.orders.empty())
                        return order.exit_code
                    case Refused():
                        return 1
                    case Stop():
                        self._quiesce(order.generation)
                    case StartGeneration():
                        self._train_from(self._new_generation(order))
                    case Begin():
                        self._close_former()
                        prepared = self._preparations.take(order.generation)
                        if prepared is not None:  # otherwise a Stop follows
                            prepared.begin_at(order.first_step)
                            self._train_from(prepared)
                    case _:
                        raise ControlError(f"a joined rank does not expect {order.type!r}")
        finally:
            self._state.allocator.drop()
            self._recorder.log.write_deferred()

    def _quiesce(self, generation: int) -> None:
        self._activity.idle("quiesced")
        self._has_quiesced = True
        self._close_former()
        self._preparations.drop_over()
        self.client.send(self._state.report(generation))

    # --- generations -------------------------------------------------------------------------------------------------

    def _new_generation(self, order: StartGeneration) -> Generation:
        return Generation(worker=self.worker, order=order, communicators=self.new_communicators())

    def _train_from(self, first: Generation) -> None:
        """Take part in a generation, and in those that follow by a switch."""
        generation: Generation | None = first
        while generation is not None:
            generation = self._take_part(generation)

    def _take_part(self, generation: Generation) -> Generation | None:
        """Take part in one generation until it is over; return the one that follows by a switch, if any."""
        order, communicators = generation.order, generation.communicators
        self._generation = order.generation
        self._activity.idle("loading its state")  # which may take long without being a hang
        if self._has_quiesced:
            self.faults.at("recovery", order.first_step)
            self._has_quiesced = False
        if not generation.is_open:  # one that is open follows by a switch: its order was given before
            self._state.snapshots.keep_only(order.snapshot)
        try:
            self._state.prepare(generation)
        except CheckpointError as error:  # another generation follows, which begins with an older one
            self._state.drop()
            self._report_unreadable(order, error)
            communicators.close()
            return None

        outcome = Outcome.OVER
        if not self.client.enter(order.generation, communicators, partial(generation.interrupt, self._state.allocator)):
            self._state.transfer.end()
            communicators.close()
            return None
        try:
            if not generation.is_open:
                with self._activity.waiting("regroup", for_message=True):
                    generation.open(self.client.rendezvous(order.generation))
            self._state.restore(generation)
            self._state.gather_again(generation)
            if order.transition is not None:
                self._activity.begin("the transition")
                self._state.carry_out_transition(generation)
            if self._state.committer is None:
                self._stand_by(generation, "spare")
            else:
                self._activity.begin("the start of training")  # until its first operation
                outcome = self._train(generation, self._state.committer)
        except CommunicationError as error:
            if not self.client.is_over(order.generation):
                self.client.send(PeerFailed(generation=order.generation, peer=error.peer, error=str(error)))
        except CheckpointError as error:
            self._state.drop()
            self._report_unreadable(order, error)
        except StateDiffersError as error:
            assert self._state.committer is not None
            self.client.send(
                StateDiffers(
                    generation=order.generation,
                    step=self._state.committer.committed,
                    checksums=tuple((layer, tuple(each.items())) for layer, each in error.checksums.items()),
                )
            )
            self._state.committer.drop()
        except JobError as error:  # another worker may be able to compute the step
            traceback.print_exception(error.__cause__)
            assert self._state.committer is not None
            self._state.committer.drop()
            self.client.send(Crashed(error=str(error), is_alive=True))
        except BadStepError:  # the coordinator knows, and has all return to a checkpoint
            assert self._state.committer is not None
            self._state.committer.drop()
        finally:
            self._leave(generation, outcome)
        return self._next(generation) if outcome is Outcome.SWITCH else None

    def _leave(self, generation: Generation, outcome: Outcome) -> None:
        """End whatever uses the communicators of a generation, and close them unless other ranks still use them."""
        communicators = generation.communicators
        self._activity.idle("between generations")
        if self._state.committer is not None and self._state.committer.state is not None:
            self._state.committer.state.in_flight.clear()
        self._preparations.trained()
        if self._state.committer is not None:
            self._state.committer.end_exchange()
        if self._migration is not None:
            self._migration.close(interrupt=outcome is not Outcome.SWITCH)
            self._migration = None
        snapshots, self._snapshots = self._snapshots, None
        if snapshots is not None and outcome is Outcome.SWITCH:
            snapshots.abandon()
        elif snapshots is not None:
            snapshots.close()
        self.client.leave(generation.number)
        self._state.transfer.end()
        if outcome is Outcome.SWITCH:
            self._former.append((communicators, snapshots))
        else:
            communicators.close()

    def _next(self, generation: Generation) -> Generation | None:
        """Return the generation that follows after a switch; if this rank is not in it, become a spare."""
        assert self._state.committer is not None
        # The vote may have been quicker than the message.
        while self.client.switch_to <= generation.number:
            if self.client.is_over(generation.number):
                return None
            time.sleep(_POLL_S)
        following = self._preparations.take(self.client.switch_to)
        if following is not None:
            following.begin_at(self._state.committer.committed)
            self.faults.at("switch", self._state.committer.committed)
        elif not self.client.is_over(generation.number):
            self._state.placed, self._state.plan = self.client.switch_to, ""
            self._state.drop()
        return following

    def _close_former(self) -> None:
        """Close the communicators of generations that all ranks have left."""
        while self._former:
            communicators, snapshots = self._former.pop()
            if snapshots is not None:
                snapshots.close()
            communicators.close()

    def _report_unreadable(self, order: StartGeneration, error: CheckpointError) -> None:
        self.client.send(
            CheckpointUnreadable(
                generation=order.generation,
                step=order.first_step,
                error=str(error),
                is_damaged=isinstance(error, DamagedCheckpointError),
                is_snapshot=order.load == "snapshot",
            )
        )

    def _report_snapshot(self, generation: int, step: int, held_up_s: float) -> None:
        """Report this rank's part of a snapshot; the report arrives even if this rank is lost right afterwards."""
        self.client.send(SnapshotTaken(generation=generation, step=step, held_up_s=held_up_s))
        with suppress(TimeoutError):
            self.client.flush()

    # --- training ----------------------------------------------------------------------------------------------------

    def _stand_by(self, generation: Generation, doing: str) -> None:
        """Wait for the next order, while messages that other ranks have begun with this one complete."""
        self._activity.idle(doing)
        while not self.client.is_over(generation.number) and self.client.orders.empty():
            time.sleep(_POLL_S)

    def _is_ending(self, generation: int, committer: Committer) -> bool:
        """Whether the present step is known to be the last of a generation."""
        is_last = committer.committed + 1 >= self.config.steps or self.client.finishing
        return is_last or self.client.switch_to > generation or self.client.is_over(generation)

    def _train(self, generation: Generation, committer: Committer) -> Outcome:
        """Train in a generation until it is over, or the run has come to its end."""
        order, communicators = generation.order, generation.communicators
        assert self._state.held is not None
        migration = self._migration = LayerMigration(
            self.worker,
            held=self._state.held,
            buffers=committer.buffers,
            communicators=communicators,
            device=self.device,
            faults=self.faults,
            committed=committer.committed,
            step_s=committer.step_s,
            rest_s=None if order.rest is None else order.rest.rest_s,
            stand_in_scale=self.stand_in_scale,
            is_ending=partial(self._is_ending, generation.number, committer),
            await_parameters=committer.wait_for_exchange,
        )
        if generation.sharding is not None:
            committer.gather = self._state.new_gather(generation.sharding, generation)
        if order.snapshots is not None:
            self._snapshots = SnapshotTaker(
                order.snapshots,
                held=self._state.held,
                store=self._state.snapshots,
                communicators=communicators,
                faults=self.faults,
                every=self.config.snapshots.every,
                scale=self.stand_in_scale or 1,
                await_parameters=committer.wait_for_exchange,
                taken=partial(self._report_snapshot, generation.number),
            )
        self._preparations.training(generation.number, self._state.held, committer.buffers, migration)
        executor = Executor(
            job=self.job,
            held=self._state.held,
            boundaries=self.boundaries,
            micro_batches=self._micro_batches,
            device=self.device,
            communicators=communicators,
            activity=self._activity,
            faults=self.faults,
            pace=self.pace,
            await_parameters=committer.await_parameters,
        )
        steps = StepLoop(
            worker=self.worker,
            config=self.config,
            client=self.client,
            generation=generation,
            committer=committer,
            executor=executor,
            migration=migration,
            snapshots=self._snapshots,
            check=StateCheck(
                self.worker, self._state.held, generation.segments, device=self.device, sharding=generation.sharding
            ),
            recorder=self._recorder,
            writer=self._writer,
            activity=self._activity,
            first_committed=self._close_former,
        )
        self.client.send(Started(generation=order.generation))
        outcome = steps.run()
        if outcome is Outcome.FINISHED:
            steps.submit_checkpoint()
            with self._state.slow_io.waiting("writing the last checkpoint", order.generation):
                written = self._writer.join(unless=lambda: self.client.is_over(order.generation))
            if written:
                self.client.send(Finished(generation=order.generation))
        return outcome
