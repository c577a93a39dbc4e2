"""Messages and reductions that take the time of an emulated link, over communicators that are real."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.cluster import Cluster
from chameleon_ft.runtime.communicators import CommunicationError, Communicators, InFlight, Membership

__all__ = ["EmulatedLinks"]

_STAMP_BYTES: Final = 8


class EmulatedLinks:
    """Communicators that carry every tensor at once and hand it over when the emulated link would have.

    A message carries the time at which it is due, by the clock of the machine that all ranks share. An all-reduce
    begins when all of its group wait for it, and is due a ring's time later: so those that a rank has issued are done
    one after the other. The vote takes its own time only.

    Args:
        inner: what carries the tensors; not opened yet.
        cluster: links and hosts of the emulated workers.
        scale: bytes that a byte stands for.
    """

    def __init__(self, inner: Communicators, cluster: Cluster, *, scale: int) -> None:
        self._inner = inner
        self._cluster = cluster
        self._scale = scale
        self._worker = -1
        self._over = threading.Event()

    def open(self, membership: Membership) -> None:
        self._worker = membership.worker
        self._inner.open(membership)

    def send(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        link = self._cluster.link(self._worker, peer)
        due = time.perf_counter() + link.message_s(tensor.nbytes * self._scale)
        packed = torch.empty(_STAMP_BYTES + tensor.nbytes, dtype=torch.uint8)
        packed[:_STAMP_BYTES].view(torch.float64).fill_(due)
        packed[_STAMP_BYTES:].view(tensor.dtype).copy_(tensor.view(-1))
        return self._inner.send(packed, peer=peer, tag=tag)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        packed = torch.empty(_STAMP_BYTES + tensor.nbytes, dtype=torch.uint8)
        return _Message(self._inner.receive(packed, peer=peer, tag=tag), packed, tensor, peer, self._over)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        ring_s = self._cluster.ring_all_reduce_s(group, tensor.nbytes * self._scale)
        return _Reduction(self._inner, tensor, group, ring_s, self._over)

    def vote(self, ballot: Tensor) -> InFlight:
        return self._inner.vote(ballot)

    def interrupt(self) -> None:
        self._over.set()
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class _Message:
    inner: InFlight
    packed: Tensor
    target: Tensor
    peer: int
    over: threading.Event

    def wait(self) -> None:
        self.inner.wait()
        due = float(self.packed[:_STAMP_BYTES].view(torch.float64))
        _sleep_until(due, self.over, self.peer)
        self.target.copy_(self.packed[_STAMP_BYTES:].view(self.target.dtype).view_as(self.target))


@dataclass(slots=True)
class _Reduction:
    inner: Communicators
    tensor: Tensor
    group: tuple[int, ...]
    ring_s: float
    over: threading.Event

    def wait(self) -> None:
        self.inner.all_reduce(self.tensor, self.group).wait()
        _sleep_until(time.perf_counter() + self.ring_s, self.over, None)


def _sleep_until(due: float, over: threading.Event, peer: int | None) -> None:
    remaining = due - time.perf_counter()
    if remaining > 0 and over.wait(remaining):
        raise CommunicationError(peer, "the generation is over")
