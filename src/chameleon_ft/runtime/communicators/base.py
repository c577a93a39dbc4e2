"""What the rest of the runtime knows of a communication library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from chameleon_ft.control.wire.address import split_address
from chameleon_ft.errors import ChameleonError
from chameleon_ft.runtime.communicators.c10d import Store, connect_store

__all__ = ["Channel", "CommunicationError", "Communicators", "InFlight", "Membership", "open_store"]


class CommunicationError(ChameleonError):
    """A message could not be delivered: its other end is gone, or the communicators were interrupted.

    `peer` is the worker at the other end; None for a collective, which does not tell.
    """

    def __init__(self, peer: int | None, reason: str) -> None:
        self.peer = peer
        super().__init__(f"{'a collective' if peer is None else f'a message with worker {peer}'} failed: {reason}")


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """A way that messages take: from one worker to another, forward (activations) or backward (gradients)."""

    sender: int
    receiver: int
    forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who takes part in a generation and which groups of them reduce something together."""

    generation: int
    worker: int
    """This rank's worker."""
    members: tuple[int, ...]
    """All workers of the generation, ascending."""
    groups: tuple[tuple[int, ...], ...]
    """Groups that all-reduce, each ascending, in an order that is the same on every worker."""
    channels: tuple[Channel, ...]
    """Channels that this rank sends or receives on."""
    store: str
    """host:port of the rendezvous store."""


class InFlight(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Block until the tensor has arrived, or may be reused by its sender. Raises CommunicationError."""


class Communicators(Protocol):
    """The communicators of one generation.

    All methods but `interrupt` are called by the training thread. An object serves one generation: a new one is made
    after `close`.
    """

    def open(self, membership: Membership) -> None:
        """Connect with all members. Raises CommunicationError where that fails or is interrupted."""

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        """Start sending a contiguous tensor, which must not be changed until it has arrived.

        Where links are emulated, it takes the time of `stands_for_bytes`, and such messages of a worker go out one
        after the other; by default that of its own bytes, as they are scaled there.

        Keep the tensor and what this returns until the message has arrived: until it has been waited for, or an answer
        to it has been received, or the step's vote is complete. Then drop them.
        """

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        """Start receiving into `tensor`.

        An even tag is an activation's, an odd one a gradient's. Messages of one tag between two workers arrive in the
        order they were sent.
        """

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        """Start summing `tensor` in place over `group`, which is `members` or one of `groups`.

        Everyone issues those that it takes part in in one order. They are waited for in that order too, by the
        training thread or by one other thread at the same time as the training thread waits for something else.
        """

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        """Start summing a few numbers, in host memory, in place over `group`, which is as in `all_reduce`."""

    def interrupt(self) -> None:
        """Make every call that is blocked, and every later one, end with CommunicationError.

        Called from any thread, as often as it takes until those that wait have come back.
        """

    def close(self) -> None:
        """Let go of everything. May be called in any state."""


def open_store(address: str, *, timeout_s: float) -> Store:
    """Connect to the rendezvous store at `address`, which is host:port. Raises CommunicationError."""
    host, port = split_address(address)
    try:
        return connect_store(host, port, timeout_s=timeout_s)
    except (RuntimeError, OSError) as error:
        raise CommunicationError(None, f"the rendezvous store at {address} cannot be reached: {error}") from None
