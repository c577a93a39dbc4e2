"""The files of a run, as its coordinator uses them: checkpoints, injected failures, evidence and its own log."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from chameleon_ft.observe import (
    FaultLog,
    FileQueue,
    RunDirectory,
    complete_checkpoints,
    damage_of,
    discard_checkpoint,
    has_checksums,
    incomplete_checkpoints,
    mark_complete,
    mark_damaged,
    prune_checkpoints,
)

__all__ = ["Examined", "RunFiles"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Examined:
    """Findings about a complete checkpoint without reading its tensors.

    Attributes:
        damage: None if there is none.
        has_checksums: whether it can be checked when it is read.
        incomplete: steps of checkpoints that are not complete.
    """

    damage: str | None
    has_checksums: bool
    incomplete: tuple[int, ...]

    @classmethod
    def of(cls, checkpoints: Path, step: int) -> Self:
        """Examine the checkpoint of a step."""
        damage = damage_of(checkpoints, step)
        checked = damage is None and has_checksums(checkpoints, step)
        return cls(damage, checked, tuple(incomplete_checkpoints(checkpoints)))


class RunFiles:
    """Reads and writes files through a queue, so that no method waits for a disk that does not answer.

    Args:
        model: fingerprint of the model.
        keep: complete checkpoints to keep.
        base: step of the one that the run was forked from, which stays, too.
    """

    def __init__(
        self, run: RunDirectory, queue: FileQueue, *, model: str, num_layers: int, keep: int, base: int | None = None
    ) -> None:
        self._run = run
        self._queue = queue
        self._model = model
        self._num_layers = num_layers
        self._keep = keep
        self._base = base
        self._fault_log = FaultLog(run.faults_file)
        self._began_at = time.time()
        self._complete = complete_checkpoints(run.checkpoints)  # as far as known, in case the disk does not answer

    def faults(self) -> list[dict[str, Any]] | None:
        """Return the failures injected since this was made; None if the disk does not answer."""
        return self._read(self._run.faults_file, partial(self._fault_log.since, self._began_at))

    def log_kill(self, worker: int) -> None:
        """Note that a worker is killed on purpose."""
        append = partial(self._fault_log.append, worker=worker, kind="kill", phase=None, step=None, at_s=time.time())
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

    def complete_checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending; those known before if the disk does not answer."""
        checkpoints = self._run.checkpoints
        found = self._read(checkpoints, partial(complete_checkpoints, checkpoints))
        self._complete = self._complete if found is None else found
        return self._complete

    def examine(self, step: int) -> Future[Examined]:
        """Examine a complete checkpoint; the result may be there already."""
        checkpoints = self._run.checkpoints
        return self._queue.ask(checkpoints, partial(Examined.of, checkpoints, step))

    def complete(self, step: int, *, agreed: int | None, slices: Collection[tuple[int, int, int]] = ()) -> None:
        """Mark a checkpoint as complete, then remove those that are not needed any more; see `prune_checkpoints`."""
        checkpoints = self._run.checkpoints

        def mark() -> None:
            mark_complete(checkpoints, step, model=self._model, num_layers=self._num_layers, slices=slices)
            self._complete = sorted({*self._complete, step})
            # It may take long.
            threading.Thread(target=self._prune, args=(agreed,), name="prune", daemon=True).start()

        # A checkpoint that a user has removed cannot be marked.
        self._queue.submit(checkpoints, mark, failed=lambda _: None)

    def discard(self, step: int, *, agreed: int | None) -> None:
        """Remove a checkpoint that is not complete, and those that are not needed any more."""

        def remove() -> None:
            discard_checkpoint(self._run.checkpoints, step)
            self._prune(agreed)

        self._queue.submit(self._run.checkpoints, remove, failed=lambda _: None)

    def mark_damaged(self, step: int) -> None:
        """Mark a checkpoint as damaged."""
        self._complete = [each for each in self._complete if each != step]
        mark = partial(mark_damaged, self._run.checkpoints, step)
        # This run does not read it again either way.
        self._queue.submit(self._run.checkpoints, mark, failed=lambda _: None)

    def distrust(self, after: int) -> None:
        """Mark all checkpoints of later steps than `after` as damaged."""
        for step in self.complete_checkpoints():
            if step > after:
                self.mark_damaged(step)

    def _prune(self, agreed: int | None) -> None:
        with contextlib.suppress(OSError):  # the next checkpoint brings another attempt
            prune_checkpoints(self._run.checkpoints, keep=self._keep, agreed=agreed, base=self._base)

    def _read(self, path: Path, read: Callable[[], Result]) -> Result | None:
        """Return what `read` returns; None if the disk does not answer at once, or files that are late come first."""
        if self._queue.is_late:
            return None
        reading = self._queue.ask(path, read)
        return reading.result() if reading.done() else None
