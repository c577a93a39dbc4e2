"""Where a run has its checkpoints and copies of its records; fsspec is loaded only if that is an object store."""

from __future__ import annotations

from collections.abc import Callable

from chameleon_ft.config import RunConfig
from chameleon_ft.observe.files import RunDirectory
from chameleon_ft.observe.storage import Directory, Storage


def checkpoint_storage(config: RunConfig, run: RunDirectory, *, gives_up: bool = True) -> Storage:
    """Return the place of the checkpoints of a run: its directory, or the object store of its configuration.

    `gives_up`: whether requests to an object store that does not answer end with an error.
    """
    if not config.store.url:
        return Directory(run.checkpoints, run_of=config.run_of)
    from chameleon_ft.observe.object_store import ObjectStore

    store = config.store
    return ObjectStore(store.checkpoints, timeout_s=store.timeout_s, gives_up=gives_up, run_of=config.run_of)


def record_copies(config: RunConfig, run: RunDirectory) -> Callable[[], None]:
    """Return a function that copies the records of a run to its object store, if it has one.

    It raises StoreError.
    """
    if not config.store.url:
        return lambda: None
    from chameleon_ft.observe.stored_records import RecordCopies, store_of

    return RecordCopies(run, store_of(config)).save
