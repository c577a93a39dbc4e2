"""Communicators over gloo: TCP between processes, on any machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from chameleon_ft.config import Timeouts
from chameleon_ft.runtime.communicators.base import CommunicationError, InFlight, Membership, open_store
from chameleon_ft.runtime.communicators.c10d import Group, Work, gloo_device, gloo_group
from chameleon_ft.runtime.communicators.sockets import SocketTracker
from chameleon_ft.runtime.communicators.waiter import Waiter

__all__ = ["GlooCommunicators"]

_MESSAGES, _REDUCTIONS = 0, 1  # the waiters: gradients are reduced while messages are waited for
_CALL_OFF_AFTER_S = 0.05  # what ends with its connection ends within milliseconds of it


class GlooCommunicators:
    """One gloo group over all members for messages and for the vote, and one for each smaller group that reduces.

    The groups are made directly, not by `dist.init_process_group`, so that nothing global is left behind by a
    generation that fails. Tensors on an accelerator travel through host memory.
    """

    def __init__(self, *, timeouts: Timeouts, address: str) -> None:
        self._timeouts = timeouts
        self._address = address
        self._sockets = SocketTracker()
        self._interrupted_at: float | None = None
        self._lock = threading.Lock()
        self._waiters: tuple[Waiter, ...] = ()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._reductions: list[Work] = []
        self._world: tuple[int, ...] = ()

    def open(self, membership: Membership) -> None:
        _bury_the_dead()
        self._sockets.start()
        with self._lock:
            self._waiters = (Waiter(), Waiter())
            waiter = self._waiters[_MESSAGES]
        try:
            store = open_store(membership.store, timeout_s=self._timeouts.rendezvous_s)
            device = gloo_device(self._address)
            for index, group in enumerate((membership.members, *membership.groups)):
                if membership.worker in group and group not in self._groups:
                    self._raise_if_interrupted()
                    forming = _Forming(
                        partial(
                            gloo_group,
                            store,
                            f"generation-{membership.generation}/group-{index}",
                            group.index(membership.worker),
                            len(group),
                            device=device,
                            timeout_s=self._timeouts.collective_timeout_s,
                        )
                    )
                    waiter.wait(forming)
                    assert forming.group is not None
                    self._groups[group] = forming.group
        except RuntimeError as error:
            raise CommunicationError(None, f"the communicators cannot be formed: {error}") from None
        finally:
            self._sockets.settle()
        self._world = membership.members
        self._raise_if_interrupted()

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        tensor = tensor.cpu()
        try:
            work = self._groups[self._world].send([tensor], self._world.index(peer), tag)
        except RuntimeError as error:
            raise CommunicationError(peer, str(error)) from None
        return self._message(work, peer, tensor)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        arriving = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        try:
            work = self._groups[self._world].recv([arriving], self._world.index(peer), tag)
        except RuntimeError as error:
            raise CommunicationError(peer, str(error)) from None
        return self._message(work, peer, arriving, None if arriving is tensor else tensor)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        return self._reduce(tensor, group, _REDUCTIONS)

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        return self._reduce(ballot, group, _MESSAGES)

    def interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        self._sockets.shut_down()
        if now - self._interrupted_at > _CALL_OFF_AFTER_S:
            with self._lock:
                for waiter in self._waiters:
                    waiter.call_off()

    def close(self) -> None:
        # First the connections, so that the groups' destructors find nothing to wait for.
        self._sockets.close()
        with self._lock:
            waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            waiter.stop()
        dead = _Dead(self._groups, self._reductions, waiters)
        self._groups, self._reductions = {}, []
        if not dead.at_rest(within_s=_CALL_OFF_AFTER_S):
            _DEAD.append(dead)

    def _reduce(self, tensor: Tensor, group: tuple[int, ...], waiter: int) -> InFlight:
        host = tensor.cpu()
        try:
            work = self._groups[group].allreduce([host])
        except RuntimeError as error:
            raise CommunicationError(None, str(error)) from None
        self._reductions = [earlier for earlier in self._reductions if not earlier.is_completed()]
        self._reductions.append(work)
        return _Message(work, None, host, None if host is tensor else tensor, self._waiters[waiter])

    def _message(self, work: Work, peer: int, host: Tensor, target: Tensor | None = None) -> InFlight:
        return _Message(work, peer, host, target, self._waiters[_MESSAGES])

    def _raise_if_interrupted(self) -> None:
        if self._interrupted_at is not None:
            raise CommunicationError(None, "the generation is over")


@dataclass(slots=True)
class _Forming:
    """A group that is being formed.

    Whoever is to be connected to, and not to connect, has no connection yet that could be ended: where the other side
    does not come because its generation is over already, gloo sleeps until its timeout. So this is waited for as
    messages are.
    """

    form: Callable[[], Group]
    group: Group | None = None

    def wait(self) -> None:
        self.group = self.form()


@dataclass(slots=True)
class _Message:
    """A gloo message, with the host tensor it reads or fills and the accelerator's tensor that this is copied to."""

    work: Work | None
    peer: int | None
    host: Tensor
    target: Tensor | None
    waiter: Waiter

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            self.waiter.wait(self.work)
        except RuntimeError as error:
            raise CommunicationError(self.peer, str(error)) from None
        finally:
            # A live Work keeps the group's sockets open after the group is gone.
            self.work = None
        if self.target is not None:
            self.target.copy_(self.host)


@dataclass(slots=True)
class _Dead:
    """Groups whose generation is over, with an operation in them that may still be asleep.

    The destructor of a group waits for its reductions, and holds the interpreter's lock meanwhile.
    """

    groups: dict[tuple[int, ...], Group]
    reductions: list[Work]
    waiters: tuple[Waiter, ...]

    def at_rest(self, *, within_s: float = 0.0) -> bool:
        deadline = time.monotonic() + within_s
        for waiter in self.waiters:
            waiter.join(max(0.0, deadline - time.monotonic()))
            if waiter.asleep:
                return False
        while not all(reduction.is_completed() for reduction in self.reductions):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True


_DEAD: list[_Dead] = []


def _bury_the_dead() -> None:
    """Let go of the groups in which nothing sleeps any more."""
    _DEAD[:] = [dead for dead in _DEAD if not dead.at_rest()]
