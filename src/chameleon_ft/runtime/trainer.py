"""The training thread of a rank: form a generation, bring its state to the right step, train, and leave it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.control.wire.address import join_address
from chameleon_ft.control.wire.messages import (
    CheckpointSaved,
    Committed,
    Exit,
    Finished,
    PeerFailed,
    Quiesced,
    Refused,
    Started,
    StartGeneration,
    Stop,
    Switched,
    Vote,
)
from chameleon_ft.control.wire.parts import Progress, Rest
from chameleon_ft.errors import ControlError
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.observe import RunDirectory, TimelineLog
from chameleon_ft.runtime.activity import SlowIOReporter
from chameleon_ft.runtime.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.runtime.communicators import CommunicationError, Communicators, Membership
from chameleon_ft.runtime.control_client import ControlClient
from chameleon_ft.runtime.execution.commit import Committer, Reductions
from chameleon_ft.runtime.execution.executor import Executor, Pace, channels_of, micro_batches_of
from chameleon_ft.runtime.execution.layers import GradientBuffers, HeldLayers
from chameleon_ft.runtime.execution.step_state import StepState
from chameleon_ft.runtime.execution.step_stats import StepRecorder, StepStats
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.state_transfer.preallocation import LayerAllocator
from chameleon_ft.runtime.state_transfer.transfer import StateTransfer, channels_of_transition
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment
from chameleon_ft.sync.segments import ADDS_TO_GRADIENTS

__all__ = ["Trainer"]

_POLL_S = 0.005


@dataclass(kw_only=True)
class Trainer:
    """Carries out a rank's orders in the training thread. The fields stay the same for the life of the rank.

    Attributes:
        coordinator_host: where the rendezvous store is too.
        pace: of an emulated device.
    """

    worker: int
    config: RunConfig
    run: RunDirectory
    job: Job
    boundaries: tuple[BoundarySpec, ...]
    device: torch.device
    coordinator_host: str
    new_communicators: Callable[[], Communicators]
    pace: Pace | None
    client: ControlClient
    faults: FaultInjector

    def __post_init__(self) -> None:
        self._activity = self.client.activity
        self._slow_io = SlowIOReporter(self._activity, self.client.send)
        seed, emulated = self.config.seed, self.pace is not None
        self._micro_batches = micro_batches_of(self.job, self.config.batch, seed=seed, device=self.device)
        self._held: HeldLayers | None = None
        self._committer: Committer | None = None
        self._state: StepState | None = None  # of a step that has been begun and not committed
        self._placed = 0  # the generation whose placement it has switched to
        self._has_quiesced = False
        # The stand-ins of an emulated device are too small to be worth preallocating.
        self._allocator = LayerAllocator(self.job, seed=seed, device=self.device, ahead=not emulated)
        self._transfer = StateTransfer(
            self.worker,
            self.device,
            allocator=self._allocator,
            activity=self._activity,
            faults=self.faults,
            stand_ins=emulated,
        )
        log = TimelineLog(self.run.timeline_file(self.worker))
        self._recorder = StepRecorder(log=log, worker=self.worker, every=self.config.timelines.every)
        self._writer = CheckpointWriter(
            self.run.checkpoints,
            saved=self.client.send,
            before_write=lambda step: self.faults.at("checkpoint", step),
        )

    def serve(self) -> int:
        """Carry out orders until told to exit; return the process's exit code.

        Raises:
            Exception: of the job's own code or the device; this rank is lost, and others may continue.
        """
        try:
            while True:
                match order := self.client.orders.get():
                    case Exit():
                        return 0
                    case Refused():
                        return 1
                    case Stop():
                        self._quiesce(order.generation)
                    case Preallocate():
                        report = partial(self.client.send, Preallocated(layers=order.layers))
                        self._allocator.preallocate(dict(order.layers), then=report)
                    case StartGeneration():
                        self._generation(order)
                    case _:
                        raise ControlError(f"a joined rank does not expect {order.type!r}")
        finally:
            self._allocator.drop()

    def _quiesce(self, generation: int) -> None:
        self._activity.idle("quiesced")
        self._has_quiesced = True
        committer = self._committer
        self.client.send(
            Quiesced(
                generation=generation,
                committed=0 if committer is None else committer.committed,
                reduced=committer is not None and committer.reduced,
                last_vote=None if committer is None else committer.last_vote,
                placed=self._placed,
                layers=() if self._held is None else tuple(sorted(self._held.layers)),
                progress=self._progress(),
            )
        )

    def _progress(self) -> Progress | None:
        """Return what this rank holds of the step that was interrupted; None if it has begun none."""
        committer, state = self._committer, self._state
        if committer is None or state is None:
            return None
        return Progress.of(state.progress(committer.buffers.totals))

    def _generation(self, order: StartGeneration) -> None:
        """Take part in one generation until it is over or the run has come to its end."""
        self._activity.idle("loading its state")  # which may take long without being a hang
        if self._has_quiesced:
            self.faults.at("recovery", order.first_step)
        segments, operations = order.unpack_segments(), order.unpack_operations()
        if order.rest is None:
            self._state = None  # before anything else takes memory
        self._prepare(order, segments)
        communicators = self.new_communicators()

        def interrupt() -> None:
            self._allocator.hurry()
            communicators.interrupt()

        if not self.client.enter(order.generation, interrupt):
            self._transfer.end()
            return
        try:
            with self._activity.waiting("regroup"):
                communicators.open(self._membership(order, segments, operations))
            if order.transition is not None:
                assert self._held is not None
                start = time.perf_counter()
                moved_bytes = self._transfer.carry_out(
                    order.transition, self._held, communicators, step=order.first_step
                )
                transfer_s = time.perf_counter() - start
                self.faults.at("switch", order.first_step)
                self.client.send(Switched(generation=order.generation, moved_bytes=moved_bytes, transfer_s=transfer_s))
                self._switch(order, segments)
            if self._committer is None:
                self._stand_by(order, "spare")
            elif self._train(order, operations, self._committer, communicators):
                self._submit_checkpoint(order.generation, self._committer)
                with self._slow_io.waiting("writing the last checkpoint", order.generation):
                    written = self._writer.join(unless=lambda: self.client.ended >= order.generation)
                if written:
                    self.client.send(Finished(generation=order.generation))
        except CommunicationError as error:
            if self.client.ended < order.generation:
                self.client.send(PeerFailed(generation=order.generation, peer=error.peer, error=str(error)))
        finally:
            self._activity.idle("between generations")
            if self._state is not None:
                self._state.in_flight.clear()
            communicators.close()
            self.client.leave()
            self._transfer.end()

    # --- the state in which a generation begins ----------------------------------------------------------------------

    def _prepare(self, order: StartGeneration, segments: tuple[Segment, ...]) -> None:
        """Bring the held state to the beginning of `order.first_step`, or of a transition to it."""
        transition = order.transition
        if transition is None:
            self._allocator.drop()
        if order.load != "keep":
            self._load(order, self._layers_in(segments))
        elif transition is None or transition.keep:
            self._catch_up(order)
        if transition is None:
            self._switch(order, segments)
            return
        # Hold until the switch only the layers that the transition keeps, and no gradients.
        if self._held is None or not transition.keep:
            self._held = self._committer = None
            self._held = self._new_layers(())
        self._held.keep_only(transition.keep)
        self._committer = self._new_committer(self._held, order, ())
        self._held.drop_gradients()
        self._transfer.begin(transition, self._held)

    def _load(self, order: StartGeneration, needed: set[int]) -> None:
        """Load fresh weights or a checkpoint."""
        self._held = self._committer = None  # before the new state takes memory
        with self._slow_io.waiting("loading layers", order.generation):
            if order.load == "initial":
                self._held = self._new_layers(needed)
                return
            assert isinstance(order.load, int)
            self._held = self._new_layers(())
            for layer in sorted(needed):
                self._held.take_in(layer, read_layer(self.run.checkpoints, order.load, layer))

    def _catch_up(self, order: StartGeneration) -> None:
        """Apply the step before `order.first_step`, if this rank has not, from the gradient of its old placement."""
        committer = self._committer
        if committer is None or committer.committed >= order.first_step:
            return
        if order.roll_forward is None or not committer.reduced or committer.committed + 1 < order.first_step:
            raise ControlError(
                f"worker {self.worker} has applied {committer.committed} steps and cannot go on with "
                f"step {order.first_step}"
            )
        committer.apply(order.roll_forward)
        self._state = None

    def _switch(self, order: StartGeneration, segments: tuple[Segment, ...]) -> None:
        """Switch to the placement of the order's generation: hold its layers and no others."""
        needed = self._layers_in(segments)
        held, worker = self._held, self.worker
        if held is None or not held.layers >= needed:
            raise ControlError(f"worker {worker} is to keep layers that it does not hold: {sorted(needed)}")
        self._placed = order.generation
        if worker not in order.members:
            self._held = self._committer = None
            return
        if order.rest is not None and held.layers != needed:
            raise ControlError(f"worker {worker} is to finish a step with other layers than it was begun with")
        held.keep_only(needed)
        self._committer = self._new_committer(held, order, segments)
        if order.load == "keep" and order.roll_forward is not None:
            self._checkpoint_if_due(order.generation, self._committer)

    def _new_layers(self, layers: set[int] | tuple[()]) -> HeldLayers:
        return HeldLayers(self.job, layers, seed=self.config.seed, device=self.device)

    def _new_committer(self, held: HeldLayers, order: StartGeneration, segments: tuple[Segment, ...]) -> Committer:
        before = self._committer
        if before is not None and self._state is not None:
            buffers = before.buffers  # with the contributions of the step that was interrupted
            buffers.regroup(segments)
        else:
            buffers = GradientBuffers(held, segments)
        return Committer(
            worker=self.worker,
            held=held,
            buffers=buffers,
            clip_norm=self.job.clip_norm,
            committed=order.first_step,
            activity=self._activity,
            faults=self.faults,
            last_vote=before.last_vote if before is not None and before.committed == order.first_step else None,
        )

    def _layers_in(self, segments: tuple[Segment, ...]) -> set[int]:
        worker = self.worker
        own = (segment for segment in segments if worker in segment.holders and not segment.tied)
        return {layer for segment in own for layer in segment.layers}

    def _membership(
        self, order: StartGeneration, segments: tuple[Segment, ...], operations: tuple[Operation, ...]
    ) -> Membership:
        groups = dict.fromkeys(segment.holders for segment in segments if len(segment.holders) > 1)
        channels = channels_of(self.worker, operations)
        if (rest := order.rest) is not None:
            of_rest = channels_of(self.worker, rest.unpack_operations(), rest.resends)
            channels = tuple(sorted({*channels, *of_rest}))
        if order.transition is not None:
            channels = tuple(sorted({*channels, *channels_of_transition(order.transition)}))
        return Membership(
            generation=order.generation,
            worker=self.worker,
            members=order.participants,
            groups=tuple(dict.fromkeys((order.members, *groups))),
            channels=channels,
            store=join_address(self.coordinator_host, order.store_port),
        )

    # --- training ----------------------------------------------------------------------------------------------------

    def _stand_by(self, order: StartGeneration, doing: str) -> None:
        """Wait until the generation is over, while messages that other ranks have begun with this one complete."""
        self._activity.idle(doing)
        while self.client.ended < order.generation:
            time.sleep(_POLL_S)

    def _train(
        self,
        order: StartGeneration,
        operations: tuple[Operation, ...],
        committer: Committer,
        communicators: Communicators,
    ) -> bool:
        """Run steps until the end of the run; False where the generation ended before."""
        assert self._held is not None
        executor = Executor(
            job=self.job,
            held=self._held,
            boundaries=self.boundaries,
            micro_batches=self._micro_batches,
            device=self.device,
            communicators=communicators,
            activity=self._activity,
            faults=self.faults,
            pace=self.pace,
        )
        finish = pause = False
        self.client.send(Started(generation=order.generation))
        if order.rest is not None:
            vote = self._rest_of_step(order, order.rest, committer, communicators, executor)
            finish, pause = vote.finish, vote.pause
            if not finish:
                self._checkpoint_if_due(order.generation, committer)
        with Reductions(committer.buffers, operations, communicators) as reductions:
            while committer.committed < self.config.steps and not finish:
                if pause:
                    self._stand_by(order, "paused")
                if self.client.ended >= order.generation:
                    return False
                vote = self._step(order, operations, committer, communicators, executor, reductions)
                finish, pause = vote.finish, vote.pause
                if not finish:
                    self._checkpoint_if_due(order.generation, committer)
        return True

    def _step(
        self,
        order: StartGeneration,
        operations: tuple[Operation, ...],
        committer: Committer,
        communicators: Communicators,
        executor: Executor,
        reductions: Reductions,
    ) -> Vote:
        """Run, commit, report and record a step; return its vote."""
        step, start_s, start_unix_s = committer.committed, time.perf_counter(), time.time()
        stats = executor.run(self._begin_step(committer), operations, after=reductions.after)
        vote = self._commit(order, committer, communicators, reductions, stats, start_s=start_s)
        first_step = order.first_step if order.rest is None else order.first_step + 1
        if self._recorder.wants(step, first_step=first_step):
            self._recorder.record(step, stats, generation=order.generation, start_s=start_s, start_unix_s=start_unix_s)
        return vote

    def _rest_of_step(
        self,
        order: StartGeneration,
        rest: Rest,
        committer: Committer,
        communicators: Communicators,
        executor: Executor,
    ) -> Vote:
        """Run the rest of the step that was interrupted, commit and report it; return its vote."""
        start_s = time.perf_counter()
        committer.reduced = False
        state = self._state or self._begin_step(committer)
        operations, buffers, sources = rest.unpack_operations(), committer.buffers, dict(rest.sources)
        reduced = {key for segment in buffers.segments if len(segment.holders) > 1 for key in segment.keys}
        if twice := reduced & buffers.totals - sources.keys():
            raise ControlError(f"worker {self.worker} holds the sums of {sorted(twice)}, which would be summed again")
        added_to = {layer for o in operations if o.kind in ADDS_TO_GRADIENTS for layer in o.layers}
        with Reductions(
            buffers,
            operations,
            communicators,
            zeros={key for key, source in sources.items() if source != self.worker},
        ) as reductions:
            with buffers.protecting(key for key in buffers.totals if not added_to.isdisjoint(key)):
                stats = executor.resume(
                    state,
                    operations,
                    resends=[resend for resend in rest.resends if resend[-1] != self.worker],
                    counted=rest.counted,
                    after=reductions.after,
                )
            return self._commit(order, committer, communicators, reductions, stats, start_s=start_s)

    def _begin_step(self, committer: Committer) -> StepState:
        """Start a step: there is nothing of it yet."""
        committer.reduced = False
        committer.buffers.zero()
        self._state = StepState(committer.committed)
        return self._state

    def _commit(
        self,
        order: StartGeneration,
        committer: Committer,
        communicators: Communicators,
        reductions: Reductions,
        stats: StepStats,
        *,
        start_s: float,
    ) -> Vote:
        """Commit and report the step that was just executed; return its vote."""
        step = committer.committed
        applied = committer.commit(
            stats,
            reductions,
            communicators,
            order.members,
            finish=self.client.finishing,
            pause=self.client.pausing == order.generation,
        )
        self._state = None  # the vote is complete, so all messages have arrived
        self.client.send(
            Committed(
                generation=order.generation,
                step=step,
                vote=applied.vote,
                grad_norm=applied.grad_norm,
                lr=applied.lr,
                step_s=time.perf_counter() - start_s,
                times=stats.operation_times(),
            )
        )
        return applied.vote

    def _checkpoint_if_due(self, generation: int, committer: Committer) -> None:
        """Begin a checkpoint on the way. The last one is written when training ends."""
        config = self.config
        every, step = config.checkpoint.every, committer.committed
        if not every or step % every or step >= config.steps:
            return
        if self._writer.is_busy:
            # Copies of the model must not pile up when the disk is slower than training.
            error = "left out, for the one before it is still being written; raise checkpoint.every"
            self.client.send(CheckpointSaved(generation=generation, step=step, layers=(), error=error))
        else:
            self._submit_checkpoint(generation, committer)

    def _submit_checkpoint(self, generation: int, committer: Committer) -> None:
        """Copy this worker's share of the layers it holds, and have them written in the background."""
        assert self._held is not None
        start = time.perf_counter()
        with self._activity.waiting("copying layers"):
            layers = {
                layer: self._held.snapshot(layer)
                for segment in committer.buffers.segments
                for layer in segment.layers
                if not segment.tied and segment.holders[layer % len(segment.holders)] == self.worker
            }
        self._writer.submit(generation, committer.committed, layers, copy_s=time.perf_counter() - start)
