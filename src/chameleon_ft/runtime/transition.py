"""A rank's part in a change of placement: layers come and go, and all confirm it; see docs/transition.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import torch

from chameleon_ft.control.wire.messages import Transition
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import Channel, CommunicationError, Communicators
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.layer_messages import (
    IncomingLayers,
    OutgoingLayer,
    OutgoingLayers,
    layer_checksums,
    tensor_bytes,
)
from chameleon_ft.runtime.layers import HeldLayers
from chameleon_ft.runtime.preallocation import Allocation, LayerAllocator

__all__ = ["Mover", "channels_of_transition"]

_Move = tuple[int, int, int, int, int]  # (round, source, destination, layer, bytes)


class Mover:
    """Carries out transitions. What needs no communicators is begun before they stand.

    Args:
        worker: this rank's worker.
        device: where its layers are.
        allocator: for layers that come.
        stand_ins: whether they stand for those of a profile, whose bytes are counted then.
    """

    def __init__(
        self,
        worker: int,
        device: torch.device,
        *,
        allocator: LayerAllocator,
        activity: Activity,
        faults: FaultInjector,
        stand_ins: bool = False,
    ) -> None:
        self._worker = worker
        self._device = device
        self._allocator = allocator
        self._stand_ins = stand_ins
        self._activity = activity
        self._faults = faults
        self._checking = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._leaving: dict[int, OutgoingLayer] = {}

    def begin(self, transition: Transition, held: HeldLayers) -> None:
        """Begin to make room for what comes, and to take the checksums of what goes, which must not change any more."""
        self._allocator.preallocate(
            {layer: num_bytes for *_, to, layer, num_bytes in transition.moves if to == self._worker}
        )
        for _, source, _, layer, num_bytes in transition.moves:
            if source == self._worker and layer not in self._leaving:
                state = held.state_of(layer)
                checksums = self._checking.submit(layer_checksums, state, self._device)
                self._leaving[layer] = OutgoingLayer(state, num_bytes, checksums)

    def end(self) -> None:
        """Let go of what was begun and has not been used."""
        self._allocator.drop()
        for layer in self._leaving.values():
            layer.checksums.cancel()
        self._leaving.clear()

    def carry_out(self, transition: Transition, held: HeldLayers, communicators: Communicators, *, step: int) -> int:
        """Send and receive layers, and return once all participants have confirmed that they hold their part.

        `begin` comes first. What arrives is taken into `held`; nothing is dropped.

        Args:
            step: the step that comes next.

        Returns:
            Bytes that all workers together have received.

        Raises:
            CommunicationError: the generation has ended, or a layer has arrived damaged. Nobody has switched because
                of this worker; whether anybody has, the coordinator finds out.
        """
        received = self._move(transition.moves, held, communicators, step)
        self.end()
        return self._confirm(received, transition.participants, communicators, step)

    def _move(self, moves: Sequence[_Move], held: HeldLayers, communicators: Communicators, step: int) -> int:
        """Go through the rounds. In each, layers go out and come in one by one and side by side.

        The layer after the one that is waited for is under way already. Everybody starts its n-th layers, out and in,
        only when it is through with those before the last, and before it waits for any after these: so there is always
        somebody who can go on.
        """
        rounds = [self._exchange(list(own), held, communicators) for _, own in groupby(moves, key=lambda move: move[0])]
        number_of_slots = sum(exchange.slots for exchange in rounds)
        number = received = 0
        for exchange in rounds:
            self._activity.begin("transfer")
            exchange.begin()
            for _ in range(exchange.slots):
                self._activity.begin("transfer")
                if number == number_of_slots // 2:
                    self._faults.at("transfer", step)
                received += exchange.slot()
                number += 1
        if not rounds:
            self._faults.at("transfer", step)
        return received

    def _exchange(self, moves: Sequence[_Move], held: HeldLayers, communicators: Communicators) -> _Exchange:
        return _Exchange(
            outgoing=[move for move in moves if move[1] == self._worker],
            incoming=[move for move in moves if move[2] == self._worker],
            leaving=self._leaving,
            held=held,
            communicators=communicators,
            device=self._device,
            allocator=self._allocator,
            activity=self._activity,
            stand_ins=self._stand_ins,
        )

    def _confirm(self, received: int, participants: tuple[int, ...], communicators: Communicators, step: int) -> int:
        ballot = torch.tensor([float(received), 1.0], dtype=torch.float64)
        if len(participants) > 1:
            result = communicators.vote(ballot, participants)
            self._faults.at("confirm", step)
            with self._activity.waiting("confirmation"):
                result.wait()
        moved, confirmed = map(float, ballot)
        if round(confirmed) != len(participants):
            raise CommunicationError(None, f"the confirmation counted {confirmed:g} of {len(participants)} workers")
        return round(moved)


class _Exchange:
    """A worker's part in a round: layers to one other, from one other, or both."""

    def __init__(
        self,
        *,
        outgoing: Sequence[_Move],
        incoming: Sequence[_Move],
        leaving: Mapping[int, OutgoingLayer],
        held: HeldLayers,
        communicators: Communicators,
        device: torch.device,
        allocator: LayerAllocator,
        activity: Activity,
        stand_ins: bool,
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._leaving = leaving
        self._held = held
        self._communicators = communicators
        self._device = device
        self._allocator = allocator
        self._activity = activity
        self._stand_ins = stand_ins
        self._out: OutgoingLayers | None = None
        self._in: IncomingLayers | None = None
        self._under_way: deque[Allocation] = deque()
        self._slot = 0
        self.slots = max(len(outgoing), len(incoming))
        """Layers that go out or come in, those counted once that do at the same time."""

    def begin(self) -> None:
        """Exchange descriptions and start the first layers. Raises CommunicationError."""
        if self._outgoing:
            _, _, destination, first, _ = self._outgoing[0]
            layers = [self._leaving[move[3]] for move in self._outgoing]
            self._out = OutgoingLayers(
                layers, self._communicators, peer=destination, tag=_tag(first), device=self._device
            )
        if self._incoming:
            _, source, _, first, _ = self._incoming[0]
            self._in = IncomingLayers(self._communicators, peer=source, tag=_tag(first), device=self._device)
            with self._activity.waiting(f"what worker {source} sends"):
                self._in.describe()
        self._start(0)

    def slot(self) -> int:
        """Go through one layer out and one in, as far as there are, and start the next; return the bytes received.

        Raises:
            CommunicationError: the other end is gone, or a layer has arrived damaged.
        """
        index, self._slot = self._slot, self._slot + 1
        self._start(index + 1)
        received = 0
        if self._in is not None and index < len(self._incoming):
            received = self._take_in(self._in, self._incoming[index])
        if self._out is not None and index < len(self._outgoing):
            with self._activity.waiting("transfer"):
                self._out.finish_next()
        return received

    def _start(self, index: int) -> None:
        """Start receiving before sending: what is sent is checked meanwhile."""
        if self._in is not None and index < len(self._incoming):
            room = self._allocator.take(self._incoming[index][3])
            self._under_way.append(room)
            parameters = {f"module/{name}": value for name, value in room.module.state_dict().items()}
            self._in.start_next(parameters, room.memory)
        if self._out is not None:
            self._out.start_next()

    def _take_in(self, incoming: IncomingLayers, move: _Move) -> int:
        _, source, _, layer, num_bytes = move
        with self._activity.waiting(f"layer {layer} of worker {source}"):
            state = incoming.finish_next()
        self._held.take_in(layer, state, self._under_way.popleft().module)
        return num_bytes if self._stand_ins else tensor_bytes(state)


def channels_of_transition(transition: Transition) -> tuple[Channel, ...]:
    """The channels that a worker's part in a transition needs, each once, in order."""
    return tuple(sorted({Channel(source, destination, True) for _, source, destination, _, _ in transition.moves}))


def _tag(layer: int) -> int:
    return 2 * layer
