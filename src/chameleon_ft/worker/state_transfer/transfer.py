"""A rank's part in a change of placement: it sends and receives layers, and all confirm; see docs/transition.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

import torch

from chameleon_ft.models.build import tensor_bytes
from chameleon_ft.plan.shards import SliceMove
from chameleon_ft.recovery.transition import LayerMove, TransitionOrders
from chameleon_ft.worker.communicators.base import CommunicationError, Communicators, Tag
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.execution.layers import HeldLayers, LayerState
from chameleon_ft.worker.state_transfer.layer_messages import (
    Allocation,
    IncomingLayers,
    LayerAllocator,
    OutgoingLayer,
    OutgoingLayers,
    layer_checksums,
    receive_state,
    send_state,
)


class StateTransfer:
    """Carries out transitions. Whatever needs no communicators begins before they are open."""

    def __init__(self, rank: RankContext, allocator: LayerAllocator) -> None:
        self.rank = rank
        self.allocator = allocator
        self.outgoing: dict[int, OutgoingLayer] = {}
        self._received_slices: dict[int, LayerState] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._checksums: list[Future[list[int]]] = []

    def begin(self, transition: TransitionOrders, held: HeldLayers) -> None:
        """Begin to allocate incoming layers, and to compute the checksums of outgoing ones, which must not change."""
        moves = transition.moves
        self.allocator.preallocate(
            {move.layer: move.num_bytes for move in moves if move.destination == self.rank.worker}
        )
        for move in moves:
            if move.source == self.rank.worker and move.layer not in self.outgoing:
                state = held.state_of(move.layer)
                self._checksums.append(self._thread.submit(layer_checksums, state, self.rank.device))
                self.outgoing[move.layer] = OutgoingLayer(state, move.num_bytes, self._checksums[-1].result)

    def end(self) -> None:
        """Release everything that was begun and has not been used."""
        self.allocator.drop()
        for checksums in self._checksums:
            checksums.cancel()
        self._checksums.clear()
        self.outgoing.clear()

    def take_slices(self) -> dict[int, LayerState]:
        """Return the slices of optimizer state that have been received since the last call, by layer."""
        slices, self._received_slices = self._received_slices, {}
        return slices

    def carry_out(
        self,
        transition: TransitionOrders,
        held: HeldLayers,
        communicators: Communicators,
        *,
        step: int,
        slices: Sequence[SliceMove] = (),
    ) -> int:
        """Send and receive layers and slices, and return once all participants have confirmed. Call `begin` first.

        Received layers are added to `held`, and slices are kept for `take_slices`; nothing is dropped.

        Args:
            step: The step that comes next.
            slices: The slices of the optimizer's state that move between all participants.

        Returns:
            Bytes that all workers together have received.

        Raises:
            CommunicationError: the generation has ended, or a layer has arrived damaged. No worker has switched because
                of this one; the coordinator finds out whether any has.
        """
        self._received_slices = {}
        received = self._move(transition.moves, held, communicators, step)
        received += self._move_slices(slices, held, communicators)
        self.end()
        ballot = torch.tensor([float(received), 1.0], dtype=torch.float64)
        participants = transition.participants
        if len(participants) > 1:
            result = communicators.vote(ballot, participants)
            self.rank.faults.at("confirm", step)
            with self.rank.activity.waiting("confirmation", for_message=True):
                result.wait()
        moved, confirmed = map(float, ballot)
        if round(confirmed) != len(participants):
            raise CommunicationError(None, f"the confirmation counted {confirmed:g} of {len(participants)} workers")
        return round(moved)

    def _move(self, moves: Sequence[LayerMove], held: HeldLayers, communicators: Communicators, step: int) -> int:
        """Go through the rounds. In each, layers go out and come in one by one and side by side.

        The layer after the one that is waited for is in flight already. Each worker starts its n-th layers, out and in,
        only after those before the last have finished, and before it waits for any later one. So some worker can always
        continue.
        """
        rounds = [
            _Exchange(self, list(own), held, communicators) for _, own in groupby(moves, key=lambda move: move.round)
        ]
        fault_at = sum(exchange.slots for exchange in rounds) // 2
        number = received = 0
        for exchange in rounds:
            self.rank.activity.begin("transfer")
            exchange.begin()
            for slot in range(exchange.slots):
                self.rank.activity.begin("transfer")
                if number == fault_at:
                    self.rank.faults.at("transfer", step)
                received += exchange.finish(slot)
                number += 1
        if not rounds:
            self.rank.faults.at("transfer", step)
        return received

    def _move_slices(self, moves: Sequence[SliceMove], held: HeldLayers, communicators: Communicators) -> int:
        """Send slices to all other workers, then receive from each; return the bytes received."""
        activity, worker, device = self.rank.activity, self.rank.worker, self.rank.device
        activity.begin("transfer of slices")
        sending: list[OutgoingLayers] = []
        for move in moves:
            if move.source == worker:
                state = held.state_of_slice(move.layer, (move.start, move.stop))
                to, num_bytes = move.destination, tensor_bytes(state)
                sending.append(
                    send_state(state, communicators, peer=to, tag=Tag.SLICE, device=device, num_bytes=num_bytes)
                )
        received = 0
        for move in moves:
            if move.destination == worker:
                with activity.waiting(f"slices of worker {move.source}", for_message=True, peer=move.source):
                    state = receive_state(communicators, peer=move.source, tag=Tag.SLICE, device=device, targets={})
                self._received_slices.setdefault(move.layer, {}).update(state)
                received += tensor_bytes(state)
        with activity.waiting("transfer of slices", for_message=True):
            for outgoing in sending:
                outgoing.finish_next()
        return received


class _Exchange:
    """A worker's part in a round: layers to one other worker, from one other, or both.

    `slots` counts the layers that go out or come in, a pair that does so at the same time once.
    """

    def __init__(
        self, transfer: StateTransfer, moves: Sequence[LayerMove], held: HeldLayers, communicators: Communicators
    ) -> None:
        self._transfer = transfer
        self._outgoing = [move for move in moves if move.source == transfer.rank.worker]
        self._incoming = [move for move in moves if move.destination == transfer.rank.worker]
        self._held = held
        self._communicators = communicators
        self._out: OutgoingLayers | None = None
        self._in: IncomingLayers | None = None
        self._arriving: deque[Allocation] = deque()
        self.slots = max(len(self._outgoing), len(self._incoming))

    def begin(self) -> None:
        """Exchange descriptions and start the first layers. Raises CommunicationError."""
        communicators, device = self._communicators, self._transfer.rank.device
        if self._outgoing:
            first = self._outgoing[0]
            layers = [self._transfer.outgoing[move.layer] for move in self._outgoing]
            self._out = OutgoingLayers(layers, communicators, peer=first.destination, tag=Tag.LAYER, device=device)
        if self._incoming:
            first = self._incoming[0]
            self._in = IncomingLayers(communicators, peer=first.source, tag=Tag.LAYER, device=device)
            with self._transfer.rank.activity.waiting(
                f"the layers of worker {first.source}", for_message=True, peer=first.source
            ):
                self._in.describe()
        self._start(0)

    def finish(self, slot: int) -> int:
        """Start the layers of the next slot and finish those of this one; return the bytes received.

        Raises:
            CommunicationError: the other end is gone, or a layer has arrived damaged.
        """
        self._start(slot + 1)
        received = 0
        if self._in is not None and slot < len(self._incoming):
            move = self._incoming[slot]
            with self._transfer.rank.activity.waiting(
                f"layer {move.layer} of worker {move.source}", for_message=True, peer=move.source
            ):
                state = self._in.finish_next()
            self._held.take_in(move.layer, state, self._arriving.popleft().layer)
            received = tensor_bytes(state) if self._transfer.rank.stand_in_scale is None else move.num_bytes
        if self._out is not None and slot < len(self._outgoing):
            with self._transfer.rank.activity.waiting("transfer", for_message=True):
                self._out.finish_next()
        return received

    def _start(self, slot: int) -> None:
        """Start receiving before sending: sending waits for checksums."""
        if self._in is not None and slot < len(self._incoming):
            allocation = self._transfer.allocator.take(self._incoming[slot].layer)
            self._arriving.append(allocation)
            self._in.start_next(allocation.layer.targets, allocation.memory)
        if self._out is not None:
            self._out.start_next()
