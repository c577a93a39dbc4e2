"""Communicators in two parts: from device to device by the device's own library, and through host memory by gloo.

`kind_on_device` of `base` says which message goes where. The host part, whose waits can be interrupted and whose
messages have tags, is connected first; the device part is formed beside what follows. So votes, layers that move,
snapshots, streams and the rest of an interrupted step never wait for it.

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
  of the library's, which may be held by a message that is posted ahead.
- A communicator with nothing in flight when its generation is interrupted serves the next one, if all its members say
  so and have issued equally many operations on it. The others are aborted.
- To interrupt is to abort communicators at the same time, from threads: one after the other, an abort may wait for
  a kernel that only another abort would end. Where a library has no abort, the process ends if something is in flight,
  and this worker counts as lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from chameleon_ft.config import BACKENDS, DeviceLibrary, RunConfig, Timeouts
from chameleon_ft.host.fork_server import exit_immediately
from chameleon_ft.registry import imported
from chameleon_ft.worker.communicators.base import (
    Channel,
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
        # Votes go over the connections of messages.
        self._host.open(replace(membership, groups=()))
        threading.Thread(target=self._form, args=(membership,), name="device-groups", daemon=True).start()

    def settle(self) -> None:
        self._is_formed.wait()
        if self._error:
            raise CommunicationError(None, self._error)

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        if (kind := kind_on_device(tag)) is None:
            return self._host.send(tensor, peer=peer, tag=tag, stands_for_bytes=stands_for_bytes)
        return self._formed(Channel(self._worker, peer, kind)).send(tensor, peer)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> InFlight:
        if (kind := kind_on_device(tag)) is None:
            return self._host.receive(tensor, peer=peer, tag=tag)
        return self._formed(Channel(peer, self._worker, kind)).receive(tensor, peer)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> InFlight:
        return self._formed(group).all_reduce(tensor)

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> InFlight:
        return self._host.vote(ballot, group)

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

    def _formed(self, key: _Key) -> _Communicator:
        if key not in self._device.formed:
            self.settle()
        return self._device.formed[key]

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
        made: dict[_Key, _Communicator] = {}
        self._take_over(tuple(names), worker, host)
        self._num_kept = len(self.formed)
        for key, name in names.items():
            if key not in self.formed:
                own = c10d.PrefixStore(f"generation-{generation}/device-{name}", store)
                members = _members_of(key)
                made[key] = self._make(key, own, members.index(worker), len(members), generation=generation)
        for key, communicator in made.items():
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

    def _take_over(self, keys: Sequence[_Key], worker: int, host: Communicators) -> None:
        """Take over what has outlived its generation, if all members have it in the same state; abort the rest."""
        with _KEPT_LOCK:
            kept = dict(_KEPT)
            _KEPT.clear()
        numbers = {key: kept[key].number if key in kept else -1 for key in keys}
        peers = sorted({member for key in keys for member in _members_of(key)} - {worker})
        shared = {peer: [key for key in keys if peer in _members_of(key)] for peer in peers}
        own = {peer: torch.tensor([numbers[key] for key in shared[peer]]) for peer in peers}
        theirs = {peer: torch.empty_like(tensor) for peer, tensor in own.items()}
        agreeing: list[InFlight] = []
        try:
            for peer in peers:
                agreeing.append(host.receive(theirs[peer], peer=peer, tag=Tag.KEPT))
                agreeing.append(host.send(own[peer], peer=peer, tag=Tag.KEPT))
            for each in agreeing:
                each.wait()
            different = {key for key, number in numbers.items() if number == -1}
            for peer, found in theirs.items():
                of_peer = zip(shared[peer], found.tolist(), strict=True)
                different |= {key for key, number in of_peer if number != numbers[key]}
            for key in keys:
                if key not in different:
                    taken = kept.pop(key).of_generation(self._interrupted)
                    self._add(key, taken)
                    self.formed[key] = taken
        finally:
            _abort(kept.values())

    def _add(self, key: _Key, made: _Communicator) -> None:
        """Have `interrupt` abort or keep a communicator. Raises CommunicationError if it has been called already."""
        with self._lock:
            if not self._interrupted.is_set():
                self._made[key] = made
                return
        _abort([made])
        raise CommunicationError(None, "the generation is over")

    def _make(self, key: _Key, store: c10d.Store, rank: int, size: int, *, generation: int) -> _Communicator:
        """Make a communicator. Raises CommunicationError if the generation is over."""
        library: Any = imported(self._library.process_group)
        options = library.Options()
        options.is_high_priority_stream = True
        options._timeout = timedelta(seconds=self._timeouts.transport_s)
        if self._library.is_nonblocking:
            options.config.blocking = 0
        made = _Communicator(
            self._library,
            library(store, rank, size, options),
            self._device,
            generation=generation,
            interrupted=self._interrupted,
        )
        self._add(key, made)
        made.group.eager_connect_single_device(self._device)
        if self._interrupted.is_set():
            # The abort may have come first.
            made.abort()
            raise CommunicationError(None, "the generation is over")
        return made


_KEPT: Final[dict[_Key, _Communicator]] = {}
"""Communicators that have outlived their generation; no message is on its way on them."""
_KEPT_LOCK: Final = threading.Lock()


def _members_of(key: _Key) -> tuple[int, ...]:
    return (key.sender, key.receiver) if isinstance(key, Channel) else key


def _abort(communicators: Iterable[_Communicator]) -> None:
    """Abort communicators; the threads hold what operations may still write to until these have ended."""
    for each in communicators:
        threading.Thread(target=each.abort, name="abort", daemon=True).start()


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
        generation: int,
        interrupted: threading.Event,
    ) -> None:
        self.group = group
        self.device = device
        self.interrupted = interrupted
        self.number = generation << 32
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
        taken = _Communicator(self._library, self.group, self.device, generation=0, interrupted=interrupted)
        taken.number = self.number
        return taken

    def abort(self) -> None:
        """End all operations, and hold the memory that they may still write to until they have ended."""
        if self._library.abort:
            name, *arguments = self._library.abort
            getattr(self.group, name)(*arguments)
        elif not self._release():
            print("operations between devices cannot be ended within the process", file=sys.stderr)
            exit_immediately(1)
        with self._lock:
            self._in_flight.clear()

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
