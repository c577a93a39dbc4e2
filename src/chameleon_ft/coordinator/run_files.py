"""The checkpoints of a run, as its coordinator uses them: in a directory or in an object store.

The files of a run, as its coordinator uses them: injected failures, evidence and its own log.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from chameleon_ft.clock import unix_s
from chameleon_ft.coordinator.state.incidents import Fault
from chameleon_ft.errors import DamagedCheckpointError, StoreError
from chameleon_ft.job_record import JobRecord
from chameleon_ft.storage.checkpoints import (
    complete_checkpoints,
    discard_checkpoint,
    incomplete_checkpoints,
    is_complete,
    mark_complete,
    mark_damaged,
    note_evaluation,
    prune_checkpoints,
    require_sound,
)
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import FaultLog, RunDirectory
from chameleon_ft.storage.stores import Directory, Storage

_TAKE_OVER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Examined:
    """Findings about a complete checkpoint without reading its tensors.

    Attributes:
        damage: why it cannot be used; None if it can.
        is_damaged: whether its files are not as they were written; otherwise this host cannot read them.
        incomplete: steps of checkpoints that are not complete.
    """

    damage: str | None = None
    is_damaged: bool = False
    incomplete: tuple[int, ...] = ()

    @classmethod
    def of(cls, checkpoints: Storage, step: int) -> Self:
        """Examine the checkpoint of a step. If an object store does not answer, nothing is found: workers wait for it.

        They check what they read, too.
        """
        try:
            require_sound(checkpoints, step)
            return cls(incomplete=tuple(incomplete_checkpoints(checkpoints)))
        except StoreError:
            return cls()
        except (DamagedCheckpointError, OSError) as error:
            return cls(str(error), is_damaged=isinstance(error, DamagedCheckpointError))


class RunCheckpoints:
    """Marks, removes and examines checkpoints through a queue, so that no method waits for a disk or a store.

    An object store has a queue of its own, whose operations nothing waits for: each takes as long as several messages,
    and records must not come after them. No other process marks checkpoints, so those that are known once are not
    listed again.

    Args:
        files: the queue of the run's files.
        model: fingerprint of the model.
        job: kept with each checkpoint.
        keep: complete checkpoints to keep.
        keep_every: those whose step this number divides stay, too; 0: none for that.
        keep_best: the criterion of the best one, which stays, too; empty: none for that.
        base: step of the one that the run was forked from, which stays, too.
        not_marked: called in the thread of the queue if a checkpoint cannot be marked, with the reason.
        copy_records: called in that thread before a checkpoint is marked: it copies the records to where that is.
        takes_over: whether the run continues meanwhile: then a store that does not answer is not waited for.

    Raises:
        StoreError: an object store cannot be used.
    """

    def __init__(
        self,
        storage: Storage,
        files: FileQueue,
        *,
        model: str,
        num_layers: int,
        keep: int,
        keep_every: int = 0,
        keep_best: str = "",
        base: int | None,
        job: JobRecord | None = None,
        not_marked: Callable[[int, str], None],
        copy_records: Callable[[], None],
        takes_over: bool,
    ) -> None:
        self._storage = storage
        self._is_local = isinstance(storage, Directory)
        self._queue = files if self._is_local else files.beside()
        # The queue names it in messages.
        self._path = Path(storage.place())
        self._model = model
        self._job = job
        self._num_layers = num_layers
        self._keep = keep
        self._keep_every = keep_every
        self._keep_best = keep_best
        self._base = base
        self._not_marked = not_marked
        self._copy_records = copy_records
        # Steps of the checkpoints that could not be marked, and why.
        self._unmarked: dict[int, str] = {}
        # As far as they are known.
        self._complete: list[int] = []
        self._list(takes_over=takes_over)

    def _list(self, *, takes_over: bool) -> None:
        """Find the checkpoints that there are."""
        if self._is_local or not takes_over:
            self._complete = complete_checkpoints(self._storage)
            return

        found: Future[None] = Future()

        def add() -> None:
            self._complete = sorted({*self._complete, *complete_checkpoints(self._storage)})
            found.set_result(None)

        # It is tried again until the store answers.
        self._queue.submit(self._path, add)
        with contextlib.suppress(TimeoutError):
            found.result(_TAKE_OVER_S)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending; those known before if the disk does not answer."""
        if self._is_local:
            found = self._queue.answer(self._path, partial(complete_checkpoints, self._storage))
            self._complete = self._complete if found is None else found
        return self._complete

    def examine(self, step: int) -> Future[Examined]:
        """Examine a complete checkpoint; the result may be there already."""
        return self._queue.ask(self._path, partial(Examined.of, self._storage, step))

    def complete(
        self,
        step: int,
        *,
        agreed: int | None,
        slices: Collection[tuple[int, int, int]] = (),
        seals: Mapping[str, str] = MappingProxyType({}),
        evaluation: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Mark a checkpoint as complete, then remove those that are not needed any more; see `prune_checkpoints`.

        `evaluation`: the results of its state, if they are known.
        """

        def mark() -> None:
            self._try_copy_records()
            # A complete checkpoint never changes; what is written again of it has no seals.
            if not is_complete(self._storage, step):
                mark_complete(
                    self._storage,
                    step,
                    model=self._model,
                    num_layers=self._num_layers,
                    slices=slices,
                    seals=seals,
                    job=self._job,
                )
            if evaluation:
                # Without it, the checkpoint is only not the best.
                with contextlib.suppress(OSError):
                    note_evaluation(self._storage, step, evaluation)
            self._complete = sorted({*self._complete, step})
            # It may take long, and records wait for this queue.
            if self._is_local:
                threading.Thread(target=self._prune, args=(agreed,), name="prune", daemon=True).start()
            else:
                self._prune(agreed)

        def failed(error: OSError) -> None:
            self._unmarked[step] = str(error)
            self._not_marked(step, str(error))

        self._queue.submit(self._path, mark, failed=failed)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the results of an evaluation with the checkpoint of its state, if that is complete already."""

        def note() -> None:
            if is_complete(self._storage, step):
                note_evaluation(self._storage, step, values)

        self._queue.submit(self._path, note, failed=lambda _: None)

    def discard(self, step: int, *, agreed: int | None) -> None:
        """Remove a checkpoint that is not complete, and those that are not needed any more."""

        def remove() -> None:
            discard_checkpoint(self._storage, step)
            self._prune(agreed)

        self._queue.submit(self._path, remove, failed=lambda _: None)

    def mark_damaged(self, step: int) -> None:
        """Mark a checkpoint as damaged."""
        self._complete = [each for each in self._complete if each != step]
        # This run does not read it again either way.
        self._queue.submit(self._path, partial(mark_damaged, self._storage, step), failed=lambda _: None)

    def distrust(self, after: int) -> None:
        """Mark all checkpoints of later steps than `after` as damaged."""
        for step in self.steps():
            if step > after:
                self.mark_damaged(step)

    async def why_unmarked(self, step: int, timeout_s: float) -> str | None:
        """Return why a checkpoint could not be marked, once a store has all that it was given so far; None if it was.

        A store is waited for no longer than `timeout_s`.
        """
        is_settled = self._is_local or await self._asked(lambda: None, timeout_s)
        return self._unmarked.get(step, None if is_settled else "the store does not answer")

    async def copy_records(self, timeout_s: float) -> None:
        """Copy the records to a store once more; wait for it no longer than that."""
        if not self._is_local:
            await self._asked(self._try_copy_records, timeout_s)

    async def _asked(self, act: Callable[[], None], timeout_s: float) -> bool:
        done, _ = await asyncio.wait([asyncio.wrap_future(self._queue.ask(self._path, act))], timeout=timeout_s)
        return bool(done)

    def watch(self) -> None:
        """Raise any error but an OSError of an operation on a store; to be called periodically.

        A store that does not answer is reported with each checkpoint that cannot be marked.
        """
        # Otherwise, the recorder watches the queue.
        if not self._is_local:
            self._queue.news()

    def abandon(self) -> None:
        """Start no further operation."""
        self._queue.abandon()

    def _try_copy_records(self) -> None:
        # A store that has failed says so when the checkpoint is marked.
        with contextlib.suppress(OSError):
            self._copy_records()

    def _prune(self, agreed: int | None) -> None:
        # The next checkpoint brings another attempt.
        with contextlib.suppress(OSError):
            removed = prune_checkpoints(
                self._storage,
                keep=self._keep,
                every=self._keep_every,
                best=self._keep_best,
                agreed=agreed,
                base=self._base,
            )
            self._complete = [step for step in self._complete if step not in removed]


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
