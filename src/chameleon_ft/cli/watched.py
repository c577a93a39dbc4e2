"""Arguments of the commands that show a run: its directory, or its coordinator.

Whether a run is live, with its coordinator or without.

The object store of a run on the command line: whether it can be used, and runs that are fetched from it.

fsspec is loaded only where a store is named.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Optional

import tyro

from chameleon_ft.cli.arguments import OptionalPath, OptionalStr, metavar
from chameleon_ft.cli.joining import JoinArguments
from chameleon_ft.config import RunConfig, Store, config_type, parse_config, read_recorded_toml
from chameleon_ft.errors import ChameleonError, CheckpointError, ConfigError, LiveRunError, StoreError
from chameleon_ft.protocol.address import TOKEN_VARIABLE, split_address
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """The arguments that name the run."""

    run: Annotated[Optional[Path], tyro.conf.Positional, metavar("[RUN]")] = None  # noqa: UP045
    """Run directory."""
    coordinator: Annotated[OptionalStr, metavar("HOST:PORT")] = None
    """Address that the coordinator of a live run printed, instead of RUN, if this machine cannot read that."""
    token: Annotated[
        OptionalStr,
        metavar(
            "TOKEN",
            f"With --coordinator: join token, by default that of {TOKEN_VARIABLE}, which other users of this machine "
            "cannot see.",
        ),
    ] = None
    tls: Annotated[
        OptionalPath,
        metavar("DIRECTORY", "With --coordinator: ca.pem, cert.pem and key.pem, if the coordinator wants TLS."),
    ] = None

    @contextmanager
    def watcher(self) -> Iterator[RunWatcher]:
        """Yield a watcher of the run.

        Raises:
            ConfigError: the arguments name no run or two, do not belong together, or there is no such run.
            ControlError: the coordinator does not answer, also in the block, or rejects the token.
        """
        if (self.run is None) == (self.coordinator is None):
            raise ConfigError("give either RUN, the run directory, or --coordinator HOST:PORT of a live run")
        if self.run is not None:
            if given := [flag for flag, value in (("--token", self.token), ("--tls", self.tls)) if value is not None]:
                raise ConfigError(
                    f"{' and '.join(given)}: for --coordinator; the files of RUN are read without, so leave it out"
                )
            yield RunWatcher(RunDirectory.open(self.run))
            return
        found = JoinArguments(coordinator=self.coordinator, token=self.token, tls=self.tls, wait_s=0).find_coordinator()
        assert found is not None
        from chameleon_ft.launch.live_run import remote_watcher

        with remote_watcher(found.address, found.token, tls=found.tls) as watcher:
            yield watcher


_ANSWER_S: Final = 2.0  # for a connection, where nothing answers


def lost_run(path: Path) -> RunDirectory:
    """Return the directory of a live run whose coordinator is lost. Raises ConfigError if it is not."""
    directory = RunDirectory.open(path)
    control = directory.read_control()
    with contextlib.suppress(OSError), socket.create_connection(split_address(control.address), timeout=_ANSWER_S):
        raise ConfigError(
            f"--take-over {path}: the coordinator at {control.address} still listens; end it first, by "
            f"`kill -9 {control.pid}` on its host"
        )
    if not directory.journals():
        raise ConfigError(f"--take-over {path}: the run has no journal; begin with --resume")
    return directory


def refuse_live_run(directory: RunDirectory) -> None:
    """Raise LiveRunError if the coordinator of a run lives.

    The id of its process alone proves nothing, because another process may have it now.
    """
    if not directory.control_file.exists():
        return
    control = directory.read_control()
    lives = control.has_process_here()
    if lives is None:
        from chameleon_ft.launch.live_run import require_coordinator

        with contextlib.suppress(ChameleonError, OSError):
            require_coordinator(control.address, control.token, tls=control.tls)
            lives = True
    if lives:
        where = f" on {control.host}" if control.host else ""
        raise LiveRunError(directory.path, f"process {control.pid}{where}")


_SCHEME: Final = "://"


def is_url(run: str) -> bool:
    """Return whether a run is named by its folder in an object store."""
    return _SCHEME in run


def require_store(config: RunConfig, *, is_free: bool = False) -> None:
    """Raise ConfigError if the store of a run cannot be used, or if `is_free` is required and it has a run already."""
    if not config.store.url:
        return
    from chameleon_ft.storage.run_storage import has_records, store_of

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
    from chameleon_ft.storage.stores import ObjectStore

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
    from chameleon_ft.storage.run_storage import RecordCopies, has_records
    from chameleon_ft.storage.stores import ObjectStore

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
