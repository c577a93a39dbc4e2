"""The file operations of a coordinator, in a thread of their own: no full or hanging disk stops the run."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from chameleon_ft.storage.files import remove_unfinished_line, replace_file

_PATIENCE_S: Final = 0.25
_ANNOUNCED_AFTER_S: Final = 3.0
_RETRY_S: Final = 0.1
_RETRY_MAX_S: Final = 5.0
_LONGEST_BYTES: Final = 64 << 20
_PASSING: Final = frozenset(
    {
        errno.EBUSY,
        errno.EDQUOT,
        errno.EHOSTDOWN,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ENOTCONN,
        errno.EREMOTEIO,
        errno.EROFS,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
"""Errors of a file system that is full, cut off or out of order; any others are errors of an operation itself."""

_NOT_NOW: Final = OSError(errno.EPERM, "another coordinator may lead the run")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Late:
    """The oldest operation, on `path`, has failed or has been running for long; `reason` says which."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All operations are done after they had been late for `late_s` seconds; `dropped` lines are lost."""

    late_s: float
    dropped: int


@dataclass(slots=True, eq=False)
class _Operation:
    path: Path
    act: Callable[[], object]
    failed: Callable[[OSError], object] | None = None
    line: bytes = b""
    num_bytes_written: int = 0
    begun_at_s: float | None = None
    error: OSError | None = None


