"""The training thread of a rank: form a generation, bring its state to the right step, train, and leave it again."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import CheckpointError, ControlError, DamagedCheckpointError
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.protocol.messages import (
    Begin,
    CheckpointUnreadable,
    Crashed,
    Exit,
    Finished,
    LoaderEnded,
    Message,
    PeerFailed,
    Refused,
    SampleUnread,
    SnapshotTaken,
    Started,
    StartGeneration,
    StateDiffers,
    Stop,
)
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import checkpoint_storage
from chameleon_ft.storage.timelines import TimelineLog
from chameleon_ft.worker.checkpoint import CheckpointWriter
from chameleon_ft.worker.communicators.base import CommunicationError, Communicators
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.control_client import ControlClient
from chameleon_ft.worker.execution.bad_steps import BadStepError, JobError, noting
from chameleon_ft.worker.execution.commit import Committer, StateCheck, StateDiffersError
from chameleon_ft.worker.execution.evaluation import Evaluator
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.micro_batches import Draw, MicroBatches, RunReads, SampleSource
from chameleon_ft.worker.execution.steps import StepRecorder
from chameleon_ft.worker.generation import Generation, Preparations
from chameleon_ft.worker.loaders import LoaderServer, PrefetchedReads
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.rank_state import RankState
from chameleon_ft.worker.snapshots import SnapshotTaker
from chameleon_ft.worker.state_transfer.migration import LayerMigration, RequestWindow
from chameleon_ft.worker.step_loop import Outcome, StepLoop
from chameleon_ft.worker.streams import ReadAhead, StreamFeed

_POLL_S = 0.005


class Trainer:
    """Carries out a rank's orders in the training thread."""

    def __init__(
        self,
        rank: RankContext,
        *,
        config: RunConfig,
        run: RunDirectory,
        client: ControlClient,
        new_communicators: Callable[[], Communicators],
        loaders: LoaderServer | None = None,
    ) -> None:
        self._rank = rank
        self._config = config
        self._client = client
        self._new_communicators = new_communicators
        self._stream: ReadAhead | None = None
        reads = RunReads(rank.job, config, reading=self._reading)
        source: SampleSource = reads
        if loaders is not None:
            source = PrefetchedReads(
                reads=reads,
                start=loaders.start,
                progress=loaders.progress,
                waiting=self._reading,
                check=self._require_generation,
                ended=self._report_ended,
                count=config.loading.processes,
                prefetch=config.loading.prefetch,
                steps=config.steps,
            )
        if is_stream(rank.job.dataset):
            assert loaders is not None
            self._stream = ReadAhead(
                loaders.start_reader,
                unread=self._report_unread if config.loading.on_error == "skip" else None,
                ended=self._report_ended,
            )
        else:
            self._micro_batches = MicroBatches(
                source, rank.device, rank.job, draws=reads.draws, unread=self._report_unread
            )
        self._evaluator = None if rank.job.evaluation is None else Evaluator(rank, config, source)
        self._state = RankState(rank, config, run, client)
        client.snapshot_resolved = self._state.snapshots.resolve
        self._has_quiesced = False
        self._newest_generation = 0
        # Of generations that other ranks may not have left yet.
        self._former: list[Mover] = []
        self._preparations = Preparations(
            rank.worker,
            client=client,
            new_communicators=new_communicators,
            faults=rank.faults,
            allocator=self._state.allocator,
            is_training=lambda: self._state.committer is not None,
        )
        log = TimelineLog(run.timeline_file(rank.worker))
        self._recorder = StepRecorder(log=log, worker=rank.worker, every=config.timelines.every)
        self._writer = CheckpointWriter(
            checkpoint_storage(config, run),
            saved=client.send,
            before_write=lambda step: rank.faults.at("checkpoint", step),
        )

    def _require_generation(self) -> None:
        # Other workers wait for this one, which may read long.
        if self._client.is_over(self._newest_generation):
            raise CommunicationError(None, "the generation is over")

    @contextmanager
    def _reading(self, doing: str) -> Iterator[None]:
        self._require_generation()
        with noting(doing), self._rank.activity.waiting(doing, is_reading=True):
            yield

    def serve(self) -> int:
        """Carry out orders until told to exit; return the process's exit code.

        Raises:
            Exception: The job's own code or the device has failed; this rank is lost, and others may continue.
        """
        try:
            while True:
                match order := self._client.orders.get():
                    case Exit():
                        if order.is_drained:
                            self._writer.join(unless=lambda: not self._client.orders.empty())
                        return order.exit_code
                    case Refused():
                        return 1
                    case Stop():
                        self._quiesce(order.generation)
                    case StartGeneration(orders=orders):
                        self._train_from(Generation(order=orders, communicators=self._new_communicators()))
                    case Begin():
                        self._close_former()
                        prepared = self._preparations.take(order.generation)
                        if prepared is not None:
                            prepared.begin_at(order.first_step, evaluate=order.evaluate)
                            self._train_from(prepared)
                    case _:
                        raise ControlError(f"a joined rank does not expect {order.type!r}")
        finally:
            self._state.allocator.drop()
            self._recorder.log.write_deferred()

    def _quiesce(self, generation: int) -> None:
        self._rank.activity.idle("quiesced")
        self._has_quiesced = True
        self._close_former()
        self._preparations.drop_over()
        self._client.send(self._state.report(generation))

    # --- generations -------------------------------------------------------------------------------------------------

    def _train_from(self, first: Generation) -> None:
        """Take part in a generation, and in those that follow by a switch."""
        generation: Generation | None = first
        while generation is not None:
            generation = self._take_part(generation)

    def _take_part(self, generation: Generation) -> Generation | None:
        """Take part in one generation until it is over; return the one that follows by a switch, if any."""
        order, communicators = generation.order, generation.communicators
        self._newest_generation = order.generation
        # This may take long without being a hang.
        self._rank.activity.idle("loading its state")
        if self._has_quiesced:
            self._rank.faults.at("recovery", order.first_step)
            self._has_quiesced = False
        # One that is open follows by a switch: its order was given before.
        if not generation.is_open:
            self._state.snapshots.keep_only(order.snapshot)
        try:
            self._state.prepare(generation)
        except CheckpointError as error:
            # Another generation follows, which begins with an older checkpoint.
            self._state.drop()
            self._report_unreadable(order, error)
            communicators.close()
            return None

        outcome, mover = Outcome.OVER, Mover(communicators)
        if not self._client.enter(
            order.generation, communicators, partial(generation.interrupt, self._state.allocator)
        ):
            self._state.transfer.end()
            communicators.close()
            return None
        try:
            if not generation.is_open:
                with self._rank.activity.waiting("regroup", for_message=True):
                    generation.open(self._client)
            self._state.restore(generation)
            self._state.gather_again(generation, mover)
            if order.transition is not None:
                self._rank.activity.begin("the transition")
                self._state.carry_out_transition(generation, order.transition)
            if self._state.committer is None:
                # Messages that other ranks have begun with this one complete meanwhile.
                self._rank.activity.idle("spare")
                while not self._client.is_over(generation.number) and self._client.orders.empty():
                    time.sleep(_POLL_S)
            else:
                self._rank.activity.begin("the start of training")
                outcome = self._train(generation, self._state.committer, mover)
        except CommunicationError as error:
            if not self._client.is_over(order.generation):
                self._client.send(PeerFailed(generation=order.generation, peer=error.peer, error=str(error)))
        except CheckpointError as error:
            self._state.drop()
            self._report_unreadable(order, error)
        except StateDiffersError as error:
            self._client.send(
                StateDiffers(
                    generation=order.generation,
                    step=self._state.trained.committed,
                    checksums=tuple((layer, tuple(each.items())) for layer, each in error.checksums.items()),
                )
            )
            self._state.trained.drop()
        except JobError as error:
            # Another worker may be able to compute the step.
            traceback.print_exception(error.__cause__)
            self._state.trained.drop()
            self._client.send(Crashed(error=str(error), is_alive=True))
        except BadStepError:
            # The coordinator knows, and has all return to a checkpoint.
            self._state.trained.drop()
        finally:
            self._leave(generation, mover, outcome)
        return self._next(generation) if outcome is Outcome.SWITCH else None

    def _leave(self, generation: Generation, mover: Mover, outcome: Outcome) -> None:
        """End whatever uses the communicators of a generation, and close them unless other ranks still use them."""
        self._rank.activity.idle("between generations")
        if self._state.committer is not None and self._state.committer.state is not None:
            self._state.committer.state.in_flight.clear()
        self._preparations.trained()
        if outcome is Outcome.OVER:
            mover.close()
        else:
            # Also at the end of a run: closing a connection with unread messages may lose those that it has sent.
            mover.abandon()
            self._former.append(mover)
        if self._state.committer is not None:
            self._state.committer.end_exchange()
        self._client.leave(generation.number)
        self._state.transfer.end()
        if outcome is Outcome.OVER:
            mover.communicators.close()

    def _next(self, generation: Generation) -> Generation | None:
        """Return the generation that follows after a switch; if this rank is not in it, become a spare."""
        # The vote may have been quicker than the message.
        while self._client.switch_to <= generation.number:
            if self._client.is_over(generation.number):
                return None
            time.sleep(_POLL_S)
        following = self._preparations.take(self._client.switch_to)
        if following is not None:
            vote = self._state.trained.last_vote
            following.begin_at(self._state.trained.committed, evaluate=vote is not None and vote.evaluates)
            self._rank.faults.at("switch", self._state.trained.committed)
        elif not self._client.is_over(generation.number):
            self._state.placed, self._state.spec = self._client.switch_to, ""
            self._state.drop()
        return following

    def _close_former(self) -> None:
        """Close the communicators of generations that all ranks have left."""
        while self._former:
            mover = self._former.pop()
            mover.close()
            mover.communicators.close()

    def _report_unreadable(self, order: WorkerOrders, error: CheckpointError) -> None:
        self._client.send(
            CheckpointUnreadable(
                generation=order.generation,
                step=order.first_step,
                error=str(error),
                is_damaged=isinstance(error, DamagedCheckpointError),
                is_snapshot=order.load == "snapshot",
            )
        )

    def _report_unread(self, step: int, draw: Draw, error: str) -> None:
        """Report a sample that is left out."""
        epoch, sample = draw
        is_replaced = self._stream is not None
        self._send_now(SampleUnread(step=step, epoch=epoch, sample=sample, error=error, is_replaced=is_replaced))

    def _report_ended(self, loader: str, doing: str) -> None:
        self._client.send(LoaderEnded(loader=loader, doing=doing))

    def _report_snapshot(self, generation: int, step: int, held_up_s: float) -> None:
        """Report this rank's part of a snapshot."""
        self._send_now(SnapshotTaken(generation=generation, step=step, held_up_s=held_up_s))

    def _send_now(self, report: Message) -> None:
        """Send a report that arrives even if this rank is lost right afterwards."""
        self._client.send(report)
        with suppress(TimeoutError):
            self._client.flush()

    # --- training ----------------------------------------------------------------------------------------------------

    def _is_ending(self, generation: int, committer: Committer) -> bool:
        """Whether the present step is known to be the last of a generation."""
        is_last = committer.committed + 1 >= self._config.steps or self._client.finishing
        return is_last or self._client.switch_to > generation or self._client.is_over(generation)

    def _train(self, generation: Generation, committer: Committer, mover: Mover) -> Outcome:
        """Train in a generation until it is over, or the run has come to its end."""
        order, held = generation.order, committer.held
        migration = LayerMigration(
            self._rank,
            held=held,
            buffers=committer.buffers,
            mover=mover,
            committed=committer.committed,
            window=RequestWindow(committer.step_s, None if order.rest is None else order.rest.rest_s),
            is_ending=partial(self._is_ending, generation.number, committer),
            await_parameters=committer.wait_for_exchange,
        )
        if order.sharding is not None:
            committer.gather = self._state.new_gather(order.sharding, mover)
        snapshots = None
        if order.snapshots is not None:
            snapshots = SnapshotTaker(
                self._rank,
                order.snapshots,
                held=held,
                store=self._state.snapshots,
                mover=mover,
                every=self._config.snapshots.every,
                await_parameters=committer.wait_for_exchange,
                taken=partial(self._report_snapshot, generation.number),
            )
        feed = None
        if self._stream is None:
            self._micro_batches.leave_out((epoch, sample) for _, epoch, sample in order.left_out)
        else:
            feed = StreamFeed(self._rank, order, mover, config=self._config, ahead=self._stream)
            feed.begin(held.position)
        self._preparations.training(generation.number, migration)
        executor = Executor(
            rank=self._rank,
            held=held,
            micro_batches=self._micro_batches
            if feed is None
            else MicroBatches(feed, self._rank.device, self._rank.job),
            communicators=mover.communicators,
            await_parameters=committer.await_parameters,
        )
        steps = StepLoop(
            config=self._config,
            client=self._client,
            generation=generation,
            committer=committer,
            executor=executor,
            evaluator=self._evaluator,
            mover=mover,
            migration=migration,
            snapshots=snapshots,
            check=StateCheck(self._rank, held, order.segments, mover=mover, sharding=order.sharding),
            recorder=self._recorder,
            writer=self._writer,
            first_committed=self._close_former,
            position_after=None if feed is None else feed.position_after,
        )
        self._client.send(Started(generation=order.generation))
        outcome = steps.run()
        if outcome is Outcome.FINISHED:
            steps.submit_checkpoint()
            with self._state.slow_io.waiting("writing the last checkpoint", order.generation):
                written = self._writer.join(unless=lambda: self._client.is_over(order.generation))
            if written:
                self._client.send(Finished(generation=order.generation))
        return outcome
