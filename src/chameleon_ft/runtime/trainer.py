"""The training thread of a rank: form a generation, bring its state to the right step, train, and leave it again."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.control.wire.messages import (
    Begin,
    CheckpointUnreadable,
    Exit,
    Finished,
    PeerFailed,
    Quiesced,
    Refused,
    Started,
    StartGeneration,
    StateDiffers,
    Stop,
    Switched,
)
from chameleon_ft.errors import CheckpointError, ControlError, DamagedCheckpointError
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.observe import RunDirectory, TimelineLog
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.runtime.activity import SlowIOReporter
from chameleon_ft.runtime.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.runtime.communicators import CommunicationError, Communicators
from chameleon_ft.runtime.control_client import ControlClient
from chameleon_ft.runtime.execution.bad_steps import BadStepError, RecentSteps
from chameleon_ft.runtime.execution.commit import Committer
from chameleon_ft.runtime.execution.executor import Executor, Pace, micro_batches_of
from chameleon_ft.runtime.execution.gather import ParameterGather
from chameleon_ft.runtime.execution.layers import GradientBuffers, HeldLayers
from chameleon_ft.runtime.execution.state_check import StateCheck, StateDiffersError
from chameleon_ft.runtime.execution.step_stats import StepRecorder
from chameleon_ft.runtime.fault_injection import FaultInjector, flip_random_bit
from chameleon_ft.runtime.generation import Generation, Preparations
from chameleon_ft.runtime.state_transfer.migration import LayerMigration
from chameleon_ft.runtime.state_transfer.preallocation import LayerAllocator
from chameleon_ft.runtime.state_transfer.transfer import StateTransfer
from chameleon_ft.runtime.step_loop import Outcome, StepLoop

__all__ = ["Trainer"]

_POLL_S = 0.005


@dataclass(kw_only=True)
class Trainer:
    """Carries out a rank's orders in the training thread. The fields stay the same for the life of the rank.

    Attributes:
        pace, stand_in_scale: of an emulated device, which trains stand-ins for layers; see `models.stand_in`.
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
        self._slow_io = SlowIOReporter(self._activity, self.client.send)
        seed, emulated = self.config.seed, self.pace is not None
        first_sample = self.config.first_sample
        self._micro_batches = micro_batches_of(
            self.job, self.config.batch, seed=seed, device=self.device, first_sample=first_sample
        )
        self._held: HeldLayers | None = None
        self._committer: Committer | None = None
        self._migration: LayerMigration | None = None
        self._placed = 0  # the generation whose placement it has switched to
        self._has_quiesced = False
        self._former: list[Communicators] = []  # of generations that other ranks may not have left yet
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
        self._preparations = Preparations(
            self.worker,
            client=self.client,
            new_communicators=self.new_communicators,
            faults=self.faults,
            allocator=self._allocator,
            is_training=lambda: self._committer is not None,
        )
        self.faults.corrupt, self.faults.spoil = self._corrupt, self._spoil
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
            self._allocator.drop()

    def _quiesce(self, generation: int) -> None:
        self._activity.idle("quiesced")
        self._has_quiesced = True
        self._close_former()
        self._preparations.drop_over()
        committer = self._committer
        self.client.send(
            Quiesced(
                generation=generation,
                committed=0 if committer is None else committer.committed,
                reduced=committer is not None and committer.reduced,
                last_vote=None if committer is None else committer.last_vote,
                placed=self._placed,
                layers=() if self._held is None else tuple(sorted(self._held.layers)),
                progress=None if committer is None else committer.progress(),
                gathered=committer is None or committer.gathered,
            )
        )

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
        self._activity.idle("loading its state")  # which may take long without being a hang
        if self._has_quiesced:
            self.faults.at("recovery", order.first_step)
            self._has_quiesced = False
        try:
            self._prepare(generation)
        except CheckpointError as error:  # another generation follows, which begins with an older one
            self._held = self._committer = None
            self._report_unreadable(order, error)
            communicators.close()
            return None

        outcome = Outcome.OVER
        if not self.client.enter(order.generation, partial(generation.interrupt, self._allocator)):
            self._transfer.end()
            communicators.close()
            return None
        try:
            if not generation.is_open:
                with self._activity.waiting("regroup", for_message=True):
                    generation.open(self.client.rendezvous(order.generation))
            self._gather_again(generation)
            if order.transition is not None:
                self._carry_out_transition(generation)
            if self._committer is None:
                self._stand_by(generation, "spare")
            else:
                outcome = self._train(generation, self._committer)
        except CommunicationError as error:
            if not self.client.is_over(order.generation):
                self.client.send(PeerFailed(generation=order.generation, peer=error.peer, error=str(error)))
        except StateDiffersError as error:
            assert self._committer is not None
            self.client.send(
                StateDiffers(
                    generation=order.generation,
                    step=self._committer.committed,
                    checksums=tuple((layer, tuple(each.items())) for layer, each in error.checksums.items()),
                )
            )
            self._committer.drop()
        except BadStepError:  # the coordinator knows, and has all return to a checkpoint
            assert self._committer is not None
            self._committer.drop()
        finally:
            self._activity.idle("between generations")
            if self._committer is not None and self._committer.state is not None:
                self._committer.state.in_flight.clear()
            self._preparations.trained()
            if self._migration is not None:
                self._migration.close(interrupt=outcome is not Outcome.SWITCH)
                self._migration = None
            self.client.leave(order.generation)
            self._transfer.end()
            if outcome is Outcome.SWITCH:
                self._former.append(communicators)
            else:
                communicators.close()
        return self._next(generation) if outcome is Outcome.SWITCH else None

    def _next(self, generation: Generation) -> Generation | None:
        """Return the generation that follows after a switch; if this rank is not in it, become a spare."""
        assert self._committer is not None
        # The vote may have been quicker than the message.
        while self.client.switch_to <= generation.number:
            if self.client.is_over(generation.number):
                return None
            time.sleep(_POLL_S)
        following = self._preparations.take(self.client.switch_to)
        if following is not None:
            following.begin_at(self._committer.committed)
            self.faults.at("switch", self._committer.committed)
        elif not self.client.is_over(generation.number):
            self._placed = self.client.switch_to
            self._held = self._committer = None
        return following

    def _close_former(self) -> None:
        """Close the communicators of generations that all ranks have left."""
        while self._former:
            self._former.pop().close()

    # --- the state in which a generation begins ----------------------------------------------------------------------

    def _prepare(self, generation: Generation) -> None:
        """Bring the held state to the beginning of the first step, or of a transition to it.

        Raises CheckpointError if the layers cannot be read from the checkpoint that it begins with.
        """
        order, transition = generation.order, generation.order.transition
        if order.rest is None and self._committer is not None:
            self._committer.state = None  # before anything else takes memory
        if transition is None and not generation.is_open:
            self._allocator.drop()  # a generation that is open follows by a switch, and a later one may be prepared
        begins_anew = not (generation.layers if transition is None else transition.keep)
        if order.load != "keep":
            self._load(generation)
        elif begins_anew:
            self._held = self._committer = None  # what it may hold is outdated
        else:
            self._catch_up(order)
        if transition is None:
            self._switch(generation)
            return
        # Hold until the switch only the layers that the transition keeps, and no gradients.
        if self._held is None:
            self._held = self._new_layers((), generation)
        self._held.keep_only(transition.keep)
        gathered = self._committer is None or self._committer.gathered
        self._committer = self._new_committer(self._held, order)
        self._committer.gathered = gathered
        self._held.drop_gradients()
        if not order.gather:
            self._transfer.begin(transition, self._held)

    def _report_unreadable(self, order: StartGeneration, error: CheckpointError) -> None:
        assert isinstance(order.load, int)
        is_damaged = isinstance(error, DamagedCheckpointError)
        generation, step = order.generation, order.load
        self.client.send(
            CheckpointUnreadable(generation=generation, step=step, error=str(error), is_damaged=is_damaged)
        )

    def _load(self, generation: Generation) -> None:
        """Load fresh weights or a checkpoint. Raises CheckpointError."""
        order, needed = generation.order, generation.layers
        self._held = self._committer = None  # before the new state takes memory
        with self._slow_io.waiting("loading layers", order.generation):
            if order.load == "initial":
                self._held = self._new_layers(needed, generation)
                return
            assert isinstance(order.load, int)
            self._held = self._new_layers((), generation)
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

    def _gather_again(self, generation: Generation) -> None:
        """Exchange updated parameters before anything else uses them, if a failure may have cut that short."""
        order, sharding = generation.order, generation.former_sharding
        if not order.gather or sharding is None:
            return
        assert self._held is not None
        assert self._committer is not None
        self._committer.gather = self._new_gather(sharding, generation)
        self._committer.gather_parameters(again=True)
        if order.transition is not None:
            self._transfer.begin(order.transition, self._held)

    def _new_gather(self, sharding: Sharding, generation: Generation) -> ParameterGather:
        assert self._held is not None
        shards = {layer: sharding.layers[layer] for layer in self._held.layers}
        return ParameterGather(self.worker, self._held, shards, generation.communicators)

    def _carry_out_transition(self, generation: Generation) -> None:
        """Send and receive layers while no rank trains, and switch to the new placement."""
        order, transition = generation.order, generation.order.transition
        assert self._held is not None
        assert transition is not None
        start = time.perf_counter()
        moves = generation.slice_moves
        moved_bytes = self._transfer.carry_out(
            transition, self._held, generation.communicators, step=order.first_step, slices=moves
        )
        transfer_s = time.perf_counter() - start
        self.faults.at("switch", order.first_step)
        self.client.send(Switched(generation=order.generation, moved_bytes=moved_bytes, transfer_s=transfer_s))
        self._switch(generation)

    def _switch(self, generation: Generation) -> None:
        """Switch to the placement of a generation: hold its layers and no others."""
        order, worker = generation.order, self.worker
        self._placed = order.generation
        if worker not in order.members:
            self._held = self._committer = None
            return
        held, needed = self._held, generation.layers
        if held is None and not needed:
            held = self._held = self._new_layers((), generation)
        if held is None or not held.layers >= needed:
            raise ControlError(f"worker {worker} is to keep layers that it does not hold: {sorted(needed)}")
        held.keep_only(needed)
        if generation.sharding is not None:
            held.own(generation.sharding.owned_by(worker), self._transfer.take_slices())
        if self._committer is None or order.load != "keep" or order.transition is not None:
            self._committer = self._new_committer(held, order)
        self._committer.reduced = False
        self._committer.buffers.regroup(held, generation.segments)
        self._committer.gather = None

    def _corrupt(self) -> None:
        """Flip a random bit of the state that other holders have, too, as a fault of the memory would."""
        if self._held is not None:
            states = {
                layer: {**self._held.replicated_state_of(layer), **self._held.owned_state_of(layer)}
                for layer in sorted(self._held.layers)
            }
            print(f"a fault was injected: {flip_random_bit(states)}", file=sys.stderr, flush=True)

    def _spoil(self) -> None:
        """Make an element of a gradient not a number, as a fault of the processor would."""
        if self._committer is not None and (
            gradients := self._committer.buffers.of(self._committer.buffers.segments[0])
        ):
            gradients[0][0] = math.nan

    def _new_layers(self, layers: set[int] | tuple[()], generation: Generation) -> HeldLayers:
        held = HeldLayers(self.job, layers, seed=self.config.seed, device=self.device, boundaries=self.boundaries)
        if (sharding := generation.former_sharding) is not None:
            held.own(sharding.owned_by(self.worker))
        return held

    def _new_committer(self, held: HeldLayers, order: StartGeneration) -> Committer:
        """Return one that has applied the steps before the first of the order, and has no gradients yet."""
        before = self._committer
        return Committer(
            worker=self.worker,
            held=held,
            buffers=GradientBuffers(held, ()),
            contributions=self.config.batch.micro_batches * self.job.num_layers,
            clip_norm=self.job.clip_norm,
            committed=order.first_step,
            activity=self._activity,
            faults=self.faults,
            recent=RecentSteps(self.config.health.spike_factor) if before is None else before.recent,
            last_vote=before.last_vote if before is not None and before.committed == order.first_step else None,
        )

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
        assert self._held is not None
        migration = self._migration = LayerMigration(
            self.worker,
            held=self._held,
            buffers=committer.buffers,
            communicators=communicators,
            device=self.device,
            faults=self.faults,
            committed=committer.committed,
            step_s=committer.step_s,
            rest_s=None if order.rest is None else order.rest.rest_s,
            stand_in_scale=self.stand_in_scale,
            is_ending=partial(self._is_ending, generation.number, committer),
        )
        if generation.sharding is not None:
            committer.gather = self._new_gather(generation.sharding, generation)
        self._preparations.training(generation.number, self._held, committer.buffers, migration)
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
        steps = StepLoop(
            worker=self.worker,
            config=self.config,
            client=self.client,
            generation=generation,
            committer=committer,
            executor=executor,
            migration=migration,
            check=StateCheck(
                self.worker, self._held, generation.segments, device=self.device, sharding=generation.sharding
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
            with self._slow_io.waiting("writing the last checkpoint", order.generation):
                written = self._writer.join(unless=lambda: self.client.is_over(order.generation))
            if written:
                self.client.send(Finished(generation=order.generation))
        return outcome
