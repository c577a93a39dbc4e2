"""The exchange of updated parameters: owners of slices send them to the holders of a layer that do not own them.

It runs beside the following step, whose first forwards wait for their layers alone.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.plan.shards import LayerShards
from chameleon_ft.worker.communicators import Communicators, InFlight
from chameleon_ft.worker.communicators.base import Tag
from chameleon_ft.worker.execution.layers import HeldLayers

_MESSAGE_BYTES: Final = 4 << 20
_IN_FLIGHT: Final = 2  # messages to each worker, and from it
_POLL_S: Final = 0.01

_Pieces = Sequence[tuple[int, Tensor]]
"""Layers and elements of their parameters, in place."""
_Round = tuple[list[tuple[InFlight, Tensor, _Pieces]], list[tuple[InFlight, Tensor]]]
"""Messages that arrive, with the memory that they fill, and those that are sent."""


class ParameterExchange:
    """Messages with elements of parameters to other workers and from them, step after step.

    All messages from one worker to another are joined into few, lower layers first, and go out in rounds: of each round
    one message to every worker. Few rounds are in flight at a time. If there are more, a thread of its own goes through
    them; otherwise, whoever waits takes in what has arrived. All workers have the same order of rounds, so the slowest
    can always continue.

    Args:
        to: worker -> the elements that are sent to it, in place.
        origin: worker -> the elements that arrive from it, in the same order.
        layers: those that the exchange completes; others are none of its concern.
    """

    def __init__(
        self,
        to: Mapping[int, _Pieces],
        origin: Mapping[int, _Pieces],
        communicators: Communicators,
        *,
        layers: Iterable[int],
        tag: int,
    ) -> None:
        self._communicators = communicators
        self._tag = tag
        self._to = {peer: _messages_of(pieces) for peer, pieces in sorted(to.items()) if pieces}
        self._from = {peer: _messages_of(pieces) for peer, pieces in sorted(origin.items()) if pieces}
        self._rounds = max(map(len, chain(self._to.values(), self._from.values())), default=0)
        self._rounds_of = dict.fromkeys(layers, 0)  # by layer, until it is complete
        for messages in self._from.values():
            for number, message in enumerate(messages, 1):
                for layer, _ in message:
                    self._rounds_of[layer] = max(self._rounds_of[layer], number)
        self._condition = threading.Condition()
        self._keeps: Collection[int] | None = None
        self._begun = 0  # rounds
        self._arrived = 0
        self._in_flight: deque[_Round] = deque()
        self._sent = True
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of(
        cls, worker: int, held: HeldLayers, shards: Mapping[int, LayerShards], communicators: Communicators
    ) -> ParameterExchange:
        """Return a worker's part after an update: owners of a slice send, holders that do not own it receive.

        Args:
            shards: layer -> its slices, of layers that have other holders, too.
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
        return cls(to, origin, communicators, layers=shards, tag=Tag.UPDATED_PARAMETERS)

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
        """Begin to send and to receive.

        Args:
            keeps: layers of which what arrives is kept; None: of all. Where it is there already, a forward may have
                used it.
        """
        self.restart()
        self._keeps, self._begun = keeps, 0
        if not self._rounds:
            return
        assert not self._in_flight, "an exchange ends before the next one begins"
        self._sent = False
        if self._rounds > _IN_FLIGHT:
            self._start_thread(self._exchange)
        else:
            # A thread of its own would wait for a processor, and all others for its messages.
            self._guarded(self._begin_rounds)

    def has(self, layers: Iterable[int]) -> bool:
        """Return whether all elements of these layers have arrived."""
        return all(self._rounds_of.get(layer, 0) <= self._arrived for layer in layers)

    def wait(self, layers: Collection[int] | None = None) -> None:
        """Wait for all elements of these layers; if None, for all, and until all that is sent has arrived.

        Called from any thread. Raises CommunicationError.
        """

        def is_over() -> bool:
            return self._error is not None or (self._sent if layers is None else self.has(layers))

        with self._condition:
            if self._thread is None:
                while not is_over():
                    self._guarded(self._end_round)
            self._condition.wait_for(is_over)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the exchange; if not all is exchanged, interrupt the communicators for that."""
        if self._thread is None and not self._sent and self._error is None:
            self._start_thread(self._end_rounds)  # which an interruption wakes
        while self._thread is not None and self._thread.is_alive():
            if not self._sent:
                self._communicators.interrupt()
            self._thread.join(_POLL_S)
        self._in_flight.clear()

    def _start_thread(self, part: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._guarded, args=(part,), name="parameters", daemon=True)
        self._thread.start()

    def _guarded(self, part: Callable[[], None]) -> None:
        """Do a part of the exchange. Whoever waits raises its error."""
        error: BaseException | None = None
        try:
            part()
        except BaseException as failure:  # noqa: BLE001
            error = failure.with_traceback(None)
        with self._condition:
            self._error = error
            self._sent = error is None and self._arrived == self._rounds and not self._in_flight
            self._condition.notify_all()

    def _exchange(self) -> None:
        self._begin_rounds()
        while self._in_flight:
            self._end_round()
            self._begin_rounds()

    def _end_rounds(self) -> None:
        """End the rounds in flight, but for those that another thread ends in `wait`."""
        with self._condition:
            if self._error is not None:
                raise self._error
            while self._in_flight:
                self._end_round()

    def _begin_rounds(self) -> None:
        """Send and receive the messages of the next rounds, until enough are in flight."""
        while self._begun < self._rounds and len(self._in_flight) < _IN_FLIGHT:
            number = self._begun
            arriving = [
                (self._communicators.receive(memory, peer=peer, tag=self._tag), memory, messages[number])
                for peer, messages in self._from.items()
                if number < len(messages)
                for memory in (_memory_for(messages[number]),)
            ]
            sent = [
                (self._communicators.send(content, peer=peer, tag=self._tag), content)
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
        with self._condition:
            self._arrived += 1
            self._condition.notify_all()
        for sending, _ in sent:
            sending.wait()
        self._in_flight.popleft()


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
    views = [view for _, view in pieces]
    return torch.empty(sum(view.numel() for view in views), dtype=views[0].dtype, device=views[0].device)
