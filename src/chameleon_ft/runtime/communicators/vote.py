"""Votes by messages between single ranks, where the collectives of a library are slow for a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from chameleon_ft.runtime.communicators.base import InFlight

__all__ = ["TreeVote"]

_TAG: Final = 1 << 29  # far from those of micro-batches
_CHILDREN: Final = 8


class _Sends(Protocol):
    def __call__(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight: ...


class TreeVote:
    """A sum of a few numbers over a tree of ranks: sums of ballots go up to the root, and the total comes down.

    All n ranks together send 2 (n - 1) messages, and two for each level of the tree are sent one after the other. In
    the all-reduce of gloo, which is a ring, each rank sends more than 2 (n - 1) messages one after the other. The order
    of the additions depends on `group` alone.

    Keep the object until the next vote is complete, because messages may still be on their way.

    Args:
        ballot: of this rank, of shape [numbers], in host memory; the total replaces it.
        group: workers of all ranks, ascending.
    """

    def __init__(
        self, ballot: Tensor, *, worker: int, group: tuple[int, ...], send: _Sends, receive: Callable[..., InFlight]
    ) -> None:
        position = group.index(worker)
        self._parent = group[(position - 1) // _CHILDREN] if position > 0 else None
        self._children = group[_CHILDREN * position + 1 : _CHILDREN * (position + 1) + 1]
        self._send = send
        self._ballot = ballot
        self._total = torch.empty_like(ballot)
        self._ballots = [torch.empty_like(ballot) for _ in self._children]
        # They are posted first, so that no message waits for its receiver.
        ballots = zip(self._children, self._ballots, strict=True)
        self._arriving = [receive(each, peer=child, tag=_TAG) for child, each in ballots]
        self._deciding = None if self._parent is None else receive(self._total, peer=self._parent, tag=_TAG)
        self._sent: list[InFlight] = []
        if not self._children:
            self._pass_on()

    def wait(self) -> None:
        """Block until the total is there. Raises CommunicationError."""
        for arriving, ballot in zip(self._arriving, self._ballots, strict=True):
            arriving.wait()
            self._ballot.add_(ballot)
        if self._children:
            self._pass_on()
        if self._deciding is None:
            self._total.copy_(self._ballot)
        else:
            self._deciding.wait()
            self._ballot.copy_(self._total)
        self._sent += [self._send(self._total, peer=child, tag=_TAG) for child in self._children]

    def _pass_on(self) -> None:
        if self._parent is not None:
            self._sent.append(self._send(self._ballot, peer=self._parent, tag=_TAG))
