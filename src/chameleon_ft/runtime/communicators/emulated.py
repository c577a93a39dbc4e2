"""Emulated links: real communicators whose messages and reductions take as long as on the emulated link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.cluster import Cluster
from chameleon_ft.runtime.communicators.base import Communicators, InFlight, Membership
from chameleon_ft.runtime.communicators.delayed import Deferred, DelayedLinks

_STAMP_BYTES: Final = 16  # float64 each: when the message is due, seconds that it occupies the link


class EmulatedLinks(DelayedLinks):
    """Communicators that send every tensor at once and deliver it when the emulated link would.

    A message carries its due time, by the clock of the machine that all ranks share. An all-reduce begins when all
    workers of its group wait for it, and ends one ring duration later, so the reductions of a rank run one after the
    other. The vote is not delayed.

    Args: as those of `DelayedLinks`.
    """

    def __init__(self, inner: Communicators, cluster_of: Callable[[Sequence[int]], Cluster], *, scale: int) -> None:
        super().__init__(inner, cluster_of, scale=scale)
        # When the last message with `stands_for_bytes` has left and has arrived; these go one after the other.
        self._sent_at = self._received_at = 0.0

    def open(self, membership: Membership) -> None:
        self._known = self._cluster_of(membership.members)  # the first message is not to wait for that
        super().open(membership)

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        link = self._cluster.link(self._worker, peer)
        busy_s = 0.0
        if stands_for_bytes is None:
            due = time.perf_counter() + link.message_s(tensor.nbytes * self._scale)
        else:
            busy_s = stands_for_bytes / link.bytes_per_s
            due = self._sent_at = max(time.perf_counter() + link.latency_s, self._sent_at) + busy_s
        packed = torch.empty(_STAMP_BYTES + tensor.nbytes, dtype=torch.uint8)
        packed[:_STAMP_BYTES].view(torch.float64).copy_(torch.tensor([due, busy_s], dtype=torch.float64))
        packed[_STAMP_BYTES:].view(tensor.dtype).copy_(tensor.view(-1))
        return self._inner.send(packed, peer=peer, tag=tag)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        packed = torch.empty(_STAMP_BYTES + tensor.nbytes, dtype=torch.uint8)
        arriving = self._inner.receive(packed, peer=peer, tag=tag)

        def wait() -> None:
            arriving.wait()
            due, busy_s = packed[:_STAMP_BYTES].view(torch.float64).tolist()
            if busy_s:
                due = self._received_at = max(due, self._received_at + busy_s)
            self._sleep(due - time.perf_counter(), peer)
            tensor.copy_(packed[_STAMP_BYTES:].view(tensor.dtype).view_as(tensor))

        return Deferred(wait)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        ring_s = self._cluster.ring_all_reduce_s(group, tensor.nbytes * self._scale)

        def wait() -> None:
            self._inner.all_reduce(tensor, group).wait()
            self._sleep(ring_s)

        return Deferred(wait)
