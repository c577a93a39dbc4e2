"""Where a run has its checkpoints and copies of its records; fsspec is loaded only if that is an object store.

Copies of the records of a run in an object store, from which it can be resumed on another machine.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from chameleon_ft.config import RunConfig
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import Directory, ObjectStore, Storage


def checkpoint_storage(config: RunConfig, run: RunDirectory, *, gives_up: bool = True) -> Storage:
    """Return the place of the checkpoints of a run: its directory, or the object store of its configuration.

    `gives_up`: whether requests to an object store that does not answer end with an error.
    """
    if not config.store.url:
        return Directory(run.checkpoints, run_of=config.run_of)
    from chameleon_ft.storage.stores import ObjectStore

    store = config.store
    return ObjectStore(store.checkpoints, timeout_s=store.timeout_s, gives_up=gives_up, run_of=config.run_of)


def record_copies(config: RunConfig, run: RunDirectory) -> Callable[[], None]:
    """Return a function that copies the records of a run to its object store, if it has one.

    It raises StoreError.
    """
    if not config.store.url:
        return lambda: None

    return RecordCopies(run, store_of(config)).save


_PLANS: Final = "plans"


def store_of(config: RunConfig) -> ObjectStore:
    """Return the object store of a run."""
    return ObjectStore(config.store.url, timeout_s=config.store.timeout_s)


def has_records(store: ObjectStore) -> bool:
    """Return whether a run has copied its records to a store. Raises StoreError."""
    return store.exists(RunDirectory(Path()).config_file.name)


class RecordCopies:
    """Copies the records of a run to an object store and back. Methods raise StoreError, or another OSError."""

    def __init__(self, run: RunDirectory, store: ObjectStore) -> None:
        self._run = run
        self._store = store
        # The bytes and the modification time of each file when it was copied.
        self._copied: dict[str, tuple[int, int]] = {}

    def save(self) -> None:
        """Copy all files that have changed since the last time."""
        files = [self._run.path / name for name in self._names_at_top()]
        for file in filter(Path.exists, (*files, *sorted(self._run.plans.glob("*.json")))):
            name, stat = str(file.relative_to(self._run.path)), file.stat()
            state = stat.st_size, stat.st_mtime_ns
            if self._copied.get(name) == state:
                continue
            with tempfile.TemporaryDirectory(prefix="chameleon-") as scratch:
                # The run may write into it meanwhile, and the length of an object is told first.
                self._store.upload(Path(shutil.copy(file, scratch)), name)
            self._copied[name] = state

    def fetch(self) -> None:
        """Copy all files from the store into the directory of the run, which has none of them."""
        for name in (*self._names_at_top(), *(f"{_PLANS}/{each}" for each in self._store.names(_PLANS))):
            if self._store.exists(name):
                target = self._run.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._store.download(name, target)

    def _names_at_top(self) -> list[str]:
        """Return the names of the files that a resumed run, or a reader of its records, needs; the configuration last.

        So the store has a configuration only together with the other files.
        """
        run = self._run
        files = (run.metrics_file, run.events_file, run.faults_file, run.summary_file, run.profile_file)
        return [file.name for file in (*files, run.start_plan_file, run.config_file)]
