"""Processes that read samples ahead for a rank, each a loader, or the reader of a stream; they end with the rank.

They are forked from a server, a process that is forked from the rank before the rank has threads, connections or an
accelerator. The server loads the job as the rank does, so that a dataset is never pickled, and a loader that is lost is
replaced in milliseconds. Several ranks of a host may need the same micro-batch; one of their loaders reads it for all.

A loader of torch's DataLoader cannot be told what to read next once a plan has changed, and ends its iterator with it.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, NamedTuple, NoReturn

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.host.fork_server import end_with, exit_immediately, name_process, terminations
from chameleon_ft.job.job import Job
from chameleon_ft.job_record import Fact
from chameleon_ft.worker.execution.bad_steps import describe_error, noting
from chameleon_ft.worker.execution.micro_batches import EVALUATION, MicroBatch, RunReads, SampleSource, place_of
from chameleon_ft.worker.inspection import load_examined
from chameleon_ft.worker.shared_reads import Packed, SharedReads, pack, unpack
from chameleon_ft.worker.streams import read_stream

MAX_LOADERS: Final = 64

Key = tuple[int, int]
"""(step, number of the micro-batch in it)"""

_NUMBER: Final = struct.Struct("<q")
_MAX_MESSAGE: Final = 1 << 17
_MAX_AHEAD: Final = 64
_POLL_S: Final = 0.02
_POLL_OTHERS_S: Final = 0.005
# Of a loader without anything to send, before it reads what another one reads.
_PATIENCE_S: Final = 1.0
_PROGRESS_BYTES: Final = 128
# In place of the number of a loader: the reader of a stream.
_READER: Final = -1
# None is forked.
_LOAD: Final = -2
# Loaders that end while they read the same micro-batch, or before they have read any.
_MAX_ENDS: Final = 3


class ReadError(NamedTuple):
    """The description of an error of the dataset in a loader, which may be raised again where it is read again."""

    text: str


class LoaderServer:
    """The process from which the loaders of this rank are forked, and which ends with this one.

    To be made while this process has a single thread, because a fork copies only the thread that forks.
    """

    def __init__(self) -> None:
        self._job = b""
        self._progress = mmap.mmap(-1, MAX_LOADERS * _PROGRESS_BYTES)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if not os.fork():
            self._socket.close()
            end_with(parent)
            _serve(theirs, self._progress)
        theirs.close()

    def serve(self, config: RunConfig, samples: Mapping[str, Fact]) -> None:
        """Have loaders read the samples of this run from now on, of which `samples` are facts."""
        self._job = pickle.dumps((config, dict(samples)))

    def start(self, number: int) -> socket.socket:
        """Start a loader of this number, and return the socket to it. Raises OSError if the server has ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._fork(number, theirs)
        return ours

    def load(self) -> None:
        """Load the job before there is anything to read, because a reader that takes over has to begin at once."""
        with socket.socket() as none:
            self._fork(_LOAD, none)

    def start_reader(self) -> Connection:
        """Start a reader of a stream, and return the connection to it. Raises OSError if the server has ended."""
        ours, theirs = socket.socketpair()
        self._fork(_READER, theirs)
        return Connection(ours.detach())

    def _fork(self, number: int, theirs: socket.socket) -> None:
        with theirs:
            request = _NUMBER.pack(number) + self._job
            # The output of the dataset goes where that of this process goes.
            socket.send_fds(self._socket, [request], [theirs.fileno(), sys.stdout.fileno(), sys.stderr.fileno()])

    def progress(self, number: int) -> str:
        """Return the read of a loader; empty between two."""
        entry = self._progress[number * _PROGRESS_BYTES : (number + 1) * _PROGRESS_BYTES]
        return entry.rstrip(b"\0").decode("ascii", "replace")

    def close(self) -> None:
        """End the server and its loaders."""
        self._socket.close()


