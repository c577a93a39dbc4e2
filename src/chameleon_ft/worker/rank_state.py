"""The state that a rank trains, from generation to generation: its layers, and the steps applied to them."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ControlError
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.models.optimizer import ModelOptimizer
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.protocol.messages import Quiesced, StartGeneration, Switched
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.run_storage import checkpoint_storage
from chameleon_ft.storage.stores import Storage
from chameleon_ft.worker.checkpoint import read_layer
from chameleon_ft.worker.control_client import ControlClient, SlowIOReporter
from chameleon_ft.worker.execution.bad_steps import RecentSteps
from chameleon_ft.worker.execution.commit import Committer
from chameleon_ft.worker.execution.gather import ParameterExchange
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.fault_injection import FaultInjector, flip_random_bit
from chameleon_ft.worker.generation import Generation
from chameleon_ft.worker.snapshots.store import SnapshotStore
from chameleon_ft.worker.snapshots.taker import RestoredLayers, rebuild
from chameleon_ft.worker.state_transfer.layer_messages import LayerAllocator
from chameleon_ft.worker.state_transfer.transfer import StateTransfer


@dataclass(kw_only=True)
class RankState:
    """The layers of a rank and their committer, brought to the state in which a generation begins.

    Attributes:
        stand_in_scale: how many bytes of the model a byte stands for, if the layers are the stand-ins of an emulated
            device; otherwise None.
        held: the layers; None while there is no state that counts.
        committer: None as long as the rank takes part in no generation.
        placed: the generation whose placement it has switched to.
        plan: the whole plan of that generation, if the orders had it.
        checkpoints: of the run.
        allocator: of layers that will arrive.
        transfer: moves layers while no rank trains.
        slow_io: reports reads and writes of layers that take long.
        snapshots: of this rank's layers, and backups of others'.
    """

    worker: int
    config: RunConfig
    run: RunDirectory
    job: Job
    boundaries: tuple[BoundarySpec, ...]
    device: torch.device
    stand_in_scale: int | None
    client: ControlClient
    faults: FaultInjector
    held: HeldLayers | None = None
    committer: Committer | None = None
    placed: int = 0
    plan: str = ""
    checkpoints: Storage = field(init=False)
    allocator: LayerAllocator = field(init=False)
    transfer: StateTransfer = field(init=False)
    snapshots: SnapshotStore = field(init=False)

    def __post_init__(self) -> None:
        # Nothing can be trained without this state, so an object store that does not answer is waited for.
        self.checkpoints = checkpoint_storage(self.config, self.run, gives_up=False)
        self._optimizer = ModelOptimizer(self.job)  # here, because no other worker waits yet
        is_emulated = self.stand_in_scale is not None
        self.snapshots = SnapshotStore(pins_memory=self.device.type == "cuda")
        # The stand-ins of an emulated device are too small to be worth preallocating.
        self.allocator = LayerAllocator(
            self.job,
            seed=self.config.seed,
            device=self.device,
            ahead=not is_emulated,
            is_divided=self.config.parallel.owners is not None,
        )
        self.transfer = StateTransfer(
            self.worker,
            self.device,
            allocator=self.allocator,
            activity=self.client.activity,
            faults=self.faults,
            stand_ins=is_emulated,
        )
        self.slow_io = SlowIOReporter(self.client.activity, self.client.send)
        self.faults.corrupt, self.faults.spoil = self._flip_bit, self._write_nan

    def drop(self) -> None:
        """Release all layers."""
        self.held = self.committer = None

    def report(self, generation: int) -> Quiesced:
        """Return the state after `generation`, from which another one may begin."""
        committer = self.committer
        return Quiesced(
            generation=generation,
            committed=0 if committer is None else committer.committed,
            reduced=committer is not None and committer.reduced,
            last_vote=None if committer is None else committer.last_vote,
            placed=self.placed,
            layers=() if self.held is None else tuple(sorted(self.held.layers)),
            progress=None if committer is None else committer.progress(),
            gathered=committer is None or not committer.missing,
            plan=self.plan,
        )

    def prepare(self, generation: Generation) -> None:
        """Bring the held state to the beginning of the first step, or of a transition to it.

        Raises CheckpointError if the layers cannot be read from the checkpoint that it begins with.
        """
        order, transition = generation.order, generation.order.transition
        if order.rest is None and self.committer is not None:
            self.committer.state = None  # before anything else takes memory
        if transition is None and not generation.is_open:
            self.allocator.drop()  # a generation that is open follows by a switch, and a later one may be prepared
        begins_anew = not (generation.layers if transition is None else transition.keep)
        if order.load == "snapshot":
            self.held = self.committer = None  # see `restore`
        elif order.load != "keep":
            self._load(generation)
        elif begins_anew:
            self.held = self.committer = None  # what it may hold is outdated
        else:
            self._catch_up(order)
        if transition is None:
            self._switch(generation)
            return
        # Hold until the switch only the layers that the transition keeps, and no gradients.
        if self.held is None:
            self.held = self._new_layers((), generation)
        if order.load != "snapshot":
            self.held.keep_only(transition.keep)
        missing = frozenset[int]() if self.committer is None else self.committer.missing
        self.committer = self._new_committer(self.held, order)
        self.committer.missing = missing & self.held.layers
        self.held.drop_gradients()
        if not order.gather and order.load != "snapshot":
            self.transfer.begin(transition, self.held)

    def _load(self, generation: Generation) -> None:
        """Load fresh weights or a checkpoint. Raises CheckpointError."""
        order, needed = generation.order, generation.layers
        self.held = self.committer = None  # before the new state takes memory
        with self.slow_io.waiting("loading layers", order.generation):
            if order.load == "initial":
                self.held = self._new_layers(needed, generation)
                return
            assert isinstance(order.load, int)
            self.held = self._new_layers((), generation)
            for layer in sorted(needed):
                self.held.take_in(layer, read_layer(self.checkpoints, order.load, layer))

    def _catch_up(self, order: StartGeneration) -> None:
        """Apply the step before `order.first_step`, if this rank has not, from the gradient of its old placement."""
        committer = self.committer
        if committer is None or committer.committed >= order.first_step:
            return
        if order.roll_forward is None or not committer.reduced or committer.committed + 1 < order.first_step:
            raise ControlError(
                f"worker {self.worker} has applied {committer.committed} steps and cannot continue with "
                f"step {order.first_step}"
            )
        committer.apply(order.roll_forward)

    def restore(self, generation: Generation) -> None:
        """Go back to a snapshot, if the generation begins with one: hold all layers that its transition keeps.

        Raises CheckpointError if this rank's part of the snapshot is damaged.
        """
        order, transition = generation.order, generation.order.transition
        if order.load != "snapshot":
            return
        assert self.held is not None
        assert transition is not None
        blocks = self.snapshots.blocks(order.first_step)
        with self.client.activity.waiting("the parts of a snapshot", for_message=True):
            made = rebuild(self.worker, order.rebuilt, blocks, generation.communicators, scale=self.stand_in_scale or 1)
        self.client.activity.idle("restoring layers from a snapshot")  # which may take long without being a hang
        restored = RestoredLayers.of(transition.keep, blocks, made, self.device)
        for layer, state in restored.layers.items():
            self.held.take_in(layer, state)
        for layer, state in restored.slices.items():
            self.held.restore_slices(layer, state)
        self.transfer.begin(transition, self.held)

    def gather_again(self, generation: Generation) -> None:
        """Exchange updated parameters before anything else uses them, if a failure may have cut that short."""
        order, sharding = generation.order, generation.former_sharding
        if not order.gather or sharding is None:
            return
        assert self.held is not None
        assert self.committer is not None
        self.committer.gather = self.new_gather(sharding, generation)
        self.committer.begin_exchange(again=True)
        with self.client.activity.waiting("parameters", for_message=True):
            self.committer.wait_for_exchange()
        self.committer.missing = frozenset()
        if order.transition is not None:
            self.transfer.begin(order.transition, self.held)

    def new_gather(self, sharding: Sharding, generation: Generation) -> ParameterExchange:
        assert self.held is not None
        shards = {layer: sharding.layers[layer] for layer in self.held.layers}
        return ParameterExchange.of(self.worker, self.held, shards, generation.communicators)

    def carry_out_transition(self, generation: Generation) -> None:
        """Send and receive layers while no rank trains, and switch to the new placement."""
        order, transition = generation.order, generation.order.transition
        assert self.held is not None
        assert transition is not None
        start = time.perf_counter()
        moves = generation.slice_moves
        moved_bytes = self.transfer.carry_out(
            transition, self.held, generation.communicators, step=order.first_step, slices=moves
        )
        transfer_s = time.perf_counter() - start
        self.faults.at("switch", order.first_step)
        self.client.send(Switched(generation=order.generation, moved_bytes=moved_bytes, transfer_s=transfer_s))
        self._switch(generation)

    def _switch(self, generation: Generation) -> None:
        """Switch to the placement of a generation: hold its layers and no others."""
        order, worker = generation.order, self.worker
        self.placed, self.plan = order.generation, order.plan
        if worker not in order.members:
            self.held = self.committer = None
            return
        held, needed = self.held, generation.layers
        if held is None and not needed:
            held = self.held = self._new_layers((), generation)
        if held is None or not held.layers >= needed:
            raise ControlError(f"worker {worker} is to keep layers that it does not hold: {sorted(needed)}")
        held.keep_only(needed)
        if generation.sharding is not None:
            held.own(generation.sharding.owned_by(worker), self.transfer.take_slices())
        if self.committer is None or order.load != "keep" or order.transition is not None:
            self.committer = self._new_committer(held, order)
        self.committer.reduced = False
        self.committer.buffers.regroup(held, generation.segments)
        self.committer.gather = None

    def _flip_bit(self) -> None:
        """Flip a random bit of the state that other holders have, too, as a fault of the memory would."""
        if self.held is not None:
            states = {
                layer: {**self.held.replicated_state_of(layer), **self.held.owned_state_of(layer)}
                for layer in sorted(self.held.layers)
            }
            print(f"a fault was injected: {flip_random_bit(states)}", file=sys.stderr, flush=True)

    def _write_nan(self) -> None:
        """Make an element of a gradient not a number, as a fault of the processor would."""
        if self.committer is not None and (gradients := self.committer.buffers.of(self.committer.buffers.segments[0])):
            gradients[0][0] = math.nan

    def _new_layers(self, layers: set[int] | tuple[()], generation: Generation) -> HeldLayers:
        sharding = generation.former_sharding
        return HeldLayers(
            self.job,
            layers,
            seed=self.config.seed,
            device=self.device,
            boundaries=self.boundaries,
            owned=None if sharding is None else sharding.owned_by(self.worker),
            optimizer=self._optimizer,
        )

    def _new_committer(self, held: HeldLayers, order: StartGeneration) -> Committer:
        """Return one that has applied the steps before the first of the order, and has no gradients yet."""
        before = self.committer
        return Committer(
            worker=self.worker,
            held=held,
            buffers=GradientBuffers(held, ()),
            contributions=self.config.batch.micro_batches * self.job.num_layers,
            clip_norm=self.job.clip_norm,
            committed=order.first_step,
            activity=self.client.activity,
            faults=self.faults,
            recent=RecentSteps(self.config.health.spike_factor) if before is None else before.recent,
            last_vote=before.last_vote if before is not None and before.committed == order.first_step else None,
        )
