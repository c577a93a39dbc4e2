"""The exchange of updated parameters: owners of slices send them to the holders of a layer that do not own them.

It runs beside the following step, whose first forwards wait for their layers alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.plan.shards import LayerShards
from chameleon_ft.worker.communicators.base import InFlight, Tag
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.mover import Mover

_MESSAGE_BYTES: Final = 4 << 20
# Messages to each worker, and from it.
_IN_FLIGHT: Final = 2

_Pieces = Sequence[tuple[int, Tensor]]
"""Layers and elements of their parameters, in place."""
_Round = tuple[list[tuple[InFlight, Tensor, _Pieces]], list[tuple[InFlight, Tensor]]]
"""Messages that arrive, with the memory that they fill, and those that are sent."""


class ParameterExchange:
    """Messages with elements of parameters to other workers and from them, step after step.

    All messages from one worker to another are joined into few, lower layers first, and go out in rounds: of each round
    one message to every worker. Few rounds are in flight at a time. Any thread may wait for layers; the first that does
    takes in what arrives, in turn with the others, and begins further rounds. If there are more rounds than may be in
    flight, a task of the mover waits, too; otherwise it would only wait for a processor, and all others for its
    messages. All workers have the same order of rounds, so the slowest can always continue.

    Args:
        to: worker -> the elements that are sent to it, in place.
        origin: worker -> the elements that arrive from it, in the same order.
        layers: The exchange completes these layers; others are none of its concern.
    """

    def __init__(
        self, to: Mapping[int, _Pieces], origin: Mapping[int, _Pieces], mover: Mover, *, layers: Iterable[int], tag: int
    ) -> None:
        self._mover = mover
        self._tag = tag
        self._to = {peer: _messages_of(pieces) for peer, pieces in sorted(to.items()) if pieces}
        self._from = {peer: _messages_of(pieces) for peer, pieces in sorted(origin.items()) if pieces}
        self._rounds = max(map(len, chain(self._to.values(), self._from.values())), default=0)
        self._rounds_of = dict.fromkeys(layers, 0)
        for messages in self._from.values():
            for number, message in enumerate(messages, 1):
                for layer, _ in message:
                    self._rounds_of[layer] = max(self._rounds_of[layer], number)
        self._keeps: Collection[int] | None = None
        self._begun = self._ended = self._rounds
        self._arrived = 0
        self._in_flight: deque[_Round] = deque()
        # Whether some thread takes in the oldest round in flight; only that one touches it.
        self._is_taking = False

    @classmethod
    def of(
        cls, worker: int, held: HeldLayers, shards: Mapping[int, LayerShards], mover: Mover, *, again: bool = False
    ) -> ParameterExchange:
        """Return a worker's part after an update: owners of a slice send, holders that do not own it receive.

        Args:
            shards: layer -> its slices, of layers that have other holders, too.
            again: whether a failure may have cut this short before.
        """
        to: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        origin: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for layer, own in sorted(shards.items()):
            if worker not in own.holders:
                continue
            for part, receivers in zip(own.slices, own.receivers(), strict=True):
                pieces = [(layer, view) for view in held.views_of_slice(layer, (part.start, part.stop))]
                for sender, others in receivers.items():
                    if sender == worker:
                        for receiver in others:
                            to[receiver] += pieces
                    elif worker in others:
                        origin[sender] += pieces
        return cls(to, origin, mover, layers=shards, tag=Tag.PARAMETERS_AGAIN if again else Tag.UPDATED_PARAMETERS)

    def restart(self) -> None:
        """Note that parameters are updated, and have to be exchanged again."""
        self._arrived = 0

    @property
    def complete(self) -> frozenset[int]:
        """The layers of which all elements have arrived."""
        return frozenset(layer for layer, rounds in self._rounds_of.items() if rounds <= self._arrived)

    def run(self, keeps: Collection[int] | None = None) -> None:
        """Begin, and wait for all; see both."""
        self.begin(keeps)
        self.wait()

    def begin(self, keeps: Collection[int] | None = None) -> None:
        """Begin to send and to receive. Raises CommunicationError.

        Args:
            keeps: layers of which what arrives is kept; None: of all. Where it is there already, a forward may have
                used it.
        """
        assert not self._in_flight, "an exchange ends before the next one begins"
        self.restart()
        self._keeps, self._begun, self._ended = keeps, 0, 0
        with self._mover.ended_by_errors():
            self._begin_rounds()
        if self._rounds > _IN_FLIGHT:
            self._mover.start(self.wait)

    def has(self, layers: Iterable[int]) -> bool:
        """Return whether all elements of these layers have arrived."""
        return all(self._rounds_of.get(layer, 0) <= self._arrived for layer in layers)

    def wait(self, layers: Collection[int] | None = None) -> None:
        """Wait for all elements of these layers; if None, for all, and until all that is sent has arrived.

        Called from any thread. Raises CommunicationError.
        """
        while self._takes_turn(layers):
            try:
                with self._mover.ended_by_errors():
                    self._end_round()
                    self._begin_rounds()
            finally:
                with self._mover.changed:
                    self._is_taking = False
                    self._mover.changed.notify_all()

    def drop(self) -> None:
        """Release the messages in flight, once the mover is closed: none of them arrives any more."""
        self._in_flight.clear()

    def _takes_turn(self, layers: Collection[int] | None) -> bool:
        """Wait while another thread takes in a round; return whether this one has to take in the next."""

        def is_over() -> bool:
            return self._ended == self._rounds if layers is None else self.has(layers)

        with self._mover.changed:
            self._mover.wait_for(lambda: is_over() or not self._is_taking)
            if is_over():
                return False
            self._is_taking = True
            return True

    def _begin_rounds(self) -> None:
        """Send and receive the messages of the next rounds, until enough are in flight."""
        communicators = self._mover.communicators
        while self._begun < self._rounds and len(self._in_flight) < _IN_FLIGHT:
            number = self._begun
            arriving = [
                (communicators.receive(memory, peer=peer, tag=self._tag), memory, messages[number])
                for peer, messages in self._from.items()
                if number < len(messages)
                for memory in (_memory_for(messages[number]),)
            ]
            sent = [
                (communicators.send(content, peer=peer, tag=self._tag), content)
                for peer, messages in self._to.items()
                if number < len(messages)
                for content in (torch.cat([view for _, view in messages[number]]),)
            ]
            self._in_flight.append((arriving, sent))
            self._begun += 1

    def _end_round(self) -> None:
        """Wait for the messages of the oldest round in flight, and keep what arrives."""
        arriving, sent = self._in_flight[0]
        for receiving, memory, pieces in arriving:
            receiving.wait()
            parts = zip(pieces, memory.split([view.numel() for _, view in pieces]), strict=True)
            kept = [(view, part) for (layer, view), part in parts if self._keeps is None or layer in self._keeps]
            if kept:
                with torch.no_grad():
                    torch._foreach_copy_([view for view, _ in kept], [part for _, part in kept])
        with self._mover.changed:
            self._arrived += 1
            self._mover.changed.notify_all()
        for sending, _ in sent:
            sending.wait()
        self._in_flight.popleft()
        self._ended += 1


def _messages_of(pieces: _Pieces) -> list[_Pieces]:
    """Share out elements to messages, in a way that both ends find: each of one type, and not much too large."""
    messages: list[list[tuple[int, Tensor]]] = []
    size = 0
    for layer, view in sorted(pieces, key=lambda piece: (piece[0], str(piece[1].dtype))):
        for piece in view.split(max(1, _MESSAGE_BYTES // view.element_size())):
            if not messages or messages[-1][-1][1].dtype != view.dtype or size + piece.nbytes > _MESSAGE_BYTES:
                messages.append([])
                size = 0
            messages[-1].append((layer, piece))
            size += piece.nbytes
    return [tuple(message) for message in messages]


def _memory_for(pieces: _Pieces) -> Tensor:
    (_, first), *_ = pieces
    return torch.empty(sum(view.numel() for _, view in pieces), dtype=first.dtype, device=first.device)
