"""The steps of one generation: run the program, commit, report, write checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from chameleon_ft.clock import unix_s
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.messages import LEFT_OUT, BadStep, CheckpointSaved, Committed, Evaluated
from chameleon_ft.recovery.generation import RestOrders, WorkerOrders
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import ADDS_TO_GRADIENTS
from chameleon_ft.worker.checkpoint import CheckpointWriter
from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.control_client import ControlClient
from chameleon_ft.worker.device import wait_for_stream
from chameleon_ft.worker.execution.bad_steps import BadStepError, Repetition, as_job_errors
from chameleon_ft.worker.execution.commit import (
    AppliedStep,
    CommitContext,
    Committer,
    ComputedStep,
    LeftOutError,
    StateCheck,
    Wishes,
)
from chameleon_ft.worker.execution.evaluation import Evaluator
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.execution.steps import StepRecorder, StepState, StepStats
from chameleon_ft.worker.generation import Generation
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.snapshots import SnapshotTaker
from chameleon_ft.worker.state_transfer.migration import LayerMigration


class _EndedByBadStepError(ChameleonError):
    """A step is bad, and training is to end with the state before it."""


class Outcome(Enum):
    """How the steps of a generation ended."""

    FINISHED = "finished"
    """The run is at its end."""
    SWITCH = "switch"
    """All ranks switch to the generation that they have prepared."""
    OVER = "over"
    """The coordinator has ended the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoop:
    """Trains the steps of one generation, in the training thread of the rank.

    It calls `first_committed` after the first commit, when every rank has left the generation before.
    """

    config: RunConfig
    client: ControlClient
    generation: Generation
    committer: Committer
    executor: Executor
    evaluator: Evaluator | None
    mover: Mover
    migration: LayerMigration
    snapshots: SnapshotTaker | None
    check: StateCheck
    recorder: StepRecorder
    writer: CheckpointWriter
    first_committed: Callable[[], None]
    position_after: Callable[[int], bytes] | None = None

    def run(self) -> Outcome:
        """Train until the run ends, the vote of a step switches to another generation, or this one is over.

        Raises:
            CommunicationError: a message failed, probably because the generation is over.
            JobError: the job's own code failed in a step.
            StateDiffersError: holders of a layer have different states.
        """
        order = self.generation.order
        if order.finish:
            return Outcome.FINISHED
        if order.evaluate:
            self._evaluate()
        vote: Vote | None = None
        if order.roll_forward is not None and order.roll_forward.checkpoint:
            self._begin_checkpoint()
        bad: BadStepError | None = None
        if order.rest is not None and order.continues_step:
            try:
                vote = self._rest_of_step(order.rest)
                self._evaluate_after(vote)
            except BadStepError as error:
                bad = error
            except LeftOutError as error:
                self._leave_out(error)
        try:
            outcome = self._whole_steps(vote, bad)
        except _EndedByBadStepError:
            outcome = Outcome.FINISHED
        if outcome is Outcome.FINISHED and self.config.health.check_every > 0:
            self.committer.compare(self.check, self._commit_context())
        return outcome

    def _whole_steps(self, vote: Vote | None, bad: BadStepError | None) -> Outcome:
        """Train after a step with this vote, if there was one, or with one that was bad; see `run`."""
        committer = self.committer
        while committer.committed < self.config.steps and not (vote and vote.finish):
            if vote is not None and vote.switch:
                committer.await_parameters()
                return Outcome.SWITCH
            if self.client.is_over(self.generation.number):
                return Outcome.OVER
            vote = self._steps_of_stage(bad)
            bad = None
        committer.await_parameters()
        return Outcome.FINISHED

    def _steps_of_stage(self, bad: BadStepError | None) -> Vote:
        """Train until the batch grows, the generation is over or a vote ends it; return the last vote."""
        committer, order = self.committer, self._order
        with Reductions(committer.buffers, order.operations, self.mover) as reductions:
            while True:
                vote = self._step(reductions) if bad is None else self._repeat(reductions, bad)
                bad = None
                self._evaluate_after(vote)
                is_last = committer.committed >= self.config.steps or vote.finish or vote.switch
                if is_last or self._order is not order or self.client.is_over(order.generation):
                    return vote

    @property
    def _order(self) -> WorkerOrders:
        """The orders as they are in the present step, the same object until the batch grows."""
        return self.generation.enter_step(self.committer.committed)

    def _evaluate_after(self, vote: Vote) -> None:
        """Evaluate after a step with this vote, if all do; after a switch, the next generation begins with that."""
        if vote.evaluates and (not vote.switch or self.committer.committed >= self.config.steps):
            self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate the present state with all workers of the generation, and report the sums."""
        assert self.evaluator is not None
        start_s, step = time.perf_counter(), self.committer.committed - 1
        state = StepState(step)
        try:
            with as_job_errors():
                sums, stats = self.evaluator.run(
                    self.executor, state, self._order.operations, after=self._between_operations
                )
            self.committer.await_parameters()
            total = sums.of_ballot(self.committer.total(sums.ballot(), self._commit_context()))
        finally:
            state.in_flight.clear()
        self.client.send(
            Evaluated(
                generation=self.generation.number,
                step=step,
                loss=total.loss,
                terms=total.terms,
                samples=round(total.samples),
                labels=total.labels,
                metrics=tuple(total.metrics.items()),
                seconds=time.perf_counter() - start_s,
                longest_s=stats.operation_times().longest_s,
            )
        )

    def submit_checkpoint(self) -> None:
        """Copy this worker's share of the layers it holds, and have them written in the background."""
        self.committer.await_parameters()
        start = time.perf_counter()
        with self.committer.rank.activity.waiting("copying layers"):
            held = self.executor.held
            layers = {layer: held.snapshot(layer) for layer in self.generation.order.written_layers()}
            slices = {place: held.snapshot_of_slice(*place) for place in self.generation.order.written_slices()}
        copy_s = time.perf_counter() - start
        step = self.committer.committed
        self.writer.submit(self.generation.number, step, layers, copy_s=copy_s, slices=slices)

    def _step(self, reductions: Reductions) -> Vote:
        """Train a step, or skip it; return its vote."""
        if self.committer.committed in self.generation.order.skipped:
            return self._skip(reductions)
        try:
            return self._compute(reductions)
        except BadStepError as bad:
            return self._repeat(reductions, bad)

    def _compute(self, reductions: Reductions, repetition: Repetition | None = None) -> Vote:
        """Run, commit, report and record a step, which may be computed again; return its vote."""
        while True:
            try:
                return self._compute_once(reductions, repetition)
            except LeftOutError as error:
                self._leave_out(error)

    def _leave_out(self, error: LeftOutError) -> None:
        """Leave out what any worker has left out of the present step, which is to be computed again."""
        step, micro_batches = self.committer.committed, self.executor.micro_batches
        self.migration.resume(applied=False)
        micro_batches.leave_out(micro_batches.draws(step, micro_batch)[row] for micro_batch, row in error.rows)

    def _compute_once(self, reductions: Reductions, repetition: Repetition | None) -> Vote:
        order, step = self._order, self.committer.committed
        start_s, start_unix_s = time.perf_counter(), unix_s()
        state = self.committer.begin()
        self._begin_check(always=repetition is not None)
        with self.recorder.noting_interruption(state, generation=order.generation):
            with as_job_errors():
                self.executor.micro_batches.expect(step, order.operations, self._operations_at)
                stats = self.executor.run(state, order.operations, after=self._after(reductions), repetition=repetition)
            computed = ComputedStep(
                stats=stats, reductions=reductions, contributions=state.contributions(), repetition=repetition
            )
            vote = self._commit(computed, start_s=start_s)
        self.committer.step_s = stats.end_s - start_s
        first_step = order.first_step if order.rest is None else order.first_step + 1
        if self.recorder.is_due(step, first_step=first_step):
            self.recorder.record(step, stats, generation=order.generation, start_s=start_s, start_unix_s=start_unix_s)
        return vote

    def _repeat(self, reductions: Reductions, bad: BadStepError) -> Vote:
        """Compute a bad step again, from the same samples and random numbers, and continue as configured.

        Raises:
            BadStepError: it is bad again, and all workers are to return to a checkpoint.
            _EndedByBadStepError: it is bad again, and training is to end.
        """
        step, start_s, repetition = self.committer.committed, time.perf_counter(), Repetition()
        request = self.client.checkpoint_request
        self.migration.resume(applied=False)
        try:
            vote = self._compute(reductions, repetition)
        except BadStepError as again:
            self._report(step, bad, repetition, is_bad_again=True)
            if self.config.health.on_bad_step == "rollback":
                raise
            if self.config.health.on_bad_step == "stop":
                self.committer.drop()
                raise _EndedByBadStepError from None
            applied = self.committer.apply(
                replace(again.vote, loss_sum=0.0, auxiliary_sum=0.0, grad_square_sum=0.0, skipped=True)
            )
            self.migration.resume()
            self._committed(applied, StepStats(), request=request, start_s=start_s)
            return applied.vote
        self._report(step, bad, repetition, is_bad_again=False)
        return vote

    def _report(self, step: int, bad: BadStepError, repetition: Repetition, *, is_bad_again: bool) -> None:
        self.client.send(
            BadStep(
                generation=self.generation.number,
                step=step,
                why=bad.why,
                is_bad_again=is_bad_again,
                has_changed=bad.changed(repetition.contributions),
                origins=tuple(repetition.found),
            )
        )

    def _skip(self, reductions: Reductions) -> Vote:
        """Commit a step of which nothing is computed; return its vote."""
        start_s = time.perf_counter()
        self.committer.begin()
        self._begin_check()
        nothing = ComputedStep(stats=StepStats(), reductions=reductions, contributions=0, is_skipped=True)
        return self._commit(nothing, start_s=start_s)

    def _rest_of_step(self, rest: RestOrders) -> Vote:
        """Run the rest of the step that was interrupted, commit and report it; return its vote."""
        start_s, start_unix_s = time.perf_counter(), unix_s()
        committer, buffers, worker = self.committer, self.committer.buffers, self.committer.rank.worker
        committer.reduced = False
        state = committer.state or committer.begin()
        self._begin_check()
        operations, sources = rest.program.of(worker), dict(rest.sources)
        reduced = {key for segment in buffers.segments if len(segment.holders) > 1 for key in segment.keys}
        if twice := reduced & buffers.totals - sources.keys():
            raise ControlError(f"worker {worker} holds the sums of {sorted(twice)}, which would be summed again")
        added_to = {layer for o in operations if o.kind in ADDS_TO_GRADIENTS for layer in o.layers}
        zeros = {key for key, source in sources.items() if source != worker}
        with (
            self.recorder.noting_interruption(state, generation=self.generation.number),
            Reductions(buffers, operations, self.mover, zeros=zeros) as reductions,
        ):
            with as_job_errors(), buffers.protecting(key for key in buffers.totals if not added_to.isdisjoint(key)):
                self.executor.micro_batches.expect(state.step, operations, self._operations_at)
                stats = self.executor.resume(
                    state,
                    operations,
                    resends=[resend for resend in rest.resends if resend[-1] != worker],
                    resent_gradients=rest.resent_gradients,
                    counted=rest.counted,
                    after=self._after(reductions),
                )
            # Where a sum is known, it has those of all micro-batches.
            ties = [segment.tied for segment in self.generation.order.segments if segment.tied]
            known = {
                layer: source
                for (layer, *others), source in sources.items()
                if not others and all(tied in sources for tied in ties if layer in tied)
            }
            own = sum(source == worker for source in known.values())
            contributions = state.contributions(known) + own * self.config.batch.micro_batches_at(state.step)
            computed = ComputedStep(stats=stats, reductions=reductions, contributions=contributions)
            vote = self._commit(computed, start_s=start_s)
        if self.recorder.every:
            times = {"start_s": start_s, "start_unix_s": start_unix_s}
            self.recorder.record(state.step, stats, generation=self.generation.number, part="rest", **times)
        return vote

    def _operations_at(self, step: int) -> tuple[Operation, ...]:
        return self.generation.order.at(step).operations

    def _after(self, reductions: Reductions) -> Callable[[int], None]:
        """Return what is called after each operation; it raises CommunicationError if the generation is over."""

        def after(count: int) -> None:
            reductions.after(count)
            self._between_operations(count)

        return after

    def _between_operations(self, _: int) -> None:
        self.mover.carry_out_deliveries()
        # Operations without a message would run on, while all other workers wait for this one.
        if self.client.is_over(self.generation.number):
            raise CommunicationError(None, "the generation is over")

    def _commit_context(self) -> CommitContext:
        return CommitContext(
            communicators=self.mover.communicators,
            members=self.generation.order.members,
            migration=self.migration,
            snapshots=self.snapshots,
            check=self.check,
            position_after=self.position_after,
            batch=self.config.batch if self.config.loading.on_error == "skip" else None,
        )

    def _commit(self, computed: ComputedStep, *, start_s: float) -> Vote:
        """Commit and report the step that was just computed, and begin a checkpoint if one is due."""
        request, finish = self.client.checkpoint_request, self.client.finishing
        evaluate = self.evaluator is not None and self.evaluator.is_due(
            self.committer.committed + 1, request=self.client.evaluation_request
        )
        checkpoint = self._checkpoint_is_due(request, evaluate=evaluate)

        def wishes() -> Wishes:
            switch = self.client.switch_to > self.generation.number
            return Wishes(
                finish=finish,
                switch=switch,
                checkpoint=checkpoint,
                snapshot=self._snapshot_is_due(),
                evaluate=evaluate,
            )

        stats = computed.stats
        applied = self.committer.commit(computed, self._commit_context(), wishes)
        try:
            self.committer.begin_exchange()
            if self.migration.has_shadow_holders:
                self.committer.await_parameters(migration=self.migration)
        except CommunicationError:
            # The step is committed, and perhaps no other worker knows.
            self._report_committed(applied, stats, start_s=start_s)
            raise
        self.migration.resume()
        # Or the next step would have the time of the update.
        wait_for_stream(self.executor.rank.device)
        stats.end_s = time.perf_counter()
        self._committed(applied, stats, request=request, start_s=start_s)
        return applied.vote

    def _report_committed(self, applied: AppliedStep, stats: StepStats, *, start_s: float) -> None:
        self.client.send(
            Committed(
                generation=self.generation.number,
                step=self.committer.committed - 1,
                vote=applied.vote,
                grad_norm=applied.grad_norm,
                lr=applied.lr,
                step_s=time.perf_counter() - start_s,
                times=stats.operation_times(),
            )
        )

    def _committed(self, applied: AppliedStep, stats: StepStats, *, request: int, start_s: float) -> None:
        """Report a step that is over, and begin a checkpoint if one is due."""
        self._report_committed(applied, stats, start_s=start_s)
        if self.committer.committed - 1 == self.generation.order.first_step:
            self.first_committed()
        if applied.vote.checkpoint and not applied.vote.finish:
            self.writer.answered = request
            self._begin_checkpoint()
        elif self.writer.left_out == self.committer.committed and not applied.vote.finish:
            self._leave_out_checkpoint()
        if self.snapshots is not None and applied.vote.takes_snapshot:
            self.snapshots.begin(self.committer.committed, request=self.client.snapshot_request)

    def _snapshot_is_due(self) -> bool:
        """Return whether a snapshot is due after the present step; none is after the last one."""
        step = self.committer.committed + 1
        if self.snapshots is None or step >= self.config.steps:
            return False
        return self.snapshots.is_due(step, request=self.client.snapshot_request)

    def _begin_check(self, *, always: bool = False) -> None:
        """Begin to compare the state before the present step, if it is due; after the last one it always is."""
        every, step = self.config.health.check_every, self.committer.committed
        if every > 0 and (always or step % every == 0):
            self.committer.await_parameters()
            self.check.begin()

    def _checkpoint_is_due(self, request: int, *, evaluate: bool) -> bool:
        """Return whether a checkpoint is due after the present step. The last one is written when training ends.

        `evaluate`: whether an evaluation is due.
        """
        every, step = self.config.checkpoint.every, self.committer.committed + 1
        if step >= self.config.steps:
            return False
        is_due = (every != "auto" and every > 0 and step % every == 0) or (
            evaluate and bool(self.config.checkpoint.keep_best)
        )
        return self.writer.votes_for(step, is_due=is_due, request=request)

    def _begin_checkpoint(self) -> None:
        if self.writer.is_busy:
            self._leave_out_checkpoint()
        else:
            self.submit_checkpoint()

    def _leave_out_checkpoint(self) -> None:
        step = self.committer.committed
        self.client.send(CheckpointSaved(generation=self.generation.number, step=step, layers=(), error=LEFT_OUT))