@dataclass(slots=True, eq=False)
class _Loader:
    """A loader.

    Attributes:
        told: micro-batches that it has been told to read and has not sent, in order; it has perhaps begun the first.
        received: how many it has sent since it was last told what to read.
    """

    number: int
    socket: socket.socket
    is_ready: bool = False
    told: list[Key] = field(default_factory=list)
    received: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class PrefetchedReads:
    """A source of samples that loaders have read before they are needed, in the order in which they are.

    Loaders are told what to read once a step, because each message wakes one up, which may take the processor of the
    rank. What they are told later replaces what they were told before.

    The rank reads itself while no loader is ready, and once more what a loader has failed to read. If a loader ends, it
    is replaced, and its reads are done again; since they depend on the position alone, none is lost or made twice.

    Attributes:
        reads: reads in this thread.
        start: starts a loader of that number; raises OSError if none can be started.
        waiting: returns a context inside which this thread waits for a read of that description.
        check: is called while it waits; raises CommunicationError if the generation is over.
        ended: is called with the name of a loader that has ended, and with its read, before another takes its place.
        prefetch: steps to read ahead.
        steps: steps of the run.
    """

    reads: SampleSource
    start: Callable[[int], socket.socket]
    progress: Callable[[int], str]
    waiting: Callable[[str], AbstractContextManager[object]]
    check: Callable[[], None]
    ended: Callable[[str, str], None]
    count: int
    prefetch: int
    steps: int
    _loaders: list[_Loader] = field(default_factory=list)
    _read: dict[Key, MicroBatch | ReadError] = field(default_factory=dict)
    # In order, those that loaders have been told of among them.
    _wanted: dict[Key, None] = field(default_factory=dict)
    _ends: Counter[Key | None] = field(default_factory=Counter)

    def expect(self, step: int, wanted: Sequence[int], following: Callable[[int], Sequence[int]]) -> Sequence[int]:
        """See `SampleSource`."""
        self._collect()
        ahead = range(step + 1, min(step + 1 + self.prefetch, self.steps))
        keys = [(step, each) for each in wanted] + [(later, each) for later in ahead for each in following(later)]
        self._read = {key: value for key, value in self._read.items() if key[0] >= step}
        self._wanted = dict.fromkeys(key for key in keys if key not in self._read)
        if keys and not self._loaders:
            for number in range(self.count):
                self._start(number)
        self._tell()
        found = [(each, self._read.get((step, each))) for each in wanted]
        return [each for each, read in found if isinstance(read, MicroBatch) and not read.left_out]

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """See `SampleSource`. Raises the error of the dataset, if the samples cannot be read here either."""
        key = (step, micro_batch)
        if key not in self._read:
            self._collect()
        while key not in self._read:
            loader = self._reader_of(key)
            if loader is not None:
                doing = self._doing(loader)
                # Until it has come to another sample, has read the micro-batch, or has ended.
                self._wait(doing, lambda: key in loader.told and self._doing(loader) == doing)  # noqa: B023 - called now
            elif self._ends[key] and self._loaders:
                # It may end this process, too.
                self._wait(_describe(key), lambda: self._loaders and not self._ready)
            else:
                self._wanted.pop(key, None)
                self._read[key] = self.reads.read(step, micro_batch)
        found = self._read.pop(key)
        if len(self._read) + len(told := self._told()) <= _MAX_AHEAD // 2 and self._wanted.keys() - told:
            self._tell()
        if isinstance(found, MicroBatch) and not found.left_out:
            return found
        error = found.text if isinstance(found, ReadError) else next(iter(found.left_out.values()))
        print(f"a loader failed: {error}; this worker reads the micro-batch once more itself", file=sys.stderr)
        if self._ends[key] >= _MAX_ENDS:
            # This process would end, too.
            raise RuntimeError(error)
        return self.reads.read(step, micro_batch)

    def _reader_of(self, key: Key) -> _Loader | None:
        """Return the loader that reads a micro-batch, which may be told to only now; None if none can."""
        for loader in self._loaders:
            if key in loader.told:
                return loader
        if not (ready := self._ready):
            return None
        loader = min(ready, key=lambda each: len(each.told))
        # It has perhaps begun the first.
        self._send(loader, [*loader.told[:1], key, *loader.told[1:]])
        return loader if loader in self._loaders else self._reader_of(key)

    def _wait(self, doing: str, lasts: Callable[[], object]) -> None:
        """Take what comes as long as something is so."""
        with self.waiting(doing):
            while lasts():
                self._collect(_POLL_S)
                self.check()

    @property
    def _ready(self) -> list[_Loader]:
        return [loader for loader in self._loaders if loader.is_ready]

    def _doing(self, loader: _Loader) -> str:
        return self.progress(loader.number) or _describe(loader.told[0])

    def _told(self) -> set[Key]:
        return {key for loader in self._loaders for key in loader.told}

    def _tell(self) -> None:
        """Tell each loader what to read next: what it has begun, and its share of what is wanted."""
        if not (ready := self._ready):
            return
        told = self._told()
        shares = {loader: [key for key in loader.told[1:] if key in self._wanted] for loader in ready}
        new = [key for key in self._wanted if key not in told]
        for key in new[: max(_MAX_AHEAD - len(self._read) - len(told), 0)]:
            min(shares.values(), key=len).append(key)
        places = {key: place for place, key in enumerate(self._wanted)}
        for loader, share in shares.items():
            self._send(loader, [*loader.told[:1], *sorted(share, key=places.__getitem__)])

    def _send(self, loader: _Loader, keys: list[Key]) -> None:
        """Tell a loader what to read from now on."""
        if keys == loader.told:
            return
        numbers = [loader.received, *itertools.chain.from_iterable(keys)]
        try:
            loader.socket.send(struct.pack(f"<{len(numbers)}q", *numbers))
        except OSError:
            self._ended(loader)
        else:
            loader.told, loader.received = keys, 0

    def _collect(self, timeout_s: float = 0.0) -> None:
        """Take what the loaders have read, or wait for the first of it for so long."""
        polled = select.poll()
        by_descriptor = {loader.socket.fileno(): loader for loader in self._loaders}
        for descriptor in by_descriptor:
            polled.register(descriptor, select.POLLIN)
        for descriptor, _ in polled.poll(1e3 * timeout_s):
            loader = by_descriptor[descriptor]
            try:
                message, files, _, _ = socket.recv_fds(loader.socket, _MAX_MESSAGE, 1)
            except OSError:
                message, files = b"", []
            if not message:
                self._ended(loader)
            elif loader.is_ready:
                self._ends[None] = 0
                self._received(loader, *unpack(message, files))
            else:
                loader.is_ready = True
                self._tell()

    def _received(self, loader: _Loader, key: Key, found: MicroBatch | ReadError) -> None:
        loader.received += 1
        if key in loader.told:
            loader.told.remove(key)
        self._wanted.pop(key, None)
        self._read[key] = found

    def _start(self, number: int) -> None:
        try:
            self._loaders.append(_Loader(number, self.start(number)))
        except OSError as error:
            print(f"no loader can be started ({error}); this worker reads its samples itself", file=sys.stderr)

    def _ended(self, loader: _Loader) -> None:
        """Replace a loader, and have its reads done again."""
        self._loaders.remove(loader)
        loader.socket.close()
        last = loader.told[0] if loader.told else None
        doing = f" {self._doing(loader)}" if loader.told else ""
        self._ends[None] += 1
        self._ends[last] += last is not None
        if last is not None and self._ends[last] >= _MAX_ENDS:
            self._read[last] = ReadError(f"{_MAX_ENDS} loaders in a row have ended{doing}")
            self._wanted.pop(last, None)
        loader.told = []
        if self._ends[None] < _MAX_ENDS + self.count:
            print(f"loader {loader.number} has ended{doing}; another one takes its place", file=sys.stderr)
            self.ended(f"loader {loader.number}", doing.strip())
            self._start(loader.number)
        else:
            print("loaders end one after the other; this worker reads its samples itself", file=sys.stderr)


