"""Communicators over gloo: TCP between processes, on any machine."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from chameleon_ft.config import Timeouts
from chameleon_ft.runtime.communicators.base import CommunicationError, InFlight, Membership, open_store
from chameleon_ft.runtime.communicators.sockets import SocketTracker

__all__ = ["GlooCommunicators"]


class GlooCommunicators:
    """One gloo group over all members for messages and for the vote, and one for each smaller group that reduces.

    The groups are made directly, not by `dist.init_process_group`, so that nothing global is left behind by a
    generation that fails. Tensors on an accelerator travel through host memory.
    """

    def __init__(self, *, timeouts: Timeouts, address: str) -> None:
        self._timeouts = timeouts
        self._address = address
        self._sockets = SocketTracker()
        self._interrupted = threading.Event()
        self._groups: dict[tuple[int, ...], dist.ProcessGroupGloo] = {}
        self._world: tuple[int, ...] = ()

    def open(self, membership: Membership) -> None:
        self._sockets.start()
        try:
            store = open_store(membership.store, timeout_s=self._timeouts.rendezvous_s)
            device = dist.ProcessGroupGloo.create_device(hostname=self._address)
            for index, group in enumerate((membership.members, *membership.groups)):
                if membership.worker in group and group not in self._groups:
                    self._raise_if_interrupted()
                    prefix = f"generation-{membership.generation}/group-{index}"
                    self._groups[group] = dist.ProcessGroupGloo(
                        dist.PrefixStore(prefix, store),
                        group.index(membership.worker),
                        len(group),
                        self._options(device),
                    )
        except (RuntimeError, dist.DistError) as error:
            raise CommunicationError(None, f"the communicators cannot be formed: {error}") from None
        finally:
            self._sockets.settle()
        self._world = membership.members
        self._raise_if_interrupted()

    def send(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        tensor = tensor.cpu()
        try:
            return _Message(self._groups[self._world].send([tensor], self._world.index(peer), tag), peer, tensor)
        except RuntimeError as error:
            raise CommunicationError(peer, str(error)) from None

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        arriving = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        try:
            work = self._groups[self._world].recv([arriving], self._world.index(peer), tag)
        except RuntimeError as error:
            raise CommunicationError(peer, str(error)) from None
        return _Message(work, peer, arriving, None if arriving is tensor else tensor)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        host = tensor.cpu()
        try:
            work = self._groups[group].allreduce([host])
        except RuntimeError as error:
            raise CommunicationError(None, str(error)) from None
        return _Message(work, None, host, None if host is tensor else tensor)

    def interrupt(self) -> None:
        self._interrupted.set()
        self._sockets.shut_down()

    def close(self) -> None:
        # First the connections, so that the groups' destructors find nothing to wait for.
        self._sockets.close()
        self._groups.clear()

    def _options(self, device: dist.ProcessGroupGloo.Device) -> dist.ProcessGroupGloo._Options:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=self._timeouts.collective_s)
        options._threads = 1
        return options

    def _raise_if_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise CommunicationError(None, "the generation is over")


@dataclass(slots=True)
class _Message:
    """A gloo message, with the host tensor it reads or fills and the accelerator's tensor that this is copied to."""

    work: dist.Work | None
    peer: int | None
    host: Tensor
    target: Tensor | None = None

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            self.work.wait()
        except (RuntimeError, dist.DistError) as error:
            raise CommunicationError(self.peer, str(error)) from None
        finally:
            # A live Work keeps the group's sockets open after the group is gone.
            self.work = None
        if self.target is not None:
            self.target.copy_(self.host)

    def is_done(self) -> bool:
        return self.work is None or self.work.is_completed()
