"""Communicators over NCCL, between NVIDIA GPUs.

Relies on NCCL's documented behaviour after failures; see docs/cluster.md for what was run on hardware.

- NCCL has no tags: every (sender, receiver, activation or gradient) has a communicator of its own, and programs are
  checked for equal order at both ends.
- Communicators are non-blocking and made at once, in one order on all ranks. If they were made at first use, in the
  order of the programs, two ranks could wait for each other.
- To interrupt is to abort all communicators at the same time, from threads: one after the other, an abort may wait for
  a kernel that only another abort would end.
- A wait orders GPU streams and does not block the host. An aborted kernel leaves no valid data, so a reduction counts
  only if the host has seen it end without an interruption. It watches on a stream of its own: the backward that follows
  must not be ordered behind the reduction.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from chameleon_ft.config import RunConfig, Timeouts
from chameleon_ft.worker.communicators.base import Channel, CommunicationError, InFlight, Membership, issue

_Group = Any  # torch's stubs of a backend leave out send, recv and allreduce


class NcclCommunicators:
    """A communicator for each channel this rank uses, and one for each group it reduces in."""

    def __init__(self, *, timeouts: Timeouts, device: torch.device) -> None:
        # Torch's own watchdog would end the process when an operation fails; this class handles the failure.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(round(timeouts.rendezvous_s))
        self._timeouts = timeouts
        # Any thread may open them, and each has a current device of its own.
        self._device = device
        self._interrupted = threading.Event()
        self._lock = threading.Lock()
        self._all: list[_Group] = []
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._channels: dict[Channel, _Group] = {}
        self._worker = -1
        # A store in Python must outlive the groups.
        self._store: c10d.Store | None = None
        self._watching = torch.cuda.Stream(self._device)

    @classmethod
    def of_rank(cls, config: RunConfig, *, address: str, device: torch.device) -> Self:
        """Return those of a rank; NCCL finds the addresses by itself."""
        return cls(timeouts=config.timeouts, device=device)

    def open(self, membership: Membership) -> None:
        self._worker = membership.worker
        prefix = f"generation-{membership.generation}"
        try:
            store = self._store = membership.rendezvous.open_store(timeout_s=self._timeouts.rendezvous_s)
            for channel in sorted(membership.channels):
                name = f"{prefix}/channel-{channel.sender}-{channel.receiver}-{channel.forward}"
                rank = 0 if channel.sender == membership.worker else 1
                self._channels[channel] = self._group(c10d.PrefixStore(name, store), rank, 2)
            for index, group in enumerate(dict.fromkeys((membership.members, *membership.groups))):
                if membership.worker in group:
                    own_store = c10d.PrefixStore(f"{prefix}/group-{index}", store)
                    self._groups[group] = self._group(own_store, group.index(membership.worker), len(group))
        except RuntimeError as error:
            raise CommunicationError(None, f"the communicators cannot be formed: {error}") from None

    def settle(self) -> None:
        """All is formed when `open` returns."""

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        group = self._channels[Channel(self._worker, peer, tag % 2 == 0)]
        return _Message(issue(peer, group.send, [tensor], 1, tag), peer, self._interrupted)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        group = self._channels[Channel(peer, self._worker, tag % 2 == 0)]
        return _Message(issue(peer, group.recv, [tensor], 0, tag), peer, self._interrupted)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        on_device = tensor.to(self._device)
        work = issue(None, self._groups[group].allreduce, [on_device])
        return _Reduction(work, None, self._interrupted, on_device, tensor, self._watching)

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        return self.all_reduce(ballot, group)

    def unreached(self) -> dict[int, float]:
        return {}

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

    def _group(self, store: c10d.Store, rank: int, size: int) -> _Group:
        """Make a communicator that `interrupt` aborts; abort it at once if that has been called already."""
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=self._timeouts.transport_s)
        group = nccl(store, rank, size, options)
        with self._lock:
            self._all.append(group)
        if self._interrupted.is_set():
            group.abort()
            raise CommunicationError(None, "the generation is over")
        group.eager_connect_single_device(self._device)
        return group


@dataclass(slots=True)
class _Message:
    """A message between two GPUs. Waiting orders the current stream behind it."""

    work: c10d.Work
    peer: int | None
    interrupted: threading.Event

    def wait(self) -> None:
        try:
            self._wait()
        except RuntimeError as error:
            raise CommunicationError(self.peer, str(error)) from None
        if self.interrupted.is_set():
            raise CommunicationError(self.peer, "the generation is over")

    def _wait(self) -> None:
        self.work.wait()


@dataclass(slots=True)
class _Reduction(_Message):
    """A reduction of `target`, by way of `on_device` where that is another tensor. Waiting blocks the host."""

    on_device: Tensor
    target: Tensor
    watching: torch.cuda.Stream

    def wait(self) -> None:
        _Message.wait(self)
        if self.on_device is not self.target:
            self.target.copy_(self.on_device)

    def _wait(self) -> None:
        with torch.cuda.stream(self.watching):
            self.work.wait()
        self.watching.synchronize()
