"""What a rank does with its orders: form a generation, bring its state to the right step, train, and leave it again."""

from __future__ import annotations

import time
import traceback
from functools import partial

from chameleon_ft.control.wire.address import join_address
from chameleon_ft.control.wire.messages import (
    CheckpointSaved,
    Committed,
    Crashed,
    Exit,
    Finished,
    PeerFailed,
    Preallocate,
    Preallocated,
    Quiesced,
    Refused,
    Started,
    StartGeneration,
    Stop,
    Switched,
    Transition,
)
from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.observe import TimelineLog
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.batches import Batches
from chameleon_ft.runtime.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.runtime.commit import AppliedStep, Committer
from chameleon_ft.runtime.communicators import CommunicationError, Communicators, Membership
from chameleon_ft.runtime.context import RankContext
from chameleon_ft.runtime.control_client import ControlClient
from chameleon_ft.runtime.executor import Executor, StepSums, channels_of
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.layers import GradientBuffers, HeldLayers
from chameleon_ft.runtime.preallocation import LayerAllocator
from chameleon_ft.runtime.recording import StepRecorder, StepStart, operation_times
from chameleon_ft.runtime.reductions import Reductions
from chameleon_ft.runtime.slow_io import SlowIOReporter
from chameleon_ft.runtime.transition import Mover, channels_of_transition
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment

__all__ = ["Trainer"]

_POLL_S = 0.005