class FileQueue(AbstractContextManager["FileQueue"]):
    """Carries out file operations in their order, in a thread of its own.

    While the disk is quick, each method returns when its operation is done. An operation that takes longer than
    `patience_s`, or fails, makes the queue late: from then on no method waits, until all operations are done. One that
    fails because of the file system is tried again until it succeeds. The methods are called from one thread.

    **Files of a coordinator that does not lead any more.** `may_write` says right before each operation whether this
    process may still write; until it may, operations wait, and after `abandon` none is carried out. A process that is
    stopped between that question and the operation, and continued after another coordinator has taken over, can do no
    harm with the operation that was under way:

    - A line is appended to a file that was open before the question. Whoever takes over replaces these files by copies
      of them, see `detach`, so the late line goes to a file that has no name any more.
    - A replaced or removed file is one that only this process writes (the journal and the plans of its term), or that
      it replaces or removes only at its own start and end (`control.json`, `summary.json`): that one operation may come
      late, and leave the other coordinator's content there replaced, or that file removed, until it is written again.

    Args:
        longest_bytes: Bytes of appended lines that may wait; any more are dropped, so that the oldest are kept.
        may_write: called in the thread.
        patience_s: 0: no method waits at all.
    """

    def __init__(
        self,
        *,
        longest_bytes: int = _LONGEST_BYTES,
        may_write: Callable[[], bool] = lambda: True,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._longest_bytes = longest_bytes
        self._may_write = may_write
        self._patience_s = patience_s
        self._changed = threading.Condition()
        # The oldest first; that one stays here while it is carried out.
        self._waiting: OrderedDict[int, _Operation] = OrderedDict()
        self._next = 0
        self._bytes = 0
        self._dropped = 0
        self._late_since_s: float | None = None
        self._is_announced = False
        self._is_closed = False
        self._is_abandoned = False
        self._broken: Exception | None = None
        # Used in the thread only.
        self._open: dict[Path, int] = {}
        self._thread = threading.Thread(target=self._work, name="files", daemon=True)
        self._thread.start()

    @property
    def is_late(self) -> bool:
        """Whether operations wait for a disk that does not answer, or cannot be written."""
        return self._late_since_s is not None

    @property
    def num_waiting(self) -> int:
        """How many operations are not done."""
        return len(self._waiting)

    def append(self, path: Path, line: str) -> int | None:
        """Append a line to a file; the first time, remove an unfinished last line, which a crash may have left.

        Returns a number for `cancel`; None if the line is dropped.
        """
        encoded = line.encode()
        if self._bytes + len(encoded) > self._longest_bytes:
            self._dropped += 1
            return None
        operation = _Operation(path, lambda: self._write(operation), line=encoded)
        return self._put(operation)

    def replace(self, path: Path, text: Callable[[], str], *, mode: int) -> int:
        """Replace the content of a file by `text()`, called in the thread. Returns a number for `cancel`."""

        def act() -> None:
            replace_file(path, text(), mode=mode)
            if (descriptor := self._open.pop(path, None)) is not None:
                os.close(descriptor)

        return self._put(_Operation(path, act))

    def submit(
        self, path: Path, act: Callable[[], object], *, failed: Callable[[OSError], object] | None = None
    ) -> None:
        """Carry out an operation that can be repeated when it has failed; `path` is for messages.

        Args:
            failed: called in the thread with an error that the operation itself is to blame for; it is not tried again.
        """
        self._put(_Operation(path, act, failed))

    def abandon(self) -> None:
        """Carry out no operation any more, but for one that is under way."""
        with self._changed:
            self._is_abandoned = True
            self._waiting.clear()
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """Remove an operation, unless it has begun."""
        with self._changed:
            operation = self._waiting.get(number)
            if operation is not None and operation.begun_at_s is None:
                del self._waiting[number]
                self._bytes -= len(operation.line)

    def ask(self, path: Path, read: Callable[[], Result]) -> Future[Result]:
        """Call a function after all operations so far, once. Its result may be there already, see `wait`."""
        answer: Future[Result] = Future()

        def act() -> None:
            try:
                answer.set_result(read())
            except Exception as error:  # noqa: BLE001 - raised where the result is used
                answer.set_exception(error)

        self._put(_Operation(path, act))
        return answer

    def answer(self, path: Path, read: Callable[[], Result]) -> Result | None:
        """Return what `read` returns; None if the disk does not answer at once, or operations that are late come first.

        Raises what it raises.
        """
        if self.is_late:
            return None
        reading = self.ask(path, read)
        return reading.result() if reading.done() else None

    def beside(self) -> FileQueue:
        """Return a queue for an object store, whose methods do not wait, with the same right to write."""
        return FileQueue(may_write=self._may_write, patience_s=0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether all operations are done; wait for them if the queue is not late. None: `patience_s`."""
        timeout_s = self._patience_s if timeout_s is None else timeout_s
        with self._changed:
            if self._changed.wait_for(lambda: not self._waiting or self.is_late, timeout_s):
                return not self._waiting
            self._begin_late()
        return False

    def news(self) -> Late | CaughtUp | None:
        """Return what has changed for the user since the last call; one delay is announced once.

        Raises any other error than an OSError of an operation.
        """
        with self._changed:
            if self._broken is not None:
                error, self._broken = self._broken, None
                raise error
            if not self._is_announced and (late := self._late()) is not None:
                self._is_announced = True
                return late
            if self._is_announced and not self._waiting:
                assert self._late_since_s is not None
                caught_up = CaughtUp(time.monotonic() - self._late_since_s, self._dropped)
                self._is_announced, self._late_since_s, self._dropped = False, None, 0
                return caught_up
        return None

    def late(self) -> Late | None:
        """Return why operations wait; None if they do not."""
        with self._changed:
            return self._late()

    def unwritten(self) -> tuple[Late | None, list[tuple[Path, str]]]:
        """Return why operations wait, if they do, and the lines that are not in their files, or not as a whole."""
        with self._changed:
            lines = [(each.path, each.line.decode()) for each in self._waiting.values() if each.line]
            return self._late(), lines

    def __exit__(self, *_: object) -> None:
        self.wait()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self.is_late:
            self._thread.join()

    def _put(self, operation: _Operation) -> int:
        with self._changed:
            self._next += 1
            if self._is_abandoned:
                return self._next
            self._waiting[self._next] = operation
            self._bytes += len(operation.line)
            self._changed.notify_all()
            number = self._next
        self.wait()
        return number

    def _late(self) -> Late | None:
        first = next(iter(self._waiting.values()), None)
        if first is None or first.begun_at_s is None:
            return None
        if first.error is not None:
            return Late(first.path, f"[Errno {first.error.errno}] {first.error.strerror}")
        seconds = time.monotonic() - first.begun_at_s
        return Late(first.path, f"no answer for {seconds:.0f} s") if seconds > _ANNOUNCED_AFTER_S else None

    def _begin_late(self) -> None:
        if self._late_since_s is None:
            self._late_since_s = time.monotonic()
            self._changed.notify_all()

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause_s = _RETRY_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    break
                if self._is_abandoned:
                    self._waiting.clear()
                    continue
                number, operation = next(iter(self._waiting.items()))
                if operation.begun_at_s is None:
                    operation.begun_at_s = time.monotonic()
            try:
                if not self._may_write():
                    raise _NOT_NOW
                operation.act()
            except OSError as error:
                if operation.failed is None or error.errno in _PASSING or error is _NOT_NOW:
                    with self._changed:
                        operation.error = error
                        self._begin_late()
                    time.sleep(_RETRY_S if error is _NOT_NOW else pause_s)
                    pause_s = min(2 * pause_s, _RETRY_MAX_S)
                    continue
                operation.failed(error)
            except Exception as error:  # noqa: BLE001 - raised by `news`
                self._broken = error
            pause_s = _RETRY_S
            with self._changed:
                if self._waiting.pop(number, None) is not None:
                    self._bytes -= len(operation.line)
                if not self._waiting:
                    if not self._is_announced:
                        self._late_since_s = None
                    self._changed.notify_all()
        for descriptor in self._open.values():
            os.close(descriptor)

    def _write(self, operation: _Operation) -> None:
        """Append what is left of a line. A part of it stays in the file if there is no room for all."""
        path = operation.path
        if path not in self._open:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            # Only now is it certain that this is no file of a coordinator that has taken over meanwhile.
            if not self._may_write():
                os.close(descriptor)
                raise _NOT_NOW
            remove_unfinished_line(descriptor)
            self._open[path] = descriptor
        while rest := operation.line[operation.num_bytes_written :]:
            operation.num_bytes_written += os.write(self._open[path], rest)
