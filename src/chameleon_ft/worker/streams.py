"""The samples of a stream, which one rank reads for all.

The reader is the lowest holder of layer 0, whose state has the position of the next step (`POSITION_KEY`). A process of
its own reads ahead, so that neither the interpreter's lock nor the generators of random numbers are shared with
training. Of each step, every other rank is sent the micro-batches that it needs and the position after the step, before
it needs them. A rank votes only once it has that position, and takes it over as it applies the step. So once a step is
committed anywhere, all that take part in it know where the next one begins, and any holder of layer 0 can be the next
reader.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import traceback
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from chameleon_ft.config import RunConfig
from chameleon_ft.data.samples import collated, uncollated
from chameleon_ft.data.streams import POSITION_KEY, StreamReader
from chameleon_ft.errors import DataError
from chameleon_ft.host.processes import HostProcess, start_time
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.worker.communicators.base import CommunicationError, Tag
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.execution.bad_steps import JobError, describe_error
from chameleon_ft.worker.execution.micro_batches import MicroBatch, SampleSource, needs_samples
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.state_transfer.layer_messages import receive_state, send_state

if TYPE_CHECKING:
    from chameleon_ft.job.job import Job

Place = tuple[int, int]
"""Of a sample in a stream: (epoch, its number in that)."""

# Steps that are sent before they are trained. Those in the pipe of the reading process come in addition.
_AHEAD: Final = 4
# Of a message: micro-batches, with numbers in place of their tensors.
_TREE: Final = "tree"
_POLL_S: Final = 0.02
# In a row: a stream that gives the error of the same sample again and again does not get past it.
_MAX_LEFT_OUT: Final = 16
_CPU: Final = torch.device("cpu")


class SamplesOfStep(NamedTuple):
    """The micro-batches of a step by their numbers, all or some of them, and the position after the step."""

    micro_batches: Mapping[int, tuple[Any, Any]]
    position: bytes


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of a stream.

    Attributes:
        place: of the sample that cannot be read, as by `StreamReader.at`; None if reading another one would not help.
    """

    error: str
    place: Place | None = None


