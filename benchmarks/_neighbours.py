"""Processor time that other processes take during a measurement.

Two cores are often shared, and times mean little without the load. A disturbed run is repeated, and the report states
the load during the runs that count.
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")

_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_IDLE_COLUMNS = (3, 4)  # of the line `cpu` in /proc/stat: idle, and waiting for a disk
_GUEST_COLUMN = 8  # in this column and the next, time counts twice
_TRIES = 8
_QUIET_FOR_S = 1.0
_LONGEST_WAIT_S = 300.0
_LAST_WORDS_S = 3.0


class Neighbours:
    """Runs measurements while the machine is quiet, and records the share of processor time that others took.

    Args:
        most: share of all cores above which a run is repeated, and that a run waits for before it starts.
    """

    def __init__(self, *, most: float) -> None:
        self._most = most
        self.shares: list[float] = []
        self.repeated = 0
        # A process that outlives its parent becomes our child, so that its processor time counts as ours.
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def undisturbed(self, measure: Callable[[Path], _Result], folder: Path) -> _Result:
        """Return the result of `measure` for `folder`, or if the run was disturbed, for a new folder beside it.

        `measure` gets a path that does not exist yet. The last of several tries counts, however disturbed.
        """
        for attempt in range(_TRIES):
            path = folder if attempt == 0 else folder.with_name(f"{folder.name}-again-{attempt}")
            self._wait()
            start, busy, own = time.monotonic(), _busy_s(), _own_s()
            result = measure(path)
            _reap()
            others = (_busy_s() - busy) - (_own_s() - own)
            share = max(0.0, others / ((time.monotonic() - start) * _cores()))
            if share <= self._most or attempt == _TRIES - 1:
                break
            self.repeated += 1
            progress(f"{path.name}: others took {share:.0%} of the machine; once more")
        self.shares.append(share)
        return result

    def to_json(self) -> dict[str, Any]:
        return {"others_share_of_processor_time": self.shares, "disturbed_runs_made_again": self.repeated}

    def __str__(self) -> str:
        if not self.shares:
            return "nothing was measured"
        return (
            f"others took {statistics.median(self.shares):.1%} of the processor time of a run in the median, "
            f"{max(self.shares):.1%} at most; {self.repeated} disturbed runs were made again"
        )

    def _wait(self) -> None:
        """Wait for a quiet moment, up to a limit."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while time.monotonic() < deadline:
            busy = _busy_s()
            time.sleep(_QUIET_FOR_S)
            if _busy_s() - busy <= self._most * _QUIET_FOR_S * _cores():
                return


def progress(message: str) -> None:
    """Print the current measurement to standard error."""
    print(f"[load {os.getloadavg()[0]:.2f}] {message}", file=sys.stderr, flush=True)


def _cores() -> int:
    # All cores, because /proc/stat does not know which of them we may use.
    return os.cpu_count() or 1


def _busy_s() -> float:
    """Return the seconds that all cores together were busy, or used by the host of this machine, since it started."""
    columns = [int(column) for column in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    busy = sum(value for index, value in enumerate(columns[:_GUEST_COLUMN]) if index not in _IDLE_COLUMNS)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the processor seconds of this process and of all its descendants that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _reap() -> None:
    """Reap orphaned descendants, after a moment for their last output."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if found == 0:
            time.sleep(0.01)
