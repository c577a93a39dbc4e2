"""The files of a run, as its coordinator uses them: injected failures, evidence and its own log."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path

from chameleon_ft.clock import unix_s
from chameleon_ft.control.state.incident import Fault
from chameleon_ft.observe import FaultLog, FileQueue, RunDirectory


class RunFiles:
    """Reads and writes files through a queue, so that no method waits for a disk that does not answer."""

    def __init__(self, run: RunDirectory, queue: FileQueue) -> None:
        self._run = run
        self._queue = queue
        self._fault_log = FaultLog(run.faults_file)
        self._began_at = unix_s()

    def faults(self) -> tuple[Fault, ...] | None:
        """Return the failures injected since this was made; None if the disk does not answer."""
        lines = self._queue.answer(self._run.faults_file, partial(self._fault_log.since, self._began_at))
        return None if lines is None else tuple(Fault(line["worker"], line["kind"], line["time"]) for line in lines)

    def log_kill(self, worker: int) -> None:
        """Note that a worker is killed on purpose."""
        append = partial(self._fault_log.append, worker=worker, kind="kill", phase=None, step=None, at_s=unix_s())
        self._queue.submit(self._run.faults_file, append)

    def log_error(self, error: Exception) -> Path:
        """Write the traceback of an error of the coordinator. Returns the path of the log."""
        log = self._run.logs / "coordinator.log"
        self._queue.append(log, "".join(traceback.format_exception(error)))
        return log

    def save_evidence(self, file: str, text: str) -> None:
        """Write evidence of a hang."""
        path = self._run.incidents / file

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

        self._queue.submit(path, write)