class ReadAhead:
    """Reads steps of a stream one after the other, in a process that continues while generations change.

    A sample that a process cannot read is tried by another one. Any thread may call the methods. A task of a generation
    that is over does not read any more.

    Args:
        start: Starts a process that runs `read_stream`, and returns the connection to it. Raises OSError.
        unread: Is called with the step, the place and the error of a sample that is left out; None: none is.
        ended: Is called with the name of a process that has ended by itself, and with its read.
    """

    def __init__(
        self,
        start: Callable[[], Connection],
        *,
        unread: Callable[[int, Place, str], None] | None,
        ended: Callable[[str, str], None],
    ) -> None:
        self._start_process = start
        self._unread = unread
        self._ended = ended
        self._lock = threading.RLock()
        self._pipe: Connection | None = None
        # The number of the process, and when it was started.
        self._process: tuple[int, int] | None = None
        self._error: str | None = None
        # The step that the process gives next, and the position before it.
        self._next: tuple[int, bytes] = (0, b"")
        # The step for which a process was started again, because one had ended by itself.
        self._restarted_for = -1
        # Where the last process could not read on.
        self._failed_at: Place | None = None
        self._left_out: frozenset[Place] = frozenset()
        # A step in which no more samples may be left out.
        self._begun_step: int | None = None
        # (step, position before it, its samples), of the steps that have not been committed yet.
        self._read: deque[tuple[int, bytes, SamplesOfStep]] = deque()

    def begin(self, step: int, position: bytes, *, left_out: Collection[Place] = (), is_begun: bool = False) -> None:
        """Read from a step on, which begins at a position. What has been read from there on stays.

        Args:
            left_out: Places of samples that are left out, because they could not be read before.
            is_begun: Workers hold results of the step, which has to have the same samples.
        """
        with self._lock:
            self._begun_step = step if is_begun else None
            self._left_out |= frozenset(left_out)
            while self._read and self._read[0][:2] != (step, position):
                self._read.popleft()
            if self._pipe is not None and self._error is None and (self._read or self._next == (step, position)):
                return
            self.close()
            self._next = step, position
            self._start()

    def _start(self) -> None:
        """Start a process that reads the next steps."""
        try:
            self._pipe = self._start_process()
            self._pipe.send((*self._next, self._left_out))
        except OSError as error:
            self._error = f"no process that reads the stream can be started: {error}"

    def take(self, step: int, mover: Mover) -> SamplesOfStep:
        """Return the samples of a step, which is no other than one read before or the next one.

        Raises:
            DataError: the stream has failed, or is over; the message says what its iterator raised, and where.
            CommunicationError: the generation is over.
        """
        with self._lock:
            mover.check()
            for number, _, samples in self._read:
                if number == step:
                    return samples
            assert step == self._next[0], "the steps of a stream are read in order"
            while self._error is None:
                found = self._receive(mover)
                if isinstance(found, SamplesOfStep):
                    self._read.append((step, self._next[1], found))
                    self._next = step + 1, found.position
                    return found
                self._fail(found)
            raise DataError(self._error)

    def _receive(self, mover: Mover) -> SamplesOfStep | _Failure | None:
        """Return what the process sends next; None if it has ended."""
        assert self._pipe is not None
        try:
            if self._process is None:
                self._wait(mover)
                self._process = self._pipe.recv()
            self._wait(mover)
            found: SamplesOfStep | _Failure = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return found

    def _wait(self, mover: Mover) -> None:
        """Wait until the process has sent something, or raise EOFError once it has ended."""
        assert self._pipe is not None
        while not self._pipe.poll(_POLL_S):
            mover.check()
            # Processes of the stream's own may hold the other end of the pipe.
            if self._process is not None and start_time(self._process[0]) != self._process[1] and not self._pipe.poll():
                raise EOFError

    def _fail(self, failure: _Failure | None) -> None:
        """Have another process read on after a failure, or the end of the process; or note the error."""
        step = self._next[0]
        if failure is None:
            if self._restarted_for == step:
                self._error = "the process that reads the stream ends by itself, whenever it is started"
                return
            # The system may have ended it for the memory that others take.
            print("the process that reads the stream has ended; another is started", flush=True)
            self._ended("the reader of the stream", f"reading the samples of step {step}")
            self._restarted_for = step
        elif failure.place is None:
            self._error = failure.error
            return
        elif failure.place != self._failed_at:
            print(f"{failure.error}; another process tries the sample", flush=True)
            self._failed_at = failure.place
        else:
            epoch, number = failure.place
            row = {(epoch, earlier) for earlier in range(number - _MAX_LEFT_OUT, number)}
            if self._unread is None or step == self._begun_step or row <= self._left_out:
                self._error = failure.error
                return
            self._unread(step, failure.place, failure.error)
            self._left_out |= {failure.place}
        self._end()
        self._start()

    def drop_before(self, step: int) -> None:
        """Release the samples of earlier steps."""
        with self._lock:
            while self._read and self._read[0][0] < step:
                self._read.popleft()

    def close(self) -> None:
        """End the process, and release all that it has read."""
        with self._lock:
            self._read.clear()
            self._error = None
            self._end()

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            number, started = self._process
            with suppress(OSError):
                HostProcess.found(number, started=started).kill()
            self._process = None


def read_stream(job: Job, config: RunConfig, pipe: Connection) -> None:
    """Send the samples of one step after the other, or why there are none, from the one that is received on."""
    first, position, left_out = pipe.recv()
    own, batch = os.getpid(), config.batch
    try:
        pipe.send((own, start_time(own)))
        reader = StreamReader(cast(Any, job.dataset), config.seed, position, left_out=left_out)
        for step in itertools.count(first):
            for _ in range(config.skipped_before(step)):
                _read_sample(reader)
            pairs = {
                number: _read_micro_batch(reader, job, batch.micro_batch_size, config.seed)
                for number in range(batch.micro_batches_at(step))
            }
            # By the connection's own pickler, tensors would be in files that end with this process.
            pipe.send_bytes(pickle.dumps(SamplesOfStep(pairs, reader.position())))
    except BrokenPipeError:
        return
    except DataError as error:
        failure = _Failure(str(error))
    except _SampleError as error:
        traceback.print_exception(error.error)
        number, epoch = error.place[1], error.place[0]
        failure = _Failure(
            f"{describe_error(error.error)}, reading sample {number} of epoch {epoch} of the stream", error.place
        )
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code
        traceback.print_exc()
        failure = _Failure(f"{describe_error(error)}, reading the stream")
    with suppress(BrokenPipeError):
        pipe.send_bytes(pickle.dumps(failure))