def _describe(key: Key) -> str:
    return f"reading the samples of {place_of(*key)}"


# --- in the server and in the loaders --------------------------------------------------------------------------------


def _serve(requests: socket.socket, progress: mmap.mmap) -> NoReturn:
    """Load the job at the first request, and fork a loader at each, until the rank ends."""
    code = 1
    try:
        name_process("loaders")
        # A batch system may send one to every process, but the rank still needs its loaders then.
        for number in terminations():
            signal.signal(number, signal.SIG_IGN)
        # The processor is not taken from a rank as soon as there is something to read.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        own = os.getpid()
        loaded: tuple[Job, RunConfig] | None = None
        while True:
            request, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE, 3)
            if not request:
                break
            for standard, file in enumerate(files[1:], 1):
                os.dup2(file, standard)
                os.close(file)
            (number,) = _NUMBER.unpack_from(request)
            if loaded is None:
                config, samples = pickle.loads(request[_NUMBER.size :])
                torch.set_num_threads(1)
                for output in (sys.stdout, sys.stderr):
                    output.reconfigure(line_buffering=True)  # type: ignore[union-attr]
                loaded = load_examined(config, samples), config
                gc.collect()
                gc.freeze()
            if number != _LOAD and not os.fork():
                requests.close()
                end_with(own)
                name_process("loader stream" if number == _READER else f"loader {number}")
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if number == _READER:
                    read_stream(*loaded, Connection(files[0]))
                    break
                reads = RunReads(*loaded, reading=partial(_reading, progress, number))
                _load(socket.socket(fileno=files[0]), reads, SharedReads(request[_NUMBER.size :]))
                break
            os.close(files[0])
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    exit_immediately(code)


