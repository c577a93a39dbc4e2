"""Communicators over NCCL, between NVIDIA GPUs.

Written to what is known of NCCL's behaviour in failures, and not yet run on hardware; docs/cluster.md says so too.

- NCCL has no tags: every (sender, receiver, activation or gradient) has a communicator of its own, and programs are
  checked for equal order at both ends.
- Communicators are non-blocking and made at once, in one order on all ranks: made at first use, in the order of the
  programs, two ranks could each wait for the other.
- To interrupt is to abort all communicators at the same time, from threads: one after the other, an abort may wait for
  a kernel that only another abort would end.
- A wait orders GPU streams and does not block the host. What a kernel leaves behind when it is aborted is not data, so
  a reduction counts only if the host has seen it end while nothing was interrupted. It sees that on a stream of its
  own: the backward that goes on must not be ordered behind the reduction.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from chameleon_ft.config import Timeouts
from chameleon_ft.runtime.communicators.base import Channel, CommunicationError, InFlight, Membership, open_store
from chameleon_ft.runtime.communicators.c10d import Group, Store, Work, nccl_group

__all__ = ["NcclCommunicators"]


class NcclCommunicators:
    """A communicator for each channel this rank uses, and one for each group it reduces in."""

    def __init__(self, *, timeouts: Timeouts) -> None:
        # Torch's own watchdog would end the process when an operation fails; here failing is handled.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(round(timeouts.rendezvous_s))
        self._timeouts = timeouts
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._interrupted = threading.Event()
        self._lock = threading.Lock()
        self._all: list[Group] = []
        self._groups: dict[tuple[int, ...], Group] = {}
        self._channels: dict[Channel, Group] = {}
        self._worker = -1
        self._watching = torch.cuda.Stream(self._device)

    def open(self, membership: Membership) -> None:
        self._worker = membership.worker
        prefix = f"generation-{membership.generation}"
        try:
            store = open_store(membership.store, timeout_s=self._timeouts.rendezvous_s)
            for channel in sorted(membership.channels):
                name = f"{prefix}/channel-{channel.sender}-{channel.receiver}-{channel.forward}"
                rank = 0 if channel.sender == membership.worker else 1
                self._channels[channel] = self._group(store, name, rank, 2)
            for index, group in enumerate(dict.fromkeys((membership.members, *membership.groups))):
                if membership.worker in group:
                    rank = group.index(membership.worker)
                    self._groups[group] = self._group(store, f"{prefix}/group-{index}", rank, len(group))
        except RuntimeError as error:
            raise CommunicationError(None, f"the communicators cannot be formed: {error}") from None

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        channel = Channel(self._worker, peer, tag % 2 == 0)
        try:
            return _Message(self._channels[channel].send([tensor], 1, tag), peer, self._interrupted)
        except RuntimeError as error:
            raise CommunicationError(peer, str(error)) from None

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        channel = Channel(peer, self._worker, tag % 2 == 0)
        try:
            return _Message(self._channels[channel].recv([tensor], 0, tag), peer, self._interrupted)
        except RuntimeError as error:
            raise CommunicationError(peer, str(error)) from None

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        on_device = tensor.to(self._device)
        try:
            work = self._groups[group].allreduce([on_device])
        except RuntimeError as error:
            raise CommunicationError(None, str(error)) from None
        return _Reduction(work, on_device, tensor, self._watching, self._interrupted)

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        return self.all_reduce(ballot, group)

    def interrupt(self) -> None:
        if self._interrupted.is_set():
            return
        self._interrupted.set()
        with self._lock:
            groups = list(self._all)
        for group in groups:
            threading.Thread(target=group.abort, daemon=True).start()

    def close(self) -> None:
        self.interrupt()
        self._groups.clear()
        self._channels.clear()
        with self._lock:
            self._all.clear()

    def _group(self, store: Store, prefix: str, rank: int, size: int) -> Group:
        group = self._add(nccl_group(store, prefix, rank, size, timeout_s=self._timeouts.collective_timeout_s))
        group.eager_connect_single_device(self._device)
        return group

    def _add(self, group: Group) -> Group:
        """Take note of a communicator, so that `interrupt` aborts it; at once if that has been called already."""
        with self._lock:
            self._all.append(group)
        if self._interrupted.is_set():
            group.abort()
            raise CommunicationError(None, "the generation is over")
        return group


@dataclass(slots=True)
class _Message:
    """A message between two GPUs. Waiting orders the current stream behind it."""

    work: Work
    peer: int
    interrupted: threading.Event

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise CommunicationError(self.peer, str(error)) from None
        if self.interrupted.is_set():
            raise CommunicationError(self.peer, "the generation is over")


@dataclass(slots=True)
class _Reduction:
    """A reduction of `target`, by way of `on_device` where that is not the same tensor. Waiting blocks the host."""

    work: Work
    on_device: Tensor
    target: Tensor
    watching: torch.cuda.Stream
    interrupted: threading.Event

    def wait(self) -> None:
        try:
            with torch.cuda.stream(self.watching):
                self.work.wait()
            self.watching.synchronize()
        except RuntimeError as error:
            raise CommunicationError(None, str(error)) from None
        if self.interrupted.is_set():
            raise CommunicationError(None, "the generation is over")
        if self.on_device is not self.target:
            self.target.copy_(self.on_device)
