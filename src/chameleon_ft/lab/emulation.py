"""Emulated devices and links, and links that are made slow on purpose.

An emulated device takes as long for an operation as a profile says, and its links for a message or a reduction. All
emulated devices are processes of one machine, because they share its clock. Real communicators carry the tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.cluster import Cluster
from chameleon_ft.config import RunConfig
from chameleon_ft.host.fork_server import wake_on_time
from chameleon_ft.lab.stand_in import stand_in_scale
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import CostModel, Operation, OperationKind
from chameleon_ft.storage.profiles import costs_of_run, profile_of_run
from chameleon_ft.worker.communicators.base import CommunicationError, Communicators, InFlight, Membership, Tag


@dataclass(frozen=True, slots=True)
class Deferred:
    """A message or a reduction whose work is done in `wait`."""

    wait: Callable[[], None]


class DelayedLinks:
    """Base of communicators whose messages take longer than those of the real ones that carry them.

    Args:
        inner: The communicators that carry the tensors; not opened yet.
        cluster_of: Returns the links and hosts of the given workers; some workers may join later.
        scale: How many bytes each real byte stands for.
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


# Two numbers of float64: when the message is due, and for how many seconds it occupies the link.
_STAMP_BYTES: Final = 16


class EmulatedLinks(DelayedLinks):
    """Communicators that send every tensor at once and deliver it when the emulated link would.

    A message carries its due time, by the clock of the machine that all ranks share. An all-reduce begins when all
    workers of its group wait for it, and ends one ring duration later, so the reductions of a rank run one after the
    other. The vote is not delayed.
    """

    def __init__(self, inner: Communicators, cluster_of: Callable[[Sequence[int]], Cluster], *, scale: int) -> None:
        super().__init__(inner, cluster_of, scale=scale)
        # When the last message with `stands_for_bytes` has left and has arrived; these go one after the other.
        self._sent_at = self._received_at = 0.0

    def open(self, membership: Membership) -> None:
        # The first message is not to wait for that.
        self._known = self._cluster_of(membership.members)
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


class SlowedLinks(DelayedLinks):
    """Communicators of a worker whose links have a share of their bandwidth, as `share` says when a message begins.

    Both what it sends and what it receives takes the rest of the time that its bytes would take. Without a slow link
    every call is passed on, and costs nothing. `cluster_of` returns the usual links, and `share` the share of the
    bandwidth; 1 if the links are as fast as usual.
    """

    def __init__(
        self,
        inner: Communicators,
        cluster_of: Callable[[Sequence[int]], Cluster],
        share: Callable[[], float],
        *,
        scale: int = 1,
    ) -> None:
        super().__init__(inner, cluster_of, scale=scale)
        self._share = share
        self._lock = threading.Lock()
        self._lanes: dict[_LaneKey, _Lane] = {}
        # (peer, whether sending) -> held while the link carries a message
        self._links: dict[tuple[int, bool], threading.Lock] = {}

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        def send() -> InFlight:
            return self._inner.send(tensor, peer=peer, tag=tag, stands_for_bytes=stands_for_bytes)

        more_s = self._more_s(peer, tensor.nbytes * self._scale if stands_for_bytes is None else stands_for_bytes)
        key = (peer, True, _stream_of(tag))
        if not more_s and key not in self._lanes:
            return send()
        return self._lane(key).put(lambda: self._later(more_s, send, key))

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        arriving = self._inner.receive(tensor, peer=peer, tag=tag)
        more_s, key = self._more_s(peer, tensor.nbytes * self._scale), (peer, False, _stream_of(tag))
        if not more_s and key not in self._lanes:
            return arriving

        def receive() -> InFlight:
            arriving.wait()
            return self._later(more_s, lambda: _ARRIVED, key)

        return self._lane(key).put(receive)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        reducing, share = self._inner.all_reduce(tensor, group), self._share()
        if share == 1 or len(group) < 2:
            return reducing
        usual_s = self._cluster.ring_all_reduce_s(group, tensor.nbytes * self._scale)

        def wait() -> None:
            reducing.wait()
            self._sleep(usual_s * (1 / share - 1))

        return Deferred(wait)

    def close(self) -> None:
        self._over.set()
        super().close()
        for lane in self._lanes.values():
            lane.end()

    def _more_s(self, peer: int, num_bytes: float) -> float:
        share = self._share()
        return 0.0 if share == 1 else num_bytes / self._cluster.link(self._worker, peer).bytes_per_s * (1 / share - 1)

    def _lane(self, key: _LaneKey) -> _Lane:
        with self._lock:
            if key not in self._lanes:
                self._lanes[key] = _Lane()
            return self._lanes[key]

    def _later(self, seconds: float, act: Callable[[], InFlight], key: _LaneKey) -> InFlight:
        peer, sends, _ = key
        with self._lock:
            link = self._links.setdefault((peer, sends), threading.Lock())
        with link:
            self._sleep(seconds)
        return act()


_LaneKey = tuple[int, bool, int | None]
"""(peer, whether sending, stream)"""


def _stream_of(tag: int) -> int | None:
    """Return which messages one is in line with: those of its tag, or the results of operations, which are of many.

    Other threads than the one that trains wait for the other tags, for some of them long before they are sent.
    """
    return tag if tag >= Tag.VOTE else None


_ARRIVED = Deferred(lambda: None)


class _Lane:
    """A thread that handles the messages of a stream, with one peer in one direction, one after the other."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], InFlight], Future[InFlight]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="slowed-link", daemon=True).start()

    def put(self, act: Callable[[], InFlight]) -> InFlight:
        begun: Future[InFlight] = Future()
        self._queue.put((act, begun))
        return Deferred(lambda: begun.result().wait())

    def end(self) -> None:
        self._queue.put(None)

    def _work(self) -> None:
        while (queued := self._queue.get()) is not None:
            act, begun = queued
            try:
                begun.set_result(act())
            except BaseException as error:  # noqa: BLE001 - raised where the message is waited for
                begun.set_exception(error.with_traceback(None))


class EmulatedDevice:
    """The device and the links of one worker, by the profile of the run. Raises ProfileError as `profile_of_run`."""

    def __init__(self, config: RunConfig, worker: int) -> None:
        self._config = config
        self._profile = profile_of_run(config)
        self._scale = stand_in_scale(self._profile)
        self.pace = EmulatedPace(self._costs([worker]), worker)
        wake_on_time()

    @property
    def scale(self) -> int:
        """Emulated bytes per real byte of a message."""
        return self._scale

    def links(self, inner: Communicators) -> Communicators:
        """Return communicators that are as slow as the emulated links."""
        return EmulatedLinks(inner, lambda workers: self._costs(workers).cluster, scale=self._scale)

    def _costs(self, workers: Iterable[int]) -> CostModel:
        return costs_of_run(self._config, self._profile, dict.fromkeys(workers, ""))


class EmulatedPace:
    """Sleeps until an operation would end on the device of `worker`. Like a device, it cannot be interrupted."""

    def __init__(self, costs: CostModel, worker: int) -> None:
        self._costs = costs
        self._worker = worker
        self._seconds: dict[tuple[OperationKind, LayerRange, object], float] = {}

    def __call__(self, operation: Operation, since: float) -> None:
        """Return at the emulated end of `operation`, which began at `since` by `time.perf_counter`."""
        key = (operation.kind, operation.layers, operation.recompute)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._costs.operation_s(self._worker, operation)
        remaining = since + seconds - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
