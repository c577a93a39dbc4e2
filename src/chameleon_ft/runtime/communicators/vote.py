"""Votes by messages between single ranks, where the collectives of a library are slow for a few numbers."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from chameleon_ft.runtime.communicators.base import Communicators
from chameleon_ft.runtime.communicators.tags import Tag

_CHILDREN: Final = 8


class TreeVote:
    """A sum of a few numbers over a tree of ranks: sums of ballots go up to the root, and the total comes down.

    All n ranks together send 2 (n - 1) messages, and two for each level of the tree are sent one after the other. In
    the all-reduce of gloo, which is a ring, each rank sends more than 2 (n - 1) messages one after the other. The order
    of the additions depends on `group` alone. A rank contributes once it waits.

    Keep the object until the next vote is complete, because messages may still be on their way.

    Args:
        ballot: of this rank, of shape [numbers], in host memory; the total replaces it.
        group: workers of all ranks, ascending.
        communicators: carry the messages, which have a tag of their own.
    """

    def __init__(self, ballot: Tensor, *, worker: int, group: tuple[int, ...], communicators: Communicators) -> None:
        position = group.index(worker)
        self._parent = group[(position - 1) // _CHILDREN] if position > 0 else None
        self._children = group[_CHILDREN * position + 1 : _CHILDREN * (position + 1) + 1]
        self._communicators = communicators
        self._ballot = ballot
        self._total = torch.empty_like(ballot)
        # Receives are posted first, so that no message waits for its receiver.
        self._ballots = [(torch.empty_like(ballot), child) for child in self._children]
        self._arriving = [communicators.receive(each, peer=child, tag=Tag.VOTE) for each, child in self._ballots]
        if self._parent is not None:
            self._deciding = communicators.receive(self._total, peer=self._parent, tag=Tag.VOTE)

    def wait(self) -> None:
        """Block until the total is there. Raises CommunicationError."""
        for arriving, (ballot, _) in zip(self._arriving, self._ballots, strict=True):
            arriving.wait()
            self._ballot.add_(ballot)
        if self._parent is None:
            self._total.copy_(self._ballot)
        else:
            self._up = self._communicators.send(self._ballot, peer=self._parent, tag=Tag.VOTE)
            self._deciding.wait()
            self._ballot.copy_(self._total)
        self._down = [self._communicators.send(self._total, peer=child, tag=Tag.VOTE) for child in self._children]
