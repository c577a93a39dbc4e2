"""Communicators in two parts: from device to device by the device's own library, and through host memory by gloo.

`kind_on_device` of `base` says which message goes where. The host part, whose waits can be interrupted and whose
messages have tags, is connected first; the device part is formed beside what follows. So votes, layers that move,
snapshots, streams and the rest of an interrupted step never wait for it. Until all members have it, which they tell
each other with their votes, the host part carries everything, as far as that takes no longer than to wait.

The device part relies on the documented behaviour of NCCL and of torch's process group for it; other libraries of this
kind differ by the facts in `DeviceLibrary`.

- There are no tags: each channel has a communicator of its own, and programs are checked for equal order at both ends.
- Communicators are made in one order on all ranks. If they were made at first use, in the order of the programs, two
  ranks could wait for each other. Each then carries one element, so that nothing is left to be done at first use.
- A wait orders streams and does not block the host, and an operation that is aborted ends like any other and leaves
  garbage. So whoever waits records an event behind the operation, on a stream that nothing else uses, and polls it. An
  operation counts if the event has passed and no communicator had been aborted by then. No work is queued behind one
  before: a kernel of the model behind an aborted receive would run on garbage.
- An operation that does not count may still write, until it is aborted. So its memory is held until then.
- Torch has few streams of each priority, and takes them in turn. Those that watch, and those that compute, must be none
  of the library's, which may be held by a message that is posted ahead; and no two communicators may have one.
- A communicator with nothing in flight when its generation is interrupted serves the next one, if all its members say
  so and have issued equally many operations on it. Of a group that has lost members it is shrunk to those that are
  left, where the library can do that. The others are aborted.
- Torch waits for a communicator that is being formed with a lock that its abort needs. So the members tell each other
  through host memory that they have begun, and only then use it: what is left is the time that forming takes.
- To interrupt is to abort communicators at the same time, from threads: one after the other, an abort may wait for
  a kernel that only another abort would end. Where a library has no abort, the process ends if something is in flight,
  and this worker counts as lost.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from chameleon_ft.config import BACKENDS, DeviceLibrary, RunConfig, Timeouts
from chameleon_ft.host.fork_server import exit_immediately
from chameleon_ft.registry import imported
from chameleon_ft.schedule.channels import Channel
from chameleon_ft.worker.communicators.base import (
    CommunicationError,
    Communicators,
    InFlight,
    Membership,
    Tag,
    issue,
    kind_on_device,
)
from chameleon_ft.worker.communicators.gloo import GlooCommunicators
from chameleon_ft.worker.device import exclusive_stream

_ProcessGroup = Any  # torch's stubs of a backend leave out send, recv and allreduce
_Key = Channel | tuple[int, ...]
"""A channel, or a group that reduces."""
_Draw = Callable[[], torch.Stream]
"""Takes the next stream of the pool."""

# Of each channel and group before the device part is used: about as much as gloo carries while a library forms it.
_MAX_HOST_BYTES: Final = 64 << 20
# The pause between two looks at an event grows with the time that has passed, so that it delays a wait by little.
_MIN_PAUSE_S: Final = 2e-5
_MAX_PAUSE_S: Final = 1e-3
_PAUSE_SHARE: Final = 0.05


class TwoPartCommunicators:
    """The communicators of one generation: `device` from device to device, `host` for all else."""

    def __init__(self, device: DevicePart, host: Communicators) -> None:
        self._device = device
        self._host = host
        self._worker = -1
        self._is_formed = threading.Event()
        self._error = ""
        # Whether all members have formed the device part. It becomes true between the same two messages at both ends.
        self._is_agreed = False
        self._host_bytes: dict[_Key, int] = {}

    @classmethod
    def of_rank(cls, config: RunConfig, *, address: str, device: torch.device) -> Self:
        """Return those of a rank. The library of the device finds the addresses by itself."""
        library = BACKENDS[config.backend].library
        assert library is not None, "a backend that names these communicators has a library"
        return cls(
            DevicePart(library, timeouts=config.timeouts, device=device),
            GlooCommunicators.of_rank(config, address=address, device=device),
        )

    def open(self, membership: Membership) -> None:
        self._worker = membership.worker
        self._host.open(membership)
        threading.Thread(target=self._form, args=(membership,), name="device-groups", daemon=True).start()

    def settle(self) -> None:
        self._require_formed()
        self._is_agreed = True

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        if (made := self._between(self._worker, peer, tag, tensor)) is None:
            return self._host.send(tensor, peer=peer, tag=tag, stands_for_bytes=stands_for_bytes)
        return made.send(tensor, peer)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        if (made := self._between(peer, self._worker, tag, tensor)) is None:
            return self._host.receive(tensor, peer=peer, tag=tag)
        return made.receive(tensor, peer)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        if (made := self._formed(group, tensor)) is None:
            return self._host.all_reduce(tensor, group)
        return made.all_reduce(tensor)

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        if self._is_agreed:
            return self._host.vote(ballot, group)
        is_formed = self._is_formed.is_set() and not self._error
        numbers = torch.cat([ballot, ballot.new_tensor([is_formed])])
        return _AgreeingVote(self._host.vote(numbers, group), numbers, ballot, len(group), self._agree)

    def unreached(self) -> Mapping[int, float]:
        return self._host.unreached()

    def interrupt(self) -> None:
        self._device.interrupt()
        self._host.interrupt()
        # The library may wait long for a member that is gone.
        self._end_forming("the generation is over")

    def close(self) -> None:
        self._device.close()
        self.interrupt()
        self._host.close()

    def _between(self, sender: int, receiver: int, tag: int, tensor: Tensor) -> _Communicator | None:
        """Return what carries a message from device to device; None if it goes through host memory."""
        kind = kind_on_device(tag)
        return None if kind is None else self._formed(Channel(sender, receiver, kind), tensor)

    def _formed(self, key: _Key, tensor: Tensor) -> _Communicator | None:
        """Return the communicator that carries or reduces a tensor; None if the host part does."""
        if not self._is_agreed:
            num_bytes = self._host_bytes[key] = self._host_bytes.get(key, 0) + tensor.nbytes
            if num_bytes <= _MAX_HOST_BYTES and not self._error:
                return None
        self._require_formed()
        return self._device.formed.get(key)

    def _agree(self) -> None:
        self._is_agreed = True

    def _require_formed(self) -> None:
        self._is_formed.wait()
        if self._error:
            raise CommunicationError(None, self._error)

    def _form(self, membership: Membership) -> None:
        try:
            # Or it would take connections of the device's library for its own.
            self._host.settle()
            start_s = time.monotonic()
            self._device.form(membership, self._host)
            if membership.connected is not None:
                membership.connected(*self._device.counts, time.monotonic() - start_s)
            self._end_forming("")
        except BaseException as error:  # noqa: BLE001 - `settle` raises it
            self._end_forming(f"the communicators between devices cannot be formed: {error}")

    def _end_forming(self, error: str) -> None:
        if not self._is_formed.is_set():
            self._error = error
            self._is_formed.set()


@dataclass(frozen=True, slots=True)
class _AgreeingVote:
    """A vote with one more number: how many members have formed the device part."""

    vote: InFlight
    numbers: Tensor
    ballot: Tensor
    members: int
    agreed: Callable[[], None]

    def wait(self) -> None:
        """See `InFlight`."""
        self.vote.wait()
        self.ballot.copy_(self.numbers[:-1])
        if round(float(self.numbers[-1])) == self.members:
            self.agreed()


class DevicePart:
    """A communicator for each channel of a rank, and one for each group it reduces in, by the library of its device.

    Attributes:
        formed: those that can be used.
    """

    def __init__(self, library: DeviceLibrary, *, timeouts: Timeouts, device: torch.device) -> None:
        os.environ.update({name: value.format(timeouts.rendezvous_s) for name, value in library.environment.items()})
        self.formed: dict[_Key, _Communicator] = {}
        self._library = library
        self._timeouts = timeouts
        # Any thread may form them, and each has a current device of its own.
        self._device = device
        priority = library.stream_priority
        self._draw: _Draw | None = None if priority is None else partial(torch.Stream, device, priority=priority)
        self._interrupted = threading.Event()
        self._lock = threading.Lock()
        self._num_kept = 0
        self._made: dict[_Key, _Communicator] = {}
        # A store in Python must outlive the groups.
        self._store: c10d.Store | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """How many of those that can be used served the generation before, and how many are new."""
        return self._num_kept, len(self.formed) - self._num_kept

    def form(self, membership: Membership, host: Communicators) -> None:
        """Form all, with the other members. Raises CommunicationError, or RuntimeError as the library does."""
        worker, generation = membership.worker, membership.generation
        store = self._store = membership.rendezvous.open_store(timeout_s=self._timeouts.rendezvous_s)
        names: dict[_Key, str] = {
            each: f"channel-{each.sender}-{each.receiver}-{each.kind}" for each in sorted(membership.channels)
        }
        names |= {group: f"group-{index}" for index, group in enumerate(membership.groups) if worker in group}
        peers = {member for key in names for member in _members_of(key)} - {worker}
        made: dict[_Key, _Communicator] = {}
        with _KEPT_LOCK:
            kept = dict(_KEPT)
            _KEPT.clear()
        try:
            origins = self._agreed(names, kept, worker, host)
            _abort([kept.pop(key) for key in tuple(kept) if key not in origins.values()])
            taken = {
                key: kept.pop(key).of_generation(self._interrupted) for key, origin in origins.items() if origin == key
            }
            self._add(taken)
            self.formed |= taken
            self._num_kept = len(self.formed)
            for key, origin in origins.items():
                if origin is None:
                    own = c10d.PrefixStore(f"generation-{generation}/device-{names[key]}", store)
                    members = _members_of(key)
                    made[key] = self._make(key, own, members.index(worker), len(members), generation=generation)
            _exchanged({peer: torch.zeros(1) for peer in peers}, host)
            shrunk = self._shrink(kept, origins, generation)
        finally:
            _abort(kept.values())
        for key, communicator in {**made, **shrunk}.items():
            element = torch.zeros(1, device=self._device)
            if not isinstance(key, Channel):
                first = communicator.all_reduce(element)
            elif key.sender == worker:
                first = communicator.send(element, key.receiver)
            else:
                first = communicator.receive(element, key.sender)
            first.wait()
            self.formed[key] = communicator

    def interrupt(self) -> None:
        """Abort the communicators, except those with nothing in flight, which `_KEPT` keeps."""
        with self._lock:
            self._interrupted.set()
            made, self._made = self._made, {}
        with _KEPT_LOCK:
            kept = {key: each for key, each in made.items() if key in self.formed and each.is_idle()}
            _abort(_KEPT[key] for key in kept if key in _KEPT)
            _KEPT.update(kept)
        _abort(each for key, each in made.items() if key not in kept)

    def close(self) -> None:
        """Abort all communicators, unless the generation was interrupted."""
        with self._lock:
            self._interrupted.set()
            made, self._made = self._made, {}
        _abort(made.values())

    def _agreed(
        self, keys: Collection[_Key], kept: Mapping[_Key, _Communicator], worker: int, host: Communicators
    ) -> dict[_Key, _Key | None]:
        """Agree with all members on what becomes of each key.

        Return its own key if its communicator has outlived its generation, that of a group to be shrunk, and None if it
        is formed anew. Those for which a member has no stream left are left out, groups last: the host part has them.
        """
        num_free = _STREAMS.num_free(self._draw)
        origins: dict[_Key, _Key | None] = {}
        claims: dict[_Key, tuple[int, int]] = {}
        for key in sorted(keys, key=lambda key: key.kind if isinstance(key, Channel) else -1):
            origin = origins[key] = key if key in kept else _larger(key, kept, keys)
            if origin != key:
                num_free -= 1
            if origin != key and num_free < 0:
                claims[key] = _NO_STREAM
            elif origin is None or kept[origin].number == -1:
                claims[key] = _NEW
            else:
                claims[key] = kept[origin].number, zlib.crc32(repr(origin).encode())
        peers = {member for key in claims for member in _members_of(key)} - {worker}
        shared = {peer: [key for key in claims if peer in _members_of(key)] for peer in peers}
        own = {peer: torch.tensor([claims[key] for key in sorted(shared[peer], key=repr)]) for peer in peers}
        found = {key: {claim} for key, claim in claims.items()}
        for peer, theirs in _exchanged(own, host).items():
            for key, claim in zip(sorted(shared[peer], key=repr), theirs.tolist(), strict=True):
                found[key].add(tuple(claim))
        return {
            key: origins[key] if len(found[key]) == 1 and _NEW not in found[key] else None
            for key in keys
            if _NO_STREAM not in found[key]
        }

    def _add(self, made: Mapping[_Key, _Communicator]) -> None:
        """Have `interrupt` abort or keep communicators. Raises CommunicationError if it has been called already."""
        with self._lock:
            if not self._interrupted.is_set():
                self._made.update(made)
                return
        _abort(made.values())
        raise CommunicationError(None, "the generation is over")

    def _make(self, key: _Key, store: c10d.Store, rank: int, size: int, *, generation: int) -> _Communicator:
        """Make a communicator. Raises CommunicationError if the generation is over."""
        library: Any = imported(self._library.process_group)
        options = library.Options()
        options.is_high_priority_stream = True
        options._timeout = timedelta(seconds=self._timeouts.transport_s)
        if self._library.is_nonblocking:
            options.config.blocking = 0
        made = self._communicator(partial(library, store, rank, size, options), generation)
        self._add({key: made})
        made.group.eager_connect_single_device(self._device)
        if self._interrupted.is_set():
            # The abort may have come first.
            made.abort()
            raise CommunicationError(None, "the generation is over")
        return made

    def _shrink(
        self, kept: Mapping[_Key, _Communicator], origins: Mapping[_Key, _Key | None], generation: int
    ) -> dict[_Key, _Communicator]:
        """Shrink kept groups to the members of others, with all of these, whose calls wait for each other."""
        shrunk: dict[_Key, _Communicator] = {}
        for key, origin in origins.items():
            if origin in kept and origin is not None:
                without = [rank for rank, member in enumerate(_members_of(origin)) if member not in _members_of(key)]
                shrunk[key] = self._communicator(partial(kept[origin].group.shrink, without), generation)
        # Only now may the generation be over, or others would wait for what is not shrunk any more.
        self._add(shrunk)
        return shrunk

    def _communicator(self, make: Callable[[], _ProcessGroup], generation: int) -> _Communicator:
        """Make a communicator that has a stream for itself."""
        stream = None if self._draw is None else _STREAMS.take(self._draw, timeout_s=self._timeouts.rendezvous_s)
        try:
            group = make()
        except BaseException:
            if stream is not None:
                _STREAMS.release(stream)
            raise
        return _Communicator(
            self._library, group, self._device, stream=stream, number=generation << 32, interrupted=self._interrupted
        )


_NEW: Final = (-1, 0)
_NO_STREAM: Final = (-2, 0)
_KEPT: Final[dict[_Key, _Communicator]] = {}
"""Communicators that have outlived their generation; no message is on its way on them."""
_KEPT_LOCK: Final = threading.Lock()


def _members_of(key: _Key) -> tuple[int, ...]:
    return (key.sender, key.receiver) if isinstance(key, Channel) else key


def _larger(key: _Key, kept: Mapping[_Key, _Communicator], keys: Collection[_Key]) -> _Key | None:
    """Return the smallest group beside `keys` that can be shrunk to the members of another; None if there is none."""
    if isinstance(key, Channel):
        return None
    groups = [of for of, each in kept.items() if not isinstance(of, Channel) and of not in keys and each.can_shrink]
    return min((of for of in groups if set(key) < set(of)), key=lambda of: (len(of), of), default=None)


def _exchanged(own: Mapping[int, Tensor], host: Communicators) -> dict[int, Tensor]:
    """Send each peer a tensor through host memory; return those of the peers, of the same shapes."""
    theirs = {peer: torch.empty_like(tensor) for peer, tensor in own.items()}
    on_their_way: list[InFlight] = []
    for peer in sorted(own):
        on_their_way.append(host.receive(theirs[peer], peer=peer, tag=Tag.KEPT))
        on_their_way.append(host.send(own[peer], peer=peer, tag=Tag.KEPT))
    for each in on_their_way:
        each.wait()
    return theirs


def _abort(communicators: Iterable[_Communicator]) -> None:
    """Abort communicators; the threads hold what operations may still write to until these have ended."""
    for each in communicators:
        threading.Thread(target=each.abort, name="abort", daemon=True).start()


class _Streams:
    """The streams that communicators have.

    For each, torch takes the next one of a pool, whether or not it is in use. A message that is posted ahead would hold
    the messages of another communicator on its stream, which its sender may wait for. So those in use are passed over.
    """

    def __init__(self) -> None:
        self._pool: list[torch.Stream] = []
        self._in_use: dict[int, bool] = {}
        """Their place in the pool -> whether they are about to be released."""
        self._changed = threading.Condition()

    def num_free(self, draw: _Draw | None) -> float:
        """Return how many more can be taken, once those that are about to be released are."""
        if draw is None:
            return math.inf
        with self._changed:
            self._learn(draw)
            return len(self._pool) - sum(not is_leaving for is_leaving in self._in_use.values())

    def take(self, draw: _Draw, *, timeout_s: float) -> int:
        """Have the next communicator take a stream that no other has; return its place. Raises RuntimeError."""
        with self._changed:
            self._learn(draw)
            if not self._changed.wait_for(lambda: len(self._in_use) < len(self._pool), timeout_s):
                raise RuntimeError("torch has no stream left for another communicator")
            while (place := (self._pool.index(draw()) + 1) % len(self._pool)) in self._in_use:
                pass
            self._in_use[place] = False
            return place

    def leave(self, place: int) -> None:
        """Note that a stream is about to be released."""
        with self._changed:
            self._in_use[place] = True

    def release(self, place: int) -> None:
        with self._changed:
            self._in_use.pop(place, None)
            self._changed.notify_all()

    def _learn(self, draw: _Draw) -> None:
        """Draw the whole pool once, in its order."""
        if not self._pool:
            self._pool.append(draw())
            while (stream := draw()) != self._pool[0]:
                self._pool.append(stream)


_STREAMS: Final = _Streams()


class _Communicator:
    """A group of the library in a generation, and its operations in flight, which end in their order.

    Attributes:
        number: the generation in which it was formed, and how many operations this rank has issued on it since then;
            -1 if one could not be issued.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        group: _ProcessGroup,
        device: torch.device,
        *,
        stream: int | None,
        number: int,
        interrupted: threading.Event,
    ) -> None:
        self.group = group
        self.device = device
        self.interrupted = interrupted
        self.number = number
        self._stream = stream
        self._library = library
        self._lock = threading.Lock()
        self._in_flight: deque[_Operation] = deque()

    def send(self, tensor: Tensor, peer: int) -> InFlight:
        return self._issue(peer, tensor, self.group.send, 1, 0)

    def receive(self, tensor: Tensor, peer: int) -> InFlight:
        return self._issue(peer, tensor, self.group.recv, 0, 0)

    def all_reduce(self, tensor: Tensor) -> InFlight:
        return self._issue(None, tensor, self.group.allreduce)

    def is_idle(self) -> bool:
        """Return whether nothing is in flight; once it is interrupted, that stays so."""
        # An operation that is being issued may wait long.
        if not self._lock.acquire(blocking=False):
            return False
        self._lock.release()
        return self._release()

    def of_generation(self, interrupted: threading.Event) -> _Communicator:
        """Return this communicator for the next generation; threads of the former one cannot use it any more."""
        return _Communicator(
            self._library,
            self.group,
            self.device,
            stream=self._stream,
            number=self.number,
            interrupted=interrupted,
        )

    @property
    def can_shrink(self) -> bool:
        """Whether the library, in this version of torch, can form a communicator of some of its members from it."""
        return bool(getattr(self.group, "supports_shrinking", False))

    def abort(self) -> None:
        """End all operations, and hold the memory that they may still write to until they have ended."""
        if self._stream is not None:
            _STREAMS.leave(self._stream)
        if self._library.abort:
            name, *arguments = self._library.abort
            getattr(self.group, name)(*arguments)
        elif not self._release():
            print("operations between devices cannot be ended within the process", file=sys.stderr)
            exit_immediately(1)
        with self._lock:
            self._in_flight.clear()
        if self._stream is not None:
            _STREAMS.release(self._stream)

    def _release(self) -> bool:
        """Release the memory of operations that have ended; return whether all have."""
        with self._lock:
            while self._in_flight and self._in_flight[0].work.is_completed():
                self._in_flight.popleft()
            return not self._in_flight

    def _issue(
        self, peer: int | None, tensor: Tensor, operation: Callable[..., c10d.Work], *arguments: int
    ) -> InFlight:
        self._release()
        with self._lock:
            if self.interrupted.is_set():
                raise CommunicationError(peer, "the generation is over")
            # One that fails leaves the communicator in no state that members could agree on.
            before, self.number = self.number, -1
            work = issue(peer, operation, [tensor], *arguments)
            self.number = before + 1
            self._in_flight.append(_Operation(self, peer, tensor, work))
            return self._in_flight[-1]


@dataclass(slots=True, eq=False)
class _Operation:
    """An operation in flight."""

    communicator: _Communicator
    peer: int | None
    tensor: Tensor
    work: c10d.Work

    def wait(self) -> None:
        """See `InFlight`."""
        is_over = self.communicator.interrupted.is_set
        # It is held until the operation has ended, and so would be the event behind another.
        with exclusive_stream(self.communicator.device) as stream:
            try:
                self.work.wait()
                ended = stream.record_event()
            except RuntimeError as error:
                raise CommunicationError(self.peer, str(error)) from None
            since_s = time.monotonic()
            while not ended.query() and not is_over():
                waited_s = time.monotonic() - since_s
                time.sleep(min(max(_MIN_PAUSE_S, _PAUSE_SHARE * waited_s), _MAX_PAUSE_S))
            if is_over():
                # It may have ended by being aborted.
                raise CommunicationError(self.peer, "the generation is over")
