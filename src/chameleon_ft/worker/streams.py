"""The samples of a stream, which one rank reads for all.

The reader is the lowest holder of layer 0, whose state has the position of the next step (`POSITION_KEY`). A process of
its own reads ahead, so that neither the interpreter's lock nor the generators of random numbers are shared with
training. Of each step, every other rank is sent the micro-batches that it needs and the position after the step, before
it needs them. A rank votes only once it has that position, and takes it over as it applies the step. So once a step is
committed anywhere, all that take part in it know where the next one begins, and any holder of layer 0 can be the next
reader.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from chameleon_ft.config import Batch, RunConfig
from chameleon_ft.data.samples import collated
from chameleon_ft.data.streams import POSITION_KEY, StreamReader
from chameleon_ft.errors import DataError
from chameleon_ft.host.fork_server import end_with, exit_immediately, name_process, terminations
from chameleon_ft.keys import generator_lock
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.worker.communicators.base import CommunicationError, Tag
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.execution.bad_steps import JobError, describe_error
from chameleon_ft.worker.execution.micro_batches import MicroBatch, reads_samples
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.state_transfer.layer_messages import receive_state, send_state

if TYPE_CHECKING:
    from chameleon_ft.job import Job

# Steps that are sent before they are trained. Those in the pipe of the reading process come in addition.
_AHEAD: Final = 4
# Of a message: micro-batches, with numbers in place of their tensors.
_TREE: Final = "tree"
_POLL_S: Final = 0.02
_CPU: Final = torch.device("cpu")


class SamplesOfStep(NamedTuple):
    """The micro-batches of a step by their numbers, all or some of them, and the position after the step."""

    micro_batches: Mapping[int, tuple[Any, Any]]
    position: bytes


class ReadAhead:
    """Reads steps of a stream one after the other, in a process that continues while generations change.

    Any thread may call its methods. A task of a generation that is over does not read any more.
    """

    def __init__(self, job: Job, batch: Batch, *, seed: int) -> None:
        self._job = job
        self._batch = batch
        self._seed = seed
        self._lock = threading.RLock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._error: str | None = None
        # The step that the process gives next, and the position before it.
        self._next: tuple[int, bytes] = (0, b"")
        # The step for which a process was started again, because one had ended by itself.
        self._restarted_for = -1
        # (step, position before it, its samples), of the steps that have not been committed yet.
        self._read: deque[tuple[int, bytes, SamplesOfStep]] = deque()

    def begin(self, step: int, position: bytes) -> None:
        """Read from a step on, which begins at a position. What has been read from there on stays."""
        with self._lock:
            while self._read and self._read[0][:2] != (step, position):
                self._read.popleft()
            if self._process is not None and self._error is None and (self._read or self._next == (step, position)):
                return
            self.close()
            self._next = step, position
            self._start()

    def _start(self) -> None:
        """Start a process that reads the next steps."""
        context = get_context("fork")
        self._pipe, sending = context.Pipe(duplex=False)
        arguments = (self._job, self._batch, self._seed, self._next[1], sending, os.getpid())
        # Daemons end with this process, if that ends by itself.
        self._process = context.Process(target=_read_main, args=arguments, daemon=True)
        # The forked thread owns the lock, too. Held by another one, it would never be released there.
        with generator_lock:
            self._process.start()
        sending.close()

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
            assert self._pipe is not None
            found = self._error or self._receive(mover)
            if isinstance(found, str):
                self._error = found
                raise DataError(found)
            self._read.append((step, self._next[1], found))
            self._next = step + 1, found.position
            return found

    def _receive(self, mover: Mover) -> SamplesOfStep | str:
        assert self._pipe is not None
        while not self._pipe.poll(_POLL_S):
            mover.check()
        try:
            found = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            if self._restarted_for == self._next[0]:
                return (
                    f"the process that reads the stream ends by itself, with exit code {code}, whenever it is started"
                )
            # The system may have ended it for the memory that others take.
            print(f"the process that reads the stream has ended with exit code {code}; another is started", flush=True)
            self._restarted_for = self._next[0]
            self._pipe.close()
            self._start()
            return self._receive(mover)
        return found if isinstance(found, str) else SamplesOfStep(dict(enumerate(found[0])), found[1])

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
            if self._process is not None:
                self._process.kill()
                self._process.join()
                self._process = None
            if self._pipe is not None:
                self._pipe.close()
                self._pipe = None


def _read_main(job: Job, batch: Batch, seed: int, position: bytes, pipe: Connection, parent: int) -> None:
    """Send the samples of one step after the other, or why there are none, as text."""
    end_with(parent)
    _detach()
    reader: StreamReader | None = None
    try:
        reader = StreamReader(cast(Any, job.dataset), seed, position)
        while True:
            samples = [
                # The place is taken before the samples are read.
                collated(place=reader.at, samples=reader.read(batch.micro_batch_size), collate=job.collate, seed=seed)
                for _ in range(batch.micro_batches)
            ]
            _send(pipe, (samples, reader.position()))
    except DataError as error:
        _send(pipe, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code
        traceback.print_exc()
        _send(pipe, f"{describe_error(error)}, reading {'the stream' if reader is None else reader.place}")
    exit_immediately(0)


def _send(pipe: Connection, found: Any) -> None:
    try:
        pipe.send_bytes(pickle.dumps(found))
    except BrokenPipeError:
        exit_immediately(1)


def _detach() -> None:
    """Share nothing with the rank that this process was forked from: no connection, no handler, no threads."""
    # Destructors of the rank's objects would wait for its threads.
    gc.freeze()
    name_process("stream")
    for number in terminations():
        signal.signal(number, signal.SIG_DFL)
    # A connection would seem open to its other end until this process ends, too. Its number must not be used again.
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_socket = str(entry.readlink()).startswith("socket:")
        except OSError:
            continue
        if is_socket:
            os.dup2(nothing, int(entry.name))
    # The stream may have processes of its own.
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)


class StreamFeed:
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
        self._needed = needed_by(order, rank.job)
        self._config = config
        self._ahead = ahead
        self._first_step = order.first_step
        # Shared with the task, under `Mover.changed`:
        self._step = order.first_step
        self._found: dict[int, SamplesOfStep] = {}
        self._error: BaseException | None = None

    def begin(self, position: bytes) -> None:
        """Begin to read, at the position of the first step, or to receive."""
        if self._rank.worker == self._reader:
            self._ahead.begin(self._first_step, position)
            self._mover.start(self._run, self._give)
        else:
            self._ahead.close()
            self._mover.start(self._run, self._receive)

    def expect(self, step: int, wanted: Sequence[int], following: Sequence[int]) -> None:
        """See `SampleSource`: what this rank needs in all steps of the generation is known."""

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
        needs: dict[int, Collection[int]] = {}
        for step in range(self._first_step, self._config.steps):
            with self._mover.changed:
                self._mover.wait_for(lambda step=step: step < self._step + _AHEAD)  # type: ignore[misc]
                self._ahead.drop_before(self._step)
            samples = self._ahead.take(step, self._mover)
            self._add(step, samples)
            needs = needs or self._gather_needs(others)
            sent = [self._send(samples, peer, needs[peer]) for peer in others]
            for each in sent:
                each.finish_next()

    def _gather_needs(self, others: Iterable[int]) -> dict[int, Collection[int]]:
        """Return which micro-batches each of the others needs in every step."""
        flags = {peer: torch.empty(self._config.batch.micro_batches, dtype=torch.int64) for peer in others}
        arriving = [self._mover.communicators.receive(flags[peer], peer=peer, tag=Tag.STREAM) for peer in others]
        for each in arriving:
            each.wait()
        return {peer: own.nonzero().flatten().tolist() for peer, own in flags.items()}

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
        flags = torch.zeros(self._config.batch.micro_batches, dtype=torch.int64)
        flags[sorted(self._needed)] = 1
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
    """Return the micro-batches of a step of which a worker runs the first layer, a layer with fields, or the loss."""
    operations: Sequence[Any] = order.operations
    if order.rest is not None:
        # If that step turns out to be bad, it is computed again as a whole.
        operations = (*operations, *order.rest.program.of(order.worker))
    return frozenset(each.micro_batch for each in operations if reads_samples(each, job))
