"""Activity of the training thread, which others can read, and reports of reads and writes that take long."""

from __future__ import annotations

import faulthandler
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chameleon_ft.clock import unix_s
from chameleon_ft.control.wire.messages import Position, SlowIO
from chameleon_ft.observe.evidence import ACTIVITY, ENTRIES, ENTRY_BYTES, STACKS_SIGNAL, activity_entry


class Activity:
    """Activity of the training thread, which writes it; the control thread reads it.

    It is also in a file in memory from which another process can read it while this one does not answer.
    """

    def __init__(self) -> None:
        self._file: mmap.mmap | None = None
        self._slots = itertools.cycle(range(0, ENTRIES * ENTRY_BYTES, ENTRY_BYTES))
        self.idle("starting")

    def publish(self) -> None:
        """Write the activity to a file in memory from now on, and the stacks of all threads after it at STACKS_SIGNAL.

        Neither needs the interpreter's lock to be read or written, nor a disk. An OSError is only printed.
        """
        try:
            # Not closed: faulthandler writes to it in a signal handler, and other processes find it by its name.
            descriptor = os.memfd_create(ACTIVITY)
            os.write(descriptor, b"".join([activity_entry()] * ENTRIES))
            self._file = mmap.mmap(descriptor, ENTRIES * ENTRY_BYTES)
            faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
        except OSError as error:  # training does not depend on it
            print(f"if this worker hangs, its operation will not be known: {error}", flush=True)

    def begin(self, doing: str) -> None:
        """Note that the thread computes, by itself."""
        self._note({"doing": doing, "waiting": False})

    def idle(self, doing: str) -> None:
        """Note that the thread waits for an order."""
        self._note({"doing": doing, "waiting": True})

    @contextmanager
    def waiting(
        self, doing: str, *, for_message: bool = False, peer: int | None = None, is_reading: bool = False
    ) -> Iterator[None]:
        """Note that inside the block the thread waits, for another rank or for memory or disk.

        After it the thread does what it did before: it computes, or waits in an outer block.

        Args:
            for_message: whether it waits for another rank.
            peer: that rank; None if a collective does not tell.
            is_reading: whether it reads a sample.
        """
        before, _ = self._state
        self._note(
            {"doing": doing, "waiting": True, "for_message": for_message, "peer": peer, "is_reading": is_reading}
        )
        try:
            yield
        finally:
            self._note(before)

    def position(self, probe: int) -> Position:
        """Return the answer to a probe."""
        fields, since = self._state
        return Position(probe=probe, since_s=time.monotonic() - since, **fields)

    def _note(self, fields: dict[str, Any]) -> None:
        """Note some fields of a `Position`."""
        self._state = (fields, time.monotonic())
        if self._file is not None:
            begin = next(self._slots)
            self._file[begin : begin + ENTRY_BYTES] = activity_entry(
                unix_s(), fields["doing"], waiting=fields["waiting"], is_reading=fields.get("is_reading", False)
            )


class SlowIOReporter:
    """Tells the coordinator that a read or write of this rank takes long, so that it does not count as a hang.

    Args:
        send: sends to the coordinator, from any thread.
        first_s: seconds until the first report; the next follow whenever the time has doubled.
    """

    def __init__(self, activity: Activity, send: Callable[[SlowIO], None], *, first_s: float = 10.0) -> None:
        self._activity = activity
        self._send = send
        self._first_s = first_s

    @contextmanager
    def waiting(self, doing: str, generation: int) -> Iterator[None]:
        """Report while the training thread waits for the disk inside the block."""
        over = threading.Event()
        # A separate thread, because the training thread may be stuck in the file system.
        threading.Thread(target=self._report, args=(doing, generation, over), name="slow io", daemon=True).start()
        try:
            with self._activity.waiting(doing):
                yield
        finally:
            over.set()

    def _report(self, doing: str, generation: int, over: threading.Event) -> None:
        pause_s = since_s = self._first_s
        while not over.wait(pause_s):
            self._send(SlowIO(generation=generation, doing=doing, since_s=since_s))
            pause_s, since_s = since_s, 2 * since_s
