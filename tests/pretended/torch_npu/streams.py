"""Streams and events of the pretended accelerator: a thread runs the work of each stream, in order.

Each point of the contract has its source:

- Work is enqueued, and the call returns; work of one stream runs in order, and of two streams in any:
  https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
- An event is complete once its stream has passed it; one that was never recorded is complete. A wait for it holds a
  stream and not the host: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__EVENT.html
- Streams of a priority come from a pool of 32, in turn, so that two of them may be one:
  https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDAStream.h
- After the fault of a kernel nothing runs any more, and every later call fails:
  https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html (cudaErrorAssert)
- A process that was forked cannot use a device that its parent has used:
  https://docs.pytorch.org/docs/stable/notes/multiprocessing.html

Backward runs on the default stream, whatever stream the forward ran on: the engine of torch does not tell a device in
Python. Memory may be reused as soon as nothing queued refers to it, so `record_stream` has nothing to do.
PRETENDED_NPU_LAUNCH_S sets how long after it is enqueued work can begin at the earliest.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, Self

import torch

_POOL_SIZE: Final = 32
_AT_EXIT_S: Final = 5.0
_LAUNCH_S: Final = float(os.environ.get("PRETENDED_NPU_LAUNCH_S", "0"))


class _Device:
    """State of the whole device."""

    def __init__(self) -> None:
        self.fault: BaseException | None = None
        self.is_used = False
        self.is_bad_fork = False
        self.queues: list[Queue] = []

    def check(self) -> None:
        if self.is_bad_fork:
            raise RuntimeError("npu: the process was forked from one that has used the device")
        if self.fault is not None:
            raise RuntimeError(f"npu: a kernel has failed before: {self.fault!r}") from self.fault

    def after_fork(self) -> None:
        self.is_bad_fork = self.is_used

    def end(self) -> None:
        """End the threads, or the interpreter would end under them; one that is held is left."""
        for queue in self.queues:
            queue.end()


DEVICE: Final = _Device()
os.register_at_fork(after_in_child=DEVICE.after_fork)
atexit.register(DEVICE.end)


class Queue:
    """The work of one stream, and the thread that runs it."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], object], float] | None] = SimpleQueue()
        self._issuing = threading.Lock()
        self._num_issued = 0
        self._num_passed = 0
        self._num_waiting = 0
        self._passed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], object]) -> int:
        """Enqueue work; return the number after which it has passed."""
        DEVICE.check()
        with self._issuing:
            if self._thread is None:
                DEVICE.is_used = True
                DEVICE.queues.append(self)
                self._thread = threading.Thread(target=self._run, name="npu-stream", daemon=True)
                self._thread.start()
            self._work.put((work, time.perf_counter() + _LAUNCH_S))
            self._num_issued += 1
            return self._num_issued

    @property
    def num_issued(self) -> int:
        return self._num_issued

    def has_passed(self, number: int) -> bool:
        return self._num_passed >= number

    def wait(self, number: int, timeout_s: float | None = None) -> bool:
        """Block until the work up to `number` has passed; return whether it has."""
        if self.has_passed(number):
            return True
        with self._passed:
            self._num_waiting += 1
            try:
                return self._passed.wait_for(lambda: self.has_passed(number), timeout_s)
            finally:
                self._num_waiting -= 1

    def end(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_AT_EXIT_S)

    def _run(self) -> None:
        with torch.no_grad():
            while (launched := self._work.get()) is not None:
                work, begins_s = launched
                del launched
                if (early_s := begins_s - time.perf_counter()) > 0:
                    time.sleep(early_s)
                if DEVICE.fault is None:
                    try:
                        work()
                    except BaseException as error:  # noqa: BLE001
                        DEVICE.fault = error
                del work  # and with it the memory that it refers to
                self._num_passed += 1
                if self._num_waiting:
                    with self._passed:
                        self._passed.notify_all()


class Event(torch.Event):
    """A place in the work of a stream."""

    def __new__(cls, device: object = None, *, enable_timing: bool = False, **_: Any) -> Self:
        return super().__new__(cls, torch.device("npu", 0), enable_timing=enable_timing)

    def __init__(self, device: object = None, *, enable_timing: bool = False, **_: Any) -> None:
        self._is_timed = enable_timing
        self._place: tuple[Queue, int] | None = None
        self._times: list[float] = []

    def record(self, stream: torch.Stream | None = None) -> None:
        queue = _queue_of(stream or current_stream())
        # A new one each time: an earlier record may still be on its way.
        times = self._times = []
        self._place = queue, queue.put(lambda: times.append(time.perf_counter()))

    def wait(self, stream: torch.Stream | None = None) -> None:
        if self._place is not None:
            before, number = self._place
            _queue_of(stream or current_stream()).put(lambda: before.wait(number))

    def query(self) -> bool:
        DEVICE.check()
        return self._place is None or self._place[0].has_passed(self._place[1])

    def synchronize(self) -> None:
        if self._place is not None:
            self._place[0].wait(self._place[1])
        DEVICE.check()

    def elapsed_time(self, other: torch.Event) -> float:
        assert isinstance(other, Event)
        if not (self._is_timed and other._is_timed):
            raise ValueError("both events must be created with enable_timing")
        if not (self._times and other._times):
            raise RuntimeError("npu: both events must be recorded and complete")
        return (other._times[0] - self._times[0]) * 1e3


_pools: Final[dict[bool, list[Queue]]] = {False: [], True: []}
"""Those of high priority, and the others."""
_default: Final = Queue()
_of_thread: Final = threading.local()


class Stream(torch.Stream):
    """A stream: the default one of the device, or one of a pool."""

    def __new__(cls, device: object = None, *, priority: int = 0, queue: Queue | None = None) -> Self:
        return super().__new__(cls, torch.device("npu", 0))

    def __init__(self, device: object = None, *, priority: int = 0, queue: Queue | None = None) -> None:
        self.queue = queue or _next_of_pool(priority < 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.queue is other.queue

    def __ne__(self, other: object) -> bool:
        return not self == other  # torch's own would be used

    def __hash__(self) -> int:
        return hash(self.queue)

    def query(self) -> bool:
        DEVICE.check()
        return self.queue.has_passed(self.queue.num_issued)

    def synchronize(self) -> None:
        self.queue.wait(self.queue.num_issued)
        DEVICE.check()

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, other: torch.Stream) -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> Self:
        # Each thread enters and leaves by itself.
        _of_thread.__dict__.setdefault("before", []).append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(_of_thread.before.pop())


@cache
def default_stream(device: object = None) -> Stream:
    return Stream(queue=_default)


def _next_of_pool(is_high: bool) -> Queue:
    pool = _pools[is_high]
    # The one that was given longest ago.
    pool.append(Queue() if len(pool) < _POOL_SIZE else pool.pop(0))
    return pool[-1]


def _queue_of(stream: torch.Stream) -> Queue:
    assert isinstance(stream, Stream)
    return stream.queue


def current_stream(device: object = None, /) -> torch.Stream:
    """Return the stream on which this thread enqueues."""
    return getattr(_of_thread, "stream", None) or default_stream()


def set_stream(stream: torch.Stream) -> None:
    _of_thread.stream = stream


def synchronize(device: object = None, /) -> None:
    """Block until all streams have passed all that is enqueued."""
    for queue in tuple(DEVICE.queues):
        queue.wait(queue.num_issued)
    DEVICE.check()
