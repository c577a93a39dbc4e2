"""When each injected failure happened: the failing process notes it, and detection is timed against it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["FaultLog"]


class FaultLog:
    """A file of lines that any process of the run appends to, each line in one write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, *, worker: int, kind: str, phase: str | None, step: int | None) -> None:
        """Note that `worker` fails now."""
        line = json.dumps({"time": time.time(), "worker": worker, "kind": kind, "phase": phase, "step": step}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def last(self, worker: int) -> dict[str, Any] | None:
        """Return the newest failure of `worker`, with `time` in Unix seconds; None where there is none."""
        return next((line for line in reversed(self._lines()) if line["worker"] == worker), None)

    def since(self, time: float) -> list[dict[str, Any]]:
        """Return the failures of all workers at this time, in Unix seconds, or after it, oldest first."""
        return [line for line in self._lines() if line["time"] >= time]

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines() if line]
