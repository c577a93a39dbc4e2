"""The exchange of updated parameters: owners of slices send them to the holders of a layer that do not own them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.plan.shards import LayerShards
from chameleon_ft.runtime.communicators import Communicators, InFlight
from chameleon_ft.runtime.execution.layers import HeldLayers

__all__ = ["ParameterExchange"]

_TAG: Final = 1 << 29  # far from those of micro-batches and of layers that move
_MESSAGE_BYTES: Final = 4 << 20
_IN_FLIGHT: Final = 2  # messages to each worker, and from it

_Messages = list[list[Tensor]]
"""Messages between two workers in order: of each, the elements of parameters that it carries, in place."""


class ParameterExchange:
    """Messages with elements of parameters to other workers and from them, step after step.

    All messages from one worker to another are joined into few.

    Args:
        to: worker -> the elements that are sent to it, in place.
        origin: worker -> the elements that arrive from it, in the same order.
    """

    def __init__(
        self,
        to: Mapping[int, Sequence[Tensor]],
        origin: Mapping[int, Sequence[Tensor]],
        communicators: Communicators,
        *,
        tag: int,
    ) -> None:
        self._communicators = communicators
        self._tag = tag
        self._to = {peer: _messages_of(views) for peer, views in sorted(to.items()) if views}
        self._from = {peer: _messages_of(views) for peer, views in sorted(origin.items()) if views}

    @classmethod
    def of(
        cls, worker: int, held: HeldLayers, shards: Mapping[int, LayerShards], communicators: Communicators
    ) -> ParameterExchange:
        """Return a worker's part after an update: of each slice one owner sends, holders that do not own it receive.

        Args:
            shards: layer -> its slices, of layers that have other holders, too.
        """
        to: dict[int, list[Tensor]] = defaultdict(list)
        origin: dict[int, list[Tensor]] = defaultdict(list)
        for layer, own in sorted(shards.items()):
            if worker not in own.holders:
                continue
            for part, sender in zip(own.slices, own.senders(), strict=True):
                views = held.views_of_slice(layer, (part.start, part.stop))
                if sender == worker:
                    for holder in own.holders:
                        if holder not in part.owners:
                            to[holder] += views
                elif worker not in part.owners:
                    origin[sender] += views
        return cls(to, origin, communicators, tag=_TAG)

    def run(self, *, keeps: bool = True) -> None:
        """Send and receive; return once all elements have arrived. Raises CommunicationError.

        All workers go through their messages in one order and wait for few at a time, so that the slowest can always
        continue.

        Args:
            keeps: whether what arrives is kept. It is not if it is there already: a forward may have used it.
        """
        in_flight: deque[tuple[list[tuple[InFlight, Tensor, list[Tensor]]], list[tuple[InFlight, Tensor]]]] = deque()
        every = chain(self._to.values(), self._from.values())
        for number in range(max(map(len, every), default=0)):
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
                for content in (torch.cat(messages[number]),)
            ]
            in_flight.append((arriving, sent))
            if len(in_flight) == _IN_FLIGHT:
                _finish(*in_flight.popleft(), keeps=keeps)
        for each in in_flight:
            _finish(*each, keeps=keeps)


def _finish(
    arriving: list[tuple[InFlight, Tensor, list[Tensor]]], sent: list[tuple[InFlight, Tensor]], *, keeps: bool
) -> None:
    for receiving, memory, views in arriving:
        receiving.wait()
        if keeps:
            with torch.no_grad():
                torch._foreach_copy_(views, memory.split([view.numel() for view in views]))
    for sending, _ in sent:
        sending.wait()


def _messages_of(views: Sequence[Tensor]) -> _Messages:
    """Share out elements to messages, in a way that both ends find: each of one type, and not much too large."""
    messages: _Messages = []
    size = 0
    for view in sorted(views, key=lambda view: str(view.dtype)):
        for piece in view.split(max(1, _MESSAGE_BYTES // view.element_size())):
            if not messages or messages[-1][-1].dtype != view.dtype or size + piece.nbytes > _MESSAGE_BYTES:
                messages.append([])
                size = 0
            messages[-1].append(piece)
            size += piece.nbytes
    return messages


def _memory_for(views: list[Tensor]) -> Tensor:
    return torch.empty(sum(view.numel() for view in views), dtype=views[0].dtype, device=views[0].device)