class _SampleError(Exception):
    """The stream's own error for a sample at a place, or that of `collate`."""

    def __init__(self, place: Place, error: BaseException) -> None:
        super().__init__(place)
        self.place = place
        self.error = error


def _read_sample(reader: StreamReader) -> Any:
    try:
        (sample,) = reader.read(1)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise _SampleError(reader.at, error) from error
    return sample


def _read_micro_batch(reader: StreamReader, job: Job, size: int, seed: int) -> tuple[Any, Any]:
    # Its place is where the sample before it ends.
    place, samples = reader.at, {}
    for _ in range(size):
        sample = _read_sample(reader)
        epoch, number = reader.at
        samples[epoch, number - 1] = sample
    collating = partial(collated, collate=job.collate, seed=seed, place=place)
    try:
        return collating(list(samples.values()))
    except Exception:
        for own_place, error in uncollated(collating, samples, size):
            raise _SampleError(own_place, error) from error
        raise


class StreamFeed(SampleSource):
    """The samples of a stream in one generation, on one of its ranks. Tasks of the mover read, send and receive.

    Args:
        ahead: It reads, if this rank is the reader.
    """

    def __init__(
        self, rank: RankContext, order: WorkerOrders, mover: Mover, *, config: RunConfig, ahead: ReadAhead
    ) -> None:
        self._rank = rank
        self._mover = mover
        self._members = order.members
        self._reader = reader_of(order)
        self._starts = [order.first_step, *(first_step for first_step, _ in order.later)]
        self._needed = [needed_by(order.at(step), rank.job) for step in self._starts]
        self._config = config
        self._ahead = ahead
        self._first_step = order.first_step
        self._left_out = [(epoch, sample) for _, epoch, sample in order.left_out]
        self._is_begun = order.continues_step
        # Shared with the task, under `Mover.changed`:
        self._step = order.first_step
        self._found: dict[int, SamplesOfStep] = {}
        self._error: BaseException | None = None

    def begin(self, position: bytes) -> None:
        """Begin to read, at the position of the first step, or to receive."""
        if self._rank.worker == self._reader:
            self._ahead.begin(self._first_step, position, left_out=self._left_out, is_begun=self._is_begun)
            self._mover.start(self._run, self._give)
        else:
            self._ahead.close()
            self._mover.start(self._run, self._receive)

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """Return the samples of a micro-batch that this rank needs, once they are there.

        Raises:
            CommunicationError: the generation is over, or the reader is gone.
            DataError: the stream has failed here.
        """
        return MicroBatch(*self._of(step).micro_batches[micro_batch])

    def position_after(self, step: int) -> bytes:
        """Return the position after a step, once it is known. Raises CommunicationError, or JobError."""
        try:
            return self._of(step).position
        except DataError as error:
            raise JobError(str(error)) from error

    def _of(self, step: int) -> SamplesOfStep:
        with self._mover.changed:
            self._step = step
            for earlier in [each for each in self._found if each < step]:
                del self._found[earlier]
            self._mover.changed.notify_all()
            if step in self._found:
                return self._found[step]
        is_reader = self._rank.worker == self._reader
        doing = f"reading the samples of step {step} from the stream"
        if not is_reader:
            doing = f"the samples of step {step}, which worker {self._reader} reads"
        # Not as for a message: the reader may wait for others, and while it reads no message is overdue.
        with self._rank.activity.waiting(doing, is_reading=is_reader), self._mover.changed:
            self._mover.wait_for(lambda: step in self._found or self._error is not None)
            if step not in self._found:
                assert self._error is not None
                raise self._error
            return self._found[step]

    def _run(self, task: Any) -> None:
        """Run the task of this rank; only a rank that needs more samples is told of its error."""
        try:
            task()
        except (CommunicationError, DataError) as error:
            with self._mover.changed:
                self._error = error.with_traceback(None)
                self._mover.changed.notify_all()

    def _give(self) -> None:
        """Read step after step, and send each to all others."""
        others = [member for member in self._members if member != self._rank.worker]
        needs: dict[int, list[Collection[int]]] = {}
        for step in range(self._first_step, self._config.steps):
            with self._mover.changed:
                self._mover.wait_for(lambda step=step: step < self._step + _AHEAD)  # type: ignore[misc]
                self._ahead.drop_before(self._step)
            samples = self._ahead.take(step, self._mover)
            self._add(step, samples)
            needs = needs or self._gather_needs(others)
            stage = bisect_right(self._starts, step) - 1
            sent = [self._send(samples, peer, needs[peer][stage]) for peer in others]
            for each in sent:
                each.finish_next()

    def _gather_needs(self, others: Iterable[int]) -> dict[int, list[Collection[int]]]:
        """Return which micro-batches each of the others needs in the steps of each stage of the batch."""
        flags = {peer: self._no_needs() for peer in others}
        arriving = [self._mover.communicators.receive(flags[peer], peer=peer, tag=Tag.STREAM) for peer in others]
        for each in arriving:
            each.wait()
        return {peer: [stage.nonzero().flatten().tolist() for stage in own] for peer, own in flags.items()}

    def _no_needs(self) -> torch.Tensor:
        """Return a flag for each stage of the batch and micro-batch (stages, most micro-batches), none set."""
        return torch.zeros(len(self._starts), self._config.batch.micro_batches, dtype=torch.int64)

    def _send(self, samples: SamplesOfStep, peer: int, needed: Collection[int]) -> Any:
        leaves, structure = tree_flatten({number: samples.micro_batches[number] for number in sorted(needed)})
        return send_state(
            {
                POSITION_KEY: samples.position,
                _TREE: tree_unflatten(range(len(leaves)), structure),
                **{str(number): leaf for number, leaf in enumerate(leaves)},
            },
            self._mover.communicators,
            peer=peer,
            tag=Tag.STREAM,
            device=_CPU,
            num_bytes=sum(leaf.nbytes for leaf in leaves),
        )

    def _receive(self) -> None:
        """Tell the reader what this rank needs, and receive it step after step."""
        flags = self._no_needs()
        for stage, needed in zip(flags, self._needed, strict=True):
            stage[sorted(needed)] = 1
        communicators = self._mover.communicators
        communicators.send(flags, peer=self._reader, tag=Tag.STREAM).wait()
        for step in range(self._first_step, self._config.steps):
            state = receive_state(communicators, peer=self._reader, tag=Tag.STREAM, device=_CPU, targets={})
            found = tree_map(lambda number: state[str(number)], state[_TREE])  # noqa: B023 - called at once
            self._add(step, SamplesOfStep(found, state[POSITION_KEY]))

    def _add(self, step: int, samples: SamplesOfStep) -> None:
        with self._mover.changed:
            self._found[step] = samples
            self._mover.changed.notify_all()


def reader_of(order: WorkerOrders) -> int:
    """Return which worker reads a stream in a generation: the lowest holder of layer 0."""
    return min(min(segment.holders) for segment in order.segments if not segment.tied and 0 in segment.layers)


def needed_by(order: WorkerOrders, job: Job) -> frozenset[int]:
    """Return the micro-batches of a step whose samples a worker needs."""
    operations: Sequence[Any] = order.operations
    if order.rest is not None:
        # If that step turns out to be bad, it is computed again as a whole.
        operations = (*operations, *order.rest.program.of(order.worker))
    return frozenset(each.micro_batch for each in operations if needs_samples(each, job))
