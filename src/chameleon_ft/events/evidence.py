"""Evidence of a hang: the last activities of a worker and the stacks of its threads, and the place where it hangs.

A worker keeps the activities in a file as a ring of entries of a fixed size, which it writes without any system call.
The stacks follow them, as `faulthandler` or py-spy writes them.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

ACTIVITY: Final = "chameleon activity"
"""Name of the file in memory with the activity of a worker."""
ENTRIES: Final = 16
"""Entries of the ring."""
ENTRY_BYTES: Final = 160
"""Bytes of an entry; a longer one is cut."""
STACKS_SIGNAL: Final = signal.SIGUSR2
"""Has a worker append the stacks of all its threads to its file."""

_ENTRY: Final = re.compile(r"(?P<time>\d+\.\d{6}) (?P<verb>runs|waits|reads): (?P<doing>.*\S)")
# As faulthandler writes a frame, or py-spy.
_FRAME: Final = re.compile(
    r'^\s+(?:File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)'
    r"|(?P<function2>.+) \((?P<file2>.+):(?P<line2>\d+)\))$"
)
_THREAD: Final = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)
_STANDARD_LIBRARY: Final = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<")
# wandb replaces `sys.exit`.
_FRAMEWORK: Final = re.compile(r"/(?:site|dist)-packages/(?:torch|wandb)/|/chameleon_ft/(?!models/|data/|optim\.py)")
# Functions: one of the training thread; the one of torch that waits for a backward, or runs it; and the one in which a
# thread begins that Python has started.
_ENTRY_POINT: Final = "rank_main"
_BACKWARD: Final = "_engine_run_backward"
_BOOTSTRAP: Final = "_bootstrap"
# faulthandler writes other characters than those of ASCII like this.
_ESCAPED: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u((?!d[89a-f])[0-9a-f]{4})|U(00(?:0[0-9a-f]|10)[0-9a-f]{4}))")


def activity_entry(time: float = 0.0, doing: str = "", *, waiting: bool = False, is_reading: bool = False) -> bytes:
    """Return an entry of the ring; without arguments an empty one. `time` is in Unix seconds."""
    verb = "reads" if is_reading else "waits" if waiting else "runs"
    text = f"{time:.6f} {verb}: {doing}" if doing else ""
    return text.encode("ascii", "replace")[: ENTRY_BYTES - 1].ljust(ENTRY_BYTES - 1) + b"\n"


@dataclass(frozen=True, slots=True)
class ActivityEntry:
    """An activity of a worker's training thread, and when it began, in Unix seconds; `is_reading` a sample."""

    time: float
    waiting: bool
    doing: str
    is_reading: bool = False

    def __str__(self) -> str:
        if self.is_reading:
            return self.doing
        return f"waiting: {self.doing}" if self.waiting else f"in {self.doing}"


@dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_of_the_job(self) -> bool:
        return not (_STANDARD_LIBRARY.search(self.file) or _FRAMEWORK.search(self.file))


def place_of(error: BaseException) -> str | None:
    """Return "FILE:LINE in FUNCTION", the innermost place in code of the job at which an error was raised, if any."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = (_Frame(each.filename, str(each.lineno), each.name) for each in reversed(stack))
    return next((str(frame) for frame in frames if frame.is_of_the_job), None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The last activities of a worker, oldest first, and the stacks of its threads; either may be empty."""

    activities: tuple[ActivityEntry, ...]
    stacks: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a worker's file; what is not as it should be is left out, for it may have been read while written."""
        ring, stacks = text[: ENTRIES * ENTRY_BYTES], text[ENTRIES * ENTRY_BYTES :]
        found = (_ENTRY.match(line) for line in ring.splitlines())
        entries = [
            ActivityEntry(float(e["time"]), e["verb"] != "runs", e["doing"], e["verb"] == "reads") for e in found if e
        ]
        return cls(tuple(sorted(entries, key=lambda entry: entry.time)), stacks)

    @property
    def last(self) -> ActivityEntry | None:
        """The activity in which the worker hangs."""
        return self.activities[-1] if self.activities else None

    @property
    def place(self) -> str | None:
        """Return "FILE:LINE in FUNCTION", the innermost place of the training thread in code of the job.

        If there is none, it is the innermost place outside the standard library. None without stacks.
        """
        frames = list(self._training_frames())
        own = [frame for frame in frames if not _STANDARD_LIBRARY.search(frame.file)]
        of_the_job = [frame for frame in own if frame.is_of_the_job]
        return next((str(frame) for frame in (*of_the_job, *own, *frames)), None)

    def _training_frames(self) -> Iterator[_Frame]:
        """Yield the frames of the training thread, innermost first, and before them those of a backward it waits for.

        On an accelerator, a thread that torch has started runs the backward, and what Python code is in it.
        """
        threads = [thread for thread in _THREAD.split(self.stacks) if thread]
        # The outermost frames of a deep stack are left out. The signal goes to the main thread, which is the oldest.
        training = [thread for thread in threads if _ENTRY_POINT in thread]
        current = [thread for thread in threads if thread.startswith("Current")]
        for thread in (training or current or threads)[-1:]:
            frames = list(_frames_of(thread))
            if frames and frames[0].function == _BACKWARD:
                for other in threads:
                    backward = list(_frames_of(other))
                    is_of_torch = other is not thread and bool(backward) and backward[-1].function != _BOOTSTRAP
                    if is_of_torch and any(frame.is_of_the_job for frame in backward):
                        yield from backward
            yield from frames


def _frames_of(thread: str) -> Iterator[_Frame]:
    """Yield the frames of a thread, innermost first."""
    for found in map(_FRAME.match, thread.splitlines()):
        if found and found["file"]:
            yield _Frame(_unescaped(found["file"]), found["line"], _unescaped(found["function"]))
        elif found:
            yield _Frame(found["file2"], found["line2"], found["function2"])


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int("".join(filter(None, found.groups())), 16)), text)
