"""Threads that take the part of ranks: messages and sums between them, until they are cut off."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from chameleon_ft.worker.communicators.base import CommunicationError, InFlight, Membership


class Switchboard:
    """Connects workers that are threads of this process, until it is cut: by a test, or after so many sums."""

    def __init__(self, sums: int = -1) -> None:
        self.cut = threading.Event()
        self.sums_left = sums
        self.lock = threading.Lock()
        self.messages: defaultdict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self.sums: dict[tuple[tuple[int, ...], int], list[Tensor]] = defaultdict(list)

    def queue(self, key: tuple[int, int, int]) -> SimpleQueue[Tensor]:
        """Return the messages of (sender, receiver, tag)."""
        with self.lock:  # two threads at once may each make one, because a garbage collection can come in between
            return self.messages[key]

    def shares(self, group: tuple[int, ...], number: int) -> list[Tensor]:
        """Return the summands of a sum so far: one of each member of the group in the end."""
        with self.lock:
            return self.sums[group, number]

    def await_(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.cut.wait(0.0005):
                raise CommunicationError(None, "the generation is over")


@dataclass
class Line:
    """The communicators of one worker: every message is there when it is posted, and nothing after the cut."""

    worker: int
    board: Switchboard
    reductions: defaultdict[tuple[int, ...], int] = field(default_factory=lambda: defaultdict(int))

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        if self.board.cut.is_set():
            raise CommunicationError(peer, "the generation is over")
        self.board.queue((self.worker, peer, tag)).put(tensor.clone())
        return Waiting(lambda: None)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        queue = self.board.queue((peer, self.worker, tag))

        def wait() -> None:
            while True:
                try:
                    tensor.copy_(queue.get(timeout=0.0005))
                except Empty:
                    if self.board.cut.is_set():
                        raise CommunicationError(peer, "the generation is over") from None
                else:
                    return

        return Waiting(wait)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        number = self.reductions[group]
        self.reductions[group] += 1
        shares = self.board.shares(group, number)

        def wait() -> None:
            with self.board.lock:
                shares.append(tensor.clone())
            self.board.await_(lambda: len(shares) == len(group))
            with self.board.lock:
                if self.board.sums_left == 0:
                    self.board.cut.set()
                    raise CommunicationError(None, "the generation is over")
                self.board.sums_left -= 1
            tensor.copy_(torch.stack(shares).sum(0))

        return Waiting(wait)

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        return self.all_reduce(ballot, group)

    def open(self, membership: Membership) -> None: ...

    def settle(self) -> None: ...

    def unreached(self) -> dict[int, float]:
        return {}

    def interrupt(self) -> None:
        self.board.cut.set()

    def close(self) -> None: ...


@dataclass
class Waiting:
    wait: Callable[[], None]
