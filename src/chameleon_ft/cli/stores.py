"""The object store of a run on the command line: whether it can be used, and runs that are fetched from it.

fsspec is loaded only where a store is named.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from chameleon_ft.config import RunConfig, Store, config_type, parse_config, read_recorded_toml
from chameleon_ft.errors import CheckpointError, ConfigError, StoreError
from chameleon_ft.observe import RunDirectory, complete_checkpoints

_SCHEME: Final = "://"


def is_url(run: str) -> bool:
    """Return whether a run is named by its folder in an object store."""
    return _SCHEME in run


def require_store(config: RunConfig, *, is_free: bool = False) -> None:
    """Raise ConfigError if the store of a run cannot be used, or if `is_free` is required and it has a run already."""
    if not config.store.url:
        return
    from chameleon_ft.observe.stored_records import has_records, store_of

    store = store_of(config)
    store.check()
    try:
        if is_free and (has_records(store) or has_checkpoints(config.store)):
            raise ConfigError(
                f"store.url = {store.url}: has a run already, and a run never writes over anything; take another "
                f"folder, or continue that run by --resume {store.url}"
            )
    except StoreError as error:
        raise ConfigError(f"store.url = {error}") from None


def has_checkpoints(store: Store) -> bool:
    """Return whether a store has a complete checkpoint. Raises StoreError."""
    from chameleon_ft.observe.object_store import ObjectStore

    return bool(complete_checkpoints(ObjectStore(store.checkpoints, timeout_s=store.timeout_s)))


def require_same_store(config: RunConfig, directory: RunDirectory) -> None:
    """Raise CheckpointError if a resumed run would not find the checkpoints that it has written."""
    before = directory.config().store.url
    if config.store.url != before:
        where = before or str(directory.checkpoints)
        raise CheckpointError(
            f"--resume {directory.path}: its checkpoints are in {where}, not in "
            f"{config.store.url or directory.checkpoints}; leave store.url as it was, or continue from its state in a "
            "new directory by --fork --output-dir DIRECTORY"
        )


def fetch_run(store: Store, path: Path) -> RunDirectory:
    """Make the directory of a run from the records in its store. Raises ConfigError.

    Args:
        path: the directory, which is empty but for its lock.
    """
    from chameleon_ft.observe.object_store import ObjectStore
    from chameleon_ft.observe.stored_records import RecordCopies, has_records

    run, remote = RunDirectory(path.absolute()), ObjectStore(store.url, timeout_s=store.timeout_s)
    try:
        if not has_records(remote):
            raise ConfigError(f"--resume {store.url}: there is no run; give the store.url of one")
        for folder in (run.path, run.checkpoints, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
        RecordCopies(run, remote).fetch()
        values = read_recorded_toml(run.config_file)
        values["store"] = {**values.get("store", {}), "url": store.url}  # the folder may have been moved
        config = run.own(parse_config(config_type(values), values, source=f"{store.url}/config.toml"))
        run.path.chmod(int(config.output_mode, 8))
        run.write_config(config)
    except ConfigError:
        shutil.rmtree(run.path, ignore_errors=True)  # so that the same command works once that is mended
        raise
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise ConfigError(f"--resume {store.url}: its records cannot be fetched: {error}") from None
    print(f"{run.path}: the records of the run are fetched from {store.url}")
    return run