@contextmanager
def _reading(progress: mmap.mmap, number: int, doing: str) -> Iterator[None]:
    """Show the rank a read of this loader while it lasts, and add it to its error."""
    entry = slice(number * _PROGRESS_BYTES, (number + 1) * _PROGRESS_BYTES)
    progress[entry] = doing.encode("ascii", "replace")[:_PROGRESS_BYTES].ljust(_PROGRESS_BYTES, b"\0")
    with noting(doing):
        yield
    progress[entry] = bytes(_PROGRESS_BYTES)


def _load(requests: socket.socket, reads: SampleSource, shared: SharedReads) -> None:
    """Read the micro-batches of the newest request until the rank ends: in order, but first what no other loader reads.

    What others read is waited for, but not for long, because their storage may not answer. All loaders read the first
    micro-batch of each step, so that workers that compare it see whether a dataset returns the same at each read.
    """
    requests.send(b"ready")
    wanted: list[Key] = []
    sent_s = time.monotonic()
    # Since the request before.
    sent: list[Key] = []
    while True:
        while not wanted or select.select([requests], [], [], 0)[0]:
            request = requests.recv(_MAX_MESSAGE)
            if not request:
                return
            sent_s = time.monotonic() if not wanted else sent_s
            received, *numbers = struct.unpack(f"<{len(request) // _NUMBER.size}q", request)
            del sent[:received]
            # The rank did not have these yet.
            wanted = [key for key in zip(numbers[::2], numbers[1::2], strict=True) if key not in sent]
        is_late = time.monotonic() - sent_s > _PATIENCE_S
        for key in wanted:
            is_compared = key[0] != EVALUATION and not key[1]
            if not is_compared and (packed := shared.find(key)) is not None:
                break
            if is_compared or shared.claim(key) or is_late:
                packed = _read(key, reads, shared)
                break
        else:
            # Other loaders of the host read all of them.
            select.select([requests], [], [], _POLL_OTHERS_S)
            continue
        socket.send_fds(requests, [packed.message], packed.files)
        packed.close()
        wanted.remove(key)
        sent.append(key)
        sent_s = time.monotonic()


def _read(key: Key, reads: SampleSource, shared: SharedReads) -> Packed:
    """Read a micro-batch, and hold it for the other loaders of the host, unless something of it cannot be read."""
    found: MicroBatch | ReadError
    try:
        found = reads.read(*key)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the dataset
        traceback.print_exc()
        found = ReadError(describe_error(error))
    packed = pack((key, found))
    if isinstance(found, ReadError) or found.left_out:
        shared.give_up()
    else:
        shared.hold(packed)
    return packed