class Trainer:
    """Carries out a rank's orders in the training thread."""

    def __init__(
        self, context: RankContext, *, client: ControlClient, activity: Activity, faults: FaultInjector
    ) -> None:
        self._context = context
        self._client = client
        self._activity = activity
        self._disk = SlowIOReporter(activity, client.send)
        self._faults = faults
        self._batches = Batches(context.job, context.config.batch, seed=context.config.seed, device=context.device)
        self._held: HeldLayers | None = None
        self._committer: Committer | None = None
        self._placed = 0  # the generation whose placement it has switched to
        emulated = context.pace is not None  # what stands in for a layer is small
        self._allocator = LayerAllocator(
            context.job, seed=context.config.seed, device=context.device, ahead=not emulated
        )
        self._mover = Mover(
            context.worker,
            context.device,
            allocator=self._allocator,
            activity=activity,
            faults=faults,
            stand_ins=emulated,
        )
        self._has_quiesced = False
        self._recorder = StepRecorder(
            TimelineLog(context.run.timeline_file(context.worker)),
            worker=context.worker,
            every=context.config.timelines.every,
        )
        self._writer = CheckpointWriter(
            context.run.checkpoints,
            saved=client.send,
            before_write=lambda step: faults.at("checkpoint", step),
        )

    def serve(self) -> int:
        """Carry out orders until told to exit; return the process's exit code."""
        try:
            return self._serve()
        finally:
            self._allocator.drop()

    def _serve(self) -> int:
        while True:
            match order := self._client.orders.get():
                case Exit():
                    return 0
                case Refused():
                    return 1
                case Stop():
                    self._quiesce(order.generation)
                case Preallocate():
                    made = partial(self._client.send, Preallocated(layers=order.layers))
                    self._allocator.preallocate(dict(order.layers), then=made)
                case StartGeneration():
                    try:
                        self._generation(order)
                    except Exception as error:  # noqa: BLE001
                        # Whatever the job's own code or the device raised: this rank is lost, the others may go on.
                        self._client.send(Crashed(error=f"{type(error).__name__}: {error}"))
                        if not isinstance(error, ChameleonError):
                            traceback.print_exc()
                        return 1
                case _:
                    raise ControlError(f"a joined rank does not expect {order.type!r}")

    def _quiesce(self, generation: int) -> None:
        self._activity.idle("quiesced")
        self._has_quiesced = True
        committer = self._committer
        self._client.send(
            Quiesced(
                generation=generation,
                committed=0 if committer is None else committer.committed,
                reduced=committer is not None and committer.reduced,
                last_vote=None if committer is None else committer.last_vote,
                placed=self._placed,
                layers=() if self._held is None else tuple(sorted(self._held.layers)),
            )
        )

    def _generation(self, order: StartGeneration) -> None:
        """Take part in one generation until it is over or the run has come to its end."""
        self._activity.idle("loading its state")  # however long that takes, it is no sign of being stuck
        if self._has_quiesced:
            self._faults.at("recovery", order.first_step)
        segments, operations = order.unpack_segments(), order.unpack_operations()
        self._prepare(order, segments)
        communicators = self._context.new_communicators()

        def interrupt() -> None:
            self._allocator.hurry()
            communicators.interrupt()

        if not self._client.enter(order.generation, interrupt):
            self._mover.end()
            return
        try:
            with self._activity.waiting("regroup"):
                communicators.open(self._membership(order, segments, operations))
            if order.transition is not None:
                self._change_placement(order, order.transition, segments, communicators)
            if self._committer is None:
                self._stand_by(order, "spare")
            elif self._train(order, operations, self._committer, communicators):
                self._finish(order, segments, self._committer)
        except CommunicationError as error:
            if self._client.ended < order.generation:
                self._client.send(PeerFailed(generation=order.generation, peer=error.peer, error=str(error)))
        finally:
            self._activity.idle("between generations")
            communicators.close()
            self._client.leave()
            self._mover.end()

    def _prepare(self, order: StartGeneration, segments: tuple[Segment, ...]) -> None:
        """Bring what this rank holds to the state in which `order.first_step` begins, or a transition to it does."""
        if order.transition is None:
            self._allocator.drop()
        if order.load != "keep":
            self._load(order, segments)
        elif order.transition is None or order.transition.keep:
            self._catch_up(order)
        if order.transition is None:
            self._settle(order, segments)
        else:
            self._make_room(order, order.transition)

    def _load(self, order: StartGeneration, segments: tuple[Segment, ...]) -> None:
        """Begin anew, with fresh weights or from a checkpoint."""
        context = self._context
        needed = self._layers_in(segments)
        self._held = self._committer = None  # what is given up must not take memory beside what replaces it
        with self._disk.waiting("loading layers", order.generation):
            fresh = () if isinstance(order.load, int) else needed
            self._held = HeldLayers(context.job, fresh, seed=context.config.seed, device=context.device)
            if isinstance(order.load, int):
                for layer in sorted(needed):
                    self._held.take_in(layer, read_layer(context.run.checkpoints, order.load, layer))

    def _catch_up(self, order: StartGeneration) -> None:
        """Apply the step before `order.first_step`, if this rank has not: its gradient is of the placement it has."""
        committer = self._committer
        if committer is None or committer.committed >= order.first_step:
            return
        if order.roll_forward is None or not committer.reduced or committer.committed + 1 < order.first_step:
            raise ControlError(
                f"worker {self._context.worker} has applied {committer.committed} steps and cannot go on with "
                f"step {order.first_step}"
            )
        committer.apply(order.roll_forward)

    def _make_room(self, order: StartGeneration, transition: Transition) -> None:
        """Hold what must be kept until the switch, and nothing else, no gradient either."""
        context = self._context
        if self._held is None or not transition.keep:
            self._held = self._committer = None
            self._held = HeldLayers(context.job, (), seed=context.config.seed, device=context.device)
        self._held.keep_only(transition.keep)
        self._committer = self._new_committer(self._held, order, ())
        self._held.drop_gradients()
        self._mover.begin(transition, self._held)

    def _change_placement(
        self,
        order: StartGeneration,
        transition: Transition,
        segments: tuple[Segment, ...],
        communicators: Communicators,
    ) -> None:
        """Receive and send layers, and switch once all participants have confirmed. Raises CommunicationError."""
        assert self._held is not None
        start = time.perf_counter()
        moved_bytes = self._mover.carry_out(transition, self._held, communicators, step=order.first_step)
        transfer_s = time.perf_counter() - start
        self._faults.at("switch", order.first_step)
        self._client.send(Switched(generation=order.generation, moved_bytes=moved_bytes, transfer_s=transfer_s))
        self._settle(order, segments)

    def _settle(self, order: StartGeneration, segments: tuple[Segment, ...]) -> None:
        """From here on this rank is in the placement of the order's generation: with its layers, and no other ones."""
        needed = self._layers_in(segments)
        held = self._held
        if held is None or not held.layers >= needed:
            worker = self._context.worker
            raise ControlError(f"worker {worker} is to keep layers that it does not hold: {sorted(needed)}")
        self._placed = order.generation
        if self._context.worker not in order.members:
            self._held = self._committer = None
            return
        held.keep_only(needed)
        self._committer = self._new_committer(held, order, segments)
        if order.load == "keep" and order.roll_forward is not None:
            self._checkpoint_if_due(order.generation, self._committer)

    def _new_committer(self, held: HeldLayers, order: StartGeneration, segments: tuple[Segment, ...]) -> Committer:
        before = self._committer
        committer = Committer(
            worker=self._context.worker,
            held=held,
            buffers=GradientBuffers(held, segments),
            clip_norm=self._context.job.clip_norm,
            committed=order.first_step,
            activity=self._activity,
            faults=self._faults,
        )
        if before is not None and before.committed == order.first_step:
            committer.last_vote = before.last_vote
        return committer

    def _layers_in(self, segments: tuple[Segment, ...]) -> set[int]:
        worker = self._context.worker
        own = (segment for segment in segments if worker in segment.holders and not segment.tied)
        return {layer for segment in own for layer in segment.layers}

    def _stand_by(self, order: StartGeneration, doing: str) -> None:
        """With nothing to do, wait until the generation is over; what others have begun with this rank ends."""
        self._activity.idle(doing)
        while self._client.ended < order.generation:
            time.sleep(_POLL_S)

    def _membership(
        self, order: StartGeneration, segments: tuple[Segment, ...], operations: tuple[Operation, ...]
    ) -> Membership:
        groups = dict.fromkeys(segment.holders for segment in segments if len(segment.holders) > 1)
        channels = channels_of(self._context.worker, operations)
        if order.transition is not None:
            channels = tuple(sorted({*channels, *channels_of_transition(order.transition)}))
        return Membership(
            generation=order.generation,
            worker=self._context.worker,
            members=order.participants,
            groups=tuple(dict.fromkeys((order.members, *groups))),
            channels=channels,
            store=join_address(self._context.coordinator_host, order.store_port),
        )

    def _train(
        self,
        order: StartGeneration,
        operations: tuple[Operation, ...],
        committer: Committer,
        communicators: Communicators,
    ) -> bool:
        """Run steps until the end; False where the generation ended before."""
        context = self._context
        assert self._held is not None
        executor = Executor(
            job=context.job,
            held=self._held,
            boundaries=context.boundaries,
            batches=self._batches,
            device=context.device,
            communicators=communicators,
            activity=self._activity,
            faults=self._faults,
            pace=context.pace,
        )
        with Reductions(committer.buffers, operations, communicators) as reductions:
            return self._run_steps(order, operations, committer, communicators, executor, reductions)

    def _run_steps(
        self,
        order: StartGeneration,
        operations: tuple[Operation, ...],
        committer: Committer,
        communicators: Communicators,
        executor: Executor,
        reductions: Reductions,
    ) -> bool:
        context = self._context
        finish = pause = False
        self._client.send(Started(generation=order.generation, step=committer.committed))
        while committer.committed < context.config.steps and not finish:
            if pause:
                self._stand_by(order, "paused")
            if self._client.ended >= order.generation:
                return False
            step, start = committer.committed, StepStart.now()
            committer.reduced = False
            committer.buffers.zero()
            sums = executor.run(step, operations, after=reductions.after)
            applied = committer.commit(
                sums,
                reductions,
                communicators,
                order.members,
                finish=self._client.finishing,
                pause=self._client.pausing == order.generation,
            )
            sums.under_way.clear()  # the vote is complete, and so is every message
            self._report(order, committer, applied, sums, start.passed_s)
            if self._recorder.wants(step, first_step=order.first_step):
                assert committer.times is not None
                self._recorder.record(step, sums, committer.times, generation=order.generation, start=start)
            finish, pause = applied.vote.finish, applied.vote.pause
            if not finish:
                self._checkpoint_if_due(order.generation, committer)
        return True

    def _report(
        self, order: StartGeneration, committer: Committer, applied: AppliedStep, sums: StepSums, step_s: float
    ) -> None:
        self._client.send(
            Committed(
                generation=order.generation,
                step=committer.committed - 1,
                vote=applied.vote,
                grad_norm=applied.grad_norm,
                lr=applied.lr,
                step_s=step_s,
                times=operation_times(sums),
            )
        )

    def _checkpoint_if_due(self, generation: int, committer: Committer) -> None:
        """Begin a checkpoint on the way. The last one is written when training ends."""
        config = self._context.config
        every, step = config.checkpoint.every, committer.committed
        if not every or step % every or step >= config.steps:
            return
        if self._writer.is_busy:
            # Copies of the model must not pile up when the disk is slower than training.
            error = "left out, for the one before it is still being written; raise checkpoint.every"
            self._client.send(CheckpointSaved(generation=generation, step=step, layers=(), error=error))
        else:
            self._submit_checkpoint(generation, committer)

    def _submit_checkpoint(self, generation: int, committer: Committer) -> None:
        """Snapshot this worker's share of the layers it holds, and have them written in the background."""
        assert self._held is not None
        start = time.perf_counter()
        with self._activity.waiting("copying layers"):
            layers = {
                layer: self._held.snapshot(layer)
                for segment in committer.buffers.segments
                for layer in segment.layers
                if not segment.tied and segment.holders[layer % len(segment.holders)] == self._context.worker
            }
        self._writer.submit(generation, committer.committed, layers, copy_s=time.perf_counter() - start)

    def _finish(self, order: StartGeneration, segments: tuple[Segment, ...], committer: Committer) -> None:
        self._submit_checkpoint(order.generation, committer)
        with self._disk.waiting("writing the last checkpoint", order.generation):
            if not self._writer.join(unless=lambda: self._client.ended >= order.generation):
                return
        self._client.send(Finished(generation=order.generation, committed=committer.committed))
