"""The state of a rank, from generation to generation: its layers, and the steps applied to them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ControlError
from chameleon_ft.models.optimizer import ModelOptimizer
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.protocol.messages import Quiesced, Switched
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.recovery.transition import TransitionOrders
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import checkpoint_storage
from chameleon_ft.worker.checkpoint import read_layer
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.control_client import ControlClient, SlowIOReporter
from chameleon_ft.worker.execution.bad_steps import RecentSteps
from chameleon_ft.worker.execution.commit import Committer
from chameleon_ft.worker.execution.gather import ParameterExchange
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.fault_injection import flip_random_bit
from chameleon_ft.worker.generation import Generation
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.snapshots import RestoredLayers, SnapshotStore, rebuild
from chameleon_ft.worker.state_transfer.layer_messages import LayerAllocator
from chameleon_ft.worker.state_transfer.transfer import StateTransfer


class RankState:
    """The layers of a rank and their committer, brought to the state in which a generation begins.

    Attributes:
        committer: It has the layers; None while there is no state that counts.
        placed: The generation whose placement the rank has switched to.
        spec: The whole of that generation, if the orders had it.
        checkpoints: The checkpoints of the run. An object store that does not answer is waited for, because nothing can
            be trained without them.
        allocator: It allocates layers that will arrive.
        transfer: It moves layers while no rank trains.
        slow_io: It reports reads and writes of layers that take long.
        snapshots: Snapshots of this rank's layers, and backups of others'.
    """

    def __init__(self, rank: RankContext, config: RunConfig, run: RunDirectory, client: ControlClient) -> None:
        self._rank = rank
        self._config = config
        self._client = client
        # Made here, because no other worker waits yet.
        self._optimizer = ModelOptimizer(rank.job)
        self.committer: Committer | None = None
        self.placed = 0
        self.spec = ""
        self.checkpoints = checkpoint_storage(config, run, gives_up=False)
        self.snapshots = SnapshotStore(pins_memory=rank.device.type == "cuda")
        self.allocator = LayerAllocator(
            rank.job,
            seed=config.seed,
            device=rank.device,
            # The stand-ins of an emulated device are too small to be worth preallocating.
            ahead=rank.stand_in_scale is None,
            is_divided=config.parallel.owners is not None,
        )
        self.transfer = StateTransfer(rank, self.allocator)
        self.slow_io = SlowIOReporter(rank.activity, client.send)
        rank.faults.corrupt, rank.faults.spoil = self._flip_bit, self._write_nan

    @property
    def trained(self) -> Committer:
        """The committer, in a generation in which the rank has layers."""
        assert self.committer is not None
        return self.committer

    def drop(self) -> None:
        """Release all layers."""
        self.committer = None

    def report(self, generation: int) -> Quiesced:
        """Return the state after `generation`, from which another one may begin."""
        if (committer := self.committer) is None:
            return Quiesced(
                generation=generation,
                committed=0,
                reduced=False,
                last_vote=None,
                placed=self.placed,
                layers=(),
                spec=self.spec,
            )
        return Quiesced(
            generation=generation,
            committed=committer.committed,
            reduced=committer.reduced,
            last_vote=committer.last_vote,
            placed=self.placed,
            layers=tuple(sorted(committer.held.layers)),
            progress=committer.progress(),
            gathered=not committer.missing,
            spec=self.spec,
        )

    def prepare(self, generation: Generation) -> None:
        """Bring the held state to the beginning of the first step, or of a transition to it.

        Raises CheckpointError if the layers cannot be read from the checkpoint that it begins with.
        """
        order, transition = generation.order, generation.order.transition
        if order.rest is None and self.committer is not None:
            # Before anything else takes memory.
            self.committer.state = None
        if transition is None and not generation.is_open:
            # A generation that is open follows by a switch, and a later one may be prepared.
            self.allocator.drop()
        held: HeldLayers | None = None
        if order.load not in ("keep", "snapshot"):
            held = self._load(generation)
        elif order.load == "snapshot" or not (generation.order.layers if transition is None else transition.keep):
            # Its state is outdated, or `restore` follows.
            self.drop()
        elif self.committer is not None:
            self._catch_up(self.committer, order)
            held = self.committer.held
        if transition is None:
            self._switch(generation, held)
            return
        # Hold until the switch only the layers that the transition keeps, and no gradients.
        held = held or self._new_layers((), generation)
        if order.load != "snapshot":
            held.keep_only(transition.keep)
        missing = frozenset[int]() if self.committer is None else self.committer.missing
        self.committer = self._new_committer(held, order)
        self.committer.missing = missing & held.layers
        held.drop_gradients()
        if not order.gather and order.load != "snapshot":
            self.transfer.begin(transition, held)

    def _load(self, generation: Generation) -> HeldLayers:
        """Load fresh weights or a checkpoint. Raises CheckpointError."""
        order, needed = generation.order, generation.order.layers
        self.drop()
        with self.slow_io.waiting("loading layers", order.generation):
            if order.load == "initial":
                return self._new_layers(needed, generation)
            assert isinstance(order.load, int)
            held = self._new_layers((), generation)
            for layer in sorted(needed):
                held.take_in(layer, read_layer(self.checkpoints, order.load, layer))
            return held

    def _catch_up(self, committer: Committer, order: WorkerOrders) -> None:
        """Apply the step before `order.first_step`, if this rank has not, from the gradient of its old placement."""
        if committer.committed >= order.first_step:
            return
        if order.roll_forward is None or not committer.reduced or committer.committed + 1 < order.first_step:
            raise ControlError(
                f"worker {self._rank.worker} has applied {committer.committed} steps and cannot continue with "
                f"step {order.first_step}"
            )
        committer.apply(order.roll_forward)

    def restore(self, generation: Generation) -> None:
        """Go back to a snapshot, if the generation begins with one: hold all layers that its transition keeps.

        Raises CheckpointError if this rank's part of the snapshot is damaged.
        """
        order, transition, rank = generation.order, generation.order.transition, self._rank
        if order.load != "snapshot" or transition is None:
            return
        held, blocks = self.trained.held, self.snapshots.blocks(order.first_step)
        with rank.activity.waiting("the parts of a snapshot", for_message=True):
            made = rebuild(rank.worker, order.rebuilt, blocks, generation.communicators, scale=rank.stand_in_scale or 1)
        # This may take long without being a hang.
        rank.activity.idle("restoring layers from a snapshot")
        restored = RestoredLayers.of(transition.keep, blocks, made, rank.device)
        for layer, state in restored.layers.items():
            held.take_in(layer, state)
        for layer, state in restored.slices.items():
            held.restore_slices(layer, state)
        self.transfer.begin(transition, held)

    def gather_again(self, generation: Generation, mover: Mover) -> None:
        """Exchange updated parameters before anything else uses them, if a failure may have cut that short."""
        order, sharding = generation.order, generation.order.former_sharding
        if not order.gather or sharding is None:
            return
        committer = self.trained
        committer.gather = self.new_gather(sharding, mover, again=True)
        committer.begin_exchange(again=True)
        with self._rank.activity.waiting("parameters", for_message=True):
            committer.wait_for_exchange()
        committer.missing = frozenset()
        if order.transition is not None:
            self.transfer.begin(order.transition, committer.held)

    def new_gather(self, sharding: Sharding, mover: Mover, *, again: bool = False) -> ParameterExchange:
        """Return the exchange of this rank's layers after an update; see `ParameterExchange.of`."""
        held = self.trained.held
        shards = {layer: sharding.layers[layer] for layer in held.layers}
        return ParameterExchange.of(self._rank.worker, held, shards, mover, again=again)

    def carry_out_transition(self, generation: Generation, transition: TransitionOrders) -> None:
        """Send and receive layers while no rank trains, and switch to the new placement."""
        order, held = generation.order, self.trained.held
        start = time.perf_counter()
        moved_bytes = self.transfer.carry_out(
            transition, held, generation.communicators, step=order.first_step, slices=generation.order.slice_moves
        )
        transfer_s = time.perf_counter() - start
        self._rank.faults.at("switch", order.first_step)
        self._client.send(Switched(generation=order.generation, moved_bytes=moved_bytes, transfer_s=transfer_s))
        self._switch(generation, held)

    def _switch(self, generation: Generation, held: HeldLayers | None) -> None:
        """Switch to the placement of a generation: hold its layers and no others."""
        order, worker, needed = generation.order, self._rank.worker, generation.order.layers
        self.placed, self.spec = order.generation, order.spec
        if worker not in order.members:
            self.drop()
            return
        if held is None and not needed:
            held = self._new_layers((), generation)
        if held is None or not held.layers >= needed:
            raise ControlError(f"worker {worker} is to keep layers that it does not hold: {sorted(needed)}")
        held.keep_only(needed)
        if generation.order.sharding is not None:
            held.own(generation.order.sharding.owned_by(worker), self.transfer.take_slices())
        if self.committer is None or order.load != "keep" or order.transition is not None:
            self.committer = self._new_committer(held, order)
        self.committer.reduced = False
        self.committer.buffers.regroup(held, generation.order.segments)
        self.committer.gather = None

    def _flip_bit(self) -> None:
        """Flip a random bit of the state that other holders have, too, as a fault of the memory would."""
        if self.committer is not None:
            held = self.committer.held
            states = {
                layer: {**held.replicated_state_of(layer), **held.owned_state_of(layer)}
                for layer in sorted(held.layers)
            }
            print(f"a fault was injected: {flip_random_bit(states)}", file=sys.stderr, flush=True)

    def _write_nan(self) -> None:
        """Make an element of a gradient not a number, as a fault of the processor would."""
        if self.committer is not None and (gradients := self.committer.buffers.of(self.committer.buffers.segments[0])):
            gradients[0][0] = math.nan

    def _new_layers(self, layers: Collection[int], generation: Generation) -> HeldLayers:
        rank, sharding = self._rank, generation.order.former_sharding
        return HeldLayers(
            rank.job,
            layers,
            seed=self._config.seed,
            device=rank.device,
            boundaries=rank.boundaries,
            owned=None if sharding is None else sharding.owned_by(rank.worker),
            optimizer=self._optimizer,
        )

    def _new_committer(self, held: HeldLayers, order: WorkerOrders) -> Committer:
        """Return one that has applied the steps before the first of the order, and has no gradients yet."""
        rank, before, batch = self._rank, self.committer, self._config.batch
        return Committer(
            rank=rank,
            held=held,
            buffers=GradientBuffers(held, ()),
            contributions=lambda step: batch.micro_batches_at(step) * rank.job.num_layers,
            committed=order.first_step,
            recent=RecentSteps(self._config.health.spike_factor) if before is None else before.recent,
            last_vote=before.last_vote if before is not None and before.committed == order.first_step else None,
        )
