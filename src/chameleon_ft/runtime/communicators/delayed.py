"""The base of communicators whose messages take longer than those of the real ones that carry them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from chameleon_ft.cluster import Cluster
from chameleon_ft.runtime.communicators.base import CommunicationError, Communicators, InFlight, Membership


@dataclass(frozen=True, slots=True)
class Deferred:
    """A message or a reduction whose work is done in `wait`."""

    wait: Callable[[], None]


class DelayedLinks:
    """Base of such communicators: they do all but sending, receiving and reducing as the real ones do it.

    Args:
        inner: communicators that carry the tensors; not opened yet.
        cluster_of: returns the links and hosts of the given workers; some workers may join later.
        scale: bytes that each real byte stands for.
    """

    def __init__(self, inner: Communicators, cluster_of: Callable[[Sequence[int]], Cluster], *, scale: int = 1) -> None:
        self._inner = inner
        self._cluster_of = cluster_of
        self._scale = scale
        self._worker = -1
        self._members: tuple[int, ...] = ()
        self._known: Cluster | None = None
        self._over = threading.Event()

    def open(self, membership: Membership) -> None:
        self._worker, self._members = membership.worker, membership.members
        self._inner.open(membership)

    def settle(self) -> None:
        self._inner.settle()

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        return self._inner.vote(ballot, group)

    def unreached(self) -> Mapping[int, float]:
        return self._inner.unreached()

    def interrupt(self) -> None:
        self._over.set()
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()

    @property
    def _cluster(self) -> Cluster:
        if self._known is None:
            self._known = self._cluster_of(self._members)
        return self._known

    def _sleep(self, seconds: float, peer: int | None = None) -> None:
        """Sleep; raise CommunicationError as soon as the generation is over."""
        if seconds > 0 and self._over.wait(seconds):
            raise CommunicationError(peer, "the generation is over")
