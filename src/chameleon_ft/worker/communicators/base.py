"""The interface of communication to the rest of the runtime, with the tags of all messages and where they go.

Votes go by messages between single ranks, because the collectives of a library are slow for a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from chameleon_ft.errors import ChameleonError
from chameleon_ft.schedule.channels import Channel, Kind


class CommunicationError(ChameleonError):
    """A message could not be delivered: its other end is gone, or the communicators were interrupted.

    `peer` is the worker at the other end; None for a collective, which does not report it.
    """

    def __init__(self, peer: int | None, reason: str) -> None:
        self.peer = peer
        super().__init__(f"{'a collective' if peer is None else f'a message with worker {peer}'} failed: {reason}")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the members of a generation find and recognize each other.

    Attributes:
        open_store: called with `timeout_s`, connects to the rendezvous store. Raises CommunicationError.
        key: a secret of the members, of this generation alone; connections on which it is not known are refused.
    """

    open_store: Callable[..., Store]
    key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The workers of a generation and the groups of them that reduce together.

    Attributes:
        worker: this rank's worker.
        members: all workers of the generation, ascending.
        groups: groups that all-reduce, each ascending, in one order on all workers.
        channels: channels that this rank sends or receives on.
        rendezvous: how this rank finds and recognizes the others.
        connected: is called with (communicators kept, new ones, seconds) once devices are connected, if any are.
    """

    generation: int
    worker: int
    members: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    channels: tuple[Channel, ...]
    rendezvous: Rendezvous
    connected: Callable[[int, int, float], None] | None = None


class InFlight(Protocol):
    """A message in flight."""

    def wait(self) -> None:
        """Block until the tensor has arrived, or may be reused by its sender. Raises CommunicationError."""


class Communicators(Protocol):
    """The communicators of one generation.

    Any thread may send and receive; messages of one tag from one worker to another have one sending and one receiving
    thread. All reductions of a group are issued by one thread, and so are the votes.
    """

    def open(self, membership: Membership) -> None:
        """Connect with all members. Raises CommunicationError if that fails or is interrupted.

        The groups that reduce may still be formed beside what follows.
        """

    def settle(self) -> None:
        """Wait until all groups are formed, as each of their reductions does. Raises CommunicationError.

        All members call it before any of them sends, or none does.
        """

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        """Start sending a contiguous tensor, which must not change until it has arrived.

        Keep the tensor and the returned object until a wait for the message, an answer to it, or the step's vote is
        complete. Then drop them.

        An emulated link takes the time of `stands_for_bytes`, and sends a worker's messages one by one; by default it
        takes the time of the tensor's own bytes, scaled.
        """

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        """Start receiving into `tensor`.

        Messages of one tag between two workers arrive in the order they were sent.
        """

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        """Start summing `tensor` in place over `group`, which is `members` or one of `groups`.

        All workers issue the reductions that they share in one order. One thread issues them and waits for them, in
        that order, while the training thread sends and receives.
        """

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        """Start summing a few numbers, in host memory, in place over `group`, which is as in `all_reduce`.

        This rank has no result of an operation, reduction or updated parameters on their way meanwhile.
        """

    def unreached(self) -> Mapping[int, float]:
        """Return worker -> for how many seconds it has not answered at all, of those that do not.

        Called from any thread and in any state, also while `open` waits. Empty if the library does not tell.
        """

    def interrupt(self) -> None:
        """Make every blocked call, and every later one, end with CommunicationError.

        May be called from any thread, and repeatedly until the blocked calls have returned.
        """

    def close(self) -> None:
        """Release everything. May be called in any state."""


def issue(peer: int | None, operation: Callable[..., Work], *arguments: object) -> Work:
    """Start an operation of torch with `peer`. Raises CommunicationError where torch raises RuntimeError."""
    try:
        return operation(*arguments)
    except RuntimeError as error:
        raise CommunicationError(peer, str(error)) from None


@unique
class Tag(IntEnum):
    """Tags of messages beside the results of operations, above which they begin; they fit into 32 bits."""

    VOTE = 1 << 28
    UPDATED_PARAMETERS = VOTE + 2
    """From the owners of slices to the other holders of a layer, after each update."""
    SNAPSHOT = VOTE + 4
    SLICE = VOTE + 6
    """Slices of optimizer state, while no step runs."""
    PULL_REQUEST = VOTE + 8
    """A worker requests a layer during training, and receives these:"""
    PULLED_LAYER = VOTE + 10
    PULLED_SUM = VOTE + 12
    PULLED_PARAMETERS = VOTE + 14
    STREAM = VOTE + 16
    """From the reader of a stream: the samples of each step, and the position after it."""
    LAYER = VOTE + 18
    """Layers that move while no step runs."""
    PARAMETERS_AGAIN = VOTE + 20
    """Updated parameters, if a failure may have cut their exchange short."""
    KEPT = VOTE + 22
    """How many operations each end has issued on the communicators between devices that both may keep."""


_REST: Final = 1 << 27


def tag_of(result: tuple[bool, int, int], *, num_layers: int, is_rest: bool = False) -> int:
    """Return the tag of a result, of (forward, micro-batch, layer); different for all of a step.

    Args:
        is_rest: whether the rest of an interrupted step computes it.
    """
    forward, micro_batch, layer = result
    return 2 * (micro_batch * num_layers + layer) + (0 if forward else 1) + (_REST if is_rest else 0)


def kind_on_device(tag: int) -> Kind | None:
    """Return which kind of channel between devices carries a message; None if it goes through host memory.

    This is the one place that says so. Between devices go the results of operations, in the order of the checked
    program, and the parameters after each update; and all reductions of gradients, which are no messages. The results
    of the rest of a step do not: some are sent again, in any order, and between devices only the order tells messages
    apart.
    """
    if tag == Tag.UPDATED_PARAMETERS:
        return Kind.PARAMETERS
    return None if tag >= _REST else Kind.ACTIVATION if tag % 2 == 0 else Kind.GRADIENT


_CHILDREN: Final = 8


class TreeVote:
    """A sum of a few numbers over a tree of ranks: sums of ballots go up to the root, and the total comes down.

    All n ranks together send 2 (n - 1) messages, and two for each level of the tree are sent one after the other. In
    the all-reduce of gloo, which is a ring, each rank sends more than 2 (n - 1) messages one after the other. The order
    of the additions depends on `group` alone. A rank contributes once it waits.

    Keep the object until the next vote is complete, because messages may still be on their way. The ballot of this
    rank, of shape [numbers], is in host memory, and the total replaces it. The workers of `group` are ascending.
    """

    def __init__(self, ballot: Tensor, *, worker: int, group: tuple[int, ...], communicators: Communicators) -> None:
        position = group.index(worker)
        self._parent = group[(position - 1) // _CHILDREN] if position > 0 else None
        self._children = group[_CHILDREN * position + 1 : _CHILDREN * (position + 1) + 1]
        self._communicators = communicators
        self._ballot = ballot
        self._total = torch.empty_like(ballot)
        # Receives are posted first, so that no message waits for its receiver.
        self._ballots = [(torch.empty_like(ballot), child) for child in self._children]
        self._arriving = [communicators.receive(each, peer=child, tag=Tag.VOTE) for each, child in self._ballots]
        if self._parent is not None:
            self._deciding = communicators.receive(self._total, peer=self._parent, tag=Tag.VOTE)

    def wait(self) -> None:
        """Block until the total is there. Raises CommunicationError."""
        for arriving, (ballot, _) in zip(self._arriving, self._ballots, strict=True):
            arriving.wait()
            self._ballot.add_(ballot)
        if self._parent is None:
            self._total.copy_(self._ballot)
        else:
            self._up = self._communicators.send(self._ballot, peer=self._parent, tag=Tag.VOTE)
            self._deciding.wait()
            self._ballot.copy_(self._total)
        self._down = [self._communicators.send(self._total, peer=child, tag=Tag.VOTE) for child in self._children]
