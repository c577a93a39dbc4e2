"""Where checkpoints are kept: a directory, or an object store.

Both have files by their names, with slashes, and *parts*: folders that a rank writes and that appear as a whole.

Folders in object stores, through fsspec: S3 and all that speak its protocol, Google Cloud, Azure and others.

Object stores have neither renames nor folders that appear as a whole, but objects do. So the files of a part of a
checkpoint are one object, a tar archive.

A request is given up if it makes no progress for the timeout of the store, and one that fails is tried again a few
times; then StoreError is raised. The thread of a request that is given up may live on until the library's own timeouts
end it.

The records of a run are copied to its object store, too, so that it can be resumed on another machine.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import fsspec
from fsspec.callbacks import Callback

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError, DamagedCheckpointError, StoreError
from chameleon_ft.quantities import duration
from chameleon_ft.storage.files import RunDirectory, replace_file

ARCHIVE: Final = ".tar"
"""Suffix of a part where it is one file."""

_PLANS: Final = "plans"

RunOf: TypeAlias = Callable[[int], str | None]
"""Step of a checkpoint -> the id of the run that writes it, by which it is told from others; None: not known."""


def unknown_run(_: int) -> None:
    """Return None: the run that writes a checkpoint is not known."""


class Storage(Protocol):
    """A place for checkpoints. All names are relative to it.

    Methods raise FileNotFoundError if there is no such file, and another OSError if it cannot be used now.

    Attributes:
        run_of: the run that writes the checkpoint of a step here.
    """

    run_of: RunOf

    def place(self, name: str = "") -> str:
        """Return the path or the URL of a name, for messages."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; none if it does not exist."""

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the bytes of all files in a folder and in the folders in it, by their names relative to it."""

    def exists(self, name: str) -> bool:
        """Return whether there is a file of this name, or it cannot be found out here: then reading it tells why."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    def write(self, name: str, content: str) -> None:
        """Replace a file as a whole; its content is safe when this returns."""

    def rename(self, name: str, other: str) -> None:
        """Rename a file in its folder."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it, if there is one."""

    def sync(self, *folders: str) -> None:
        """Have the names in folders reach the disk, where there is one."""

    def writing(self, part: str) -> AbstractContextManager[Path]:
        """Enter with a new path for the folder of a part, which is stored when the context is left without error.

        A part of that name is replaced. Other processes may store one of the same name at the same time.
        """

    def reading(self, part: str) -> AbstractContextManager[Path]:
        """Enter with a path at which the files of a part can be read.

        Raises DamagedCheckpointError if they cannot be unpacked.
        """


class Directory:
    """A directory as a `Storage`."""

    def __init__(self, path: Path, *, run_of: RunOf = unknown_run) -> None:
        self.path = path
        self.run_of = run_of

    def place(self, name: str = "") -> str:
        return str(self.path / name)

    def names(self, folder: str = "") -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry.name for entry in (self.path / folder).iterdir())
        return []

    def sizes(self, folder: str) -> Mapping[str, int]:
        root, sizes = self.path / folder, {}

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # a draft of another rank
                raise error

        for directory, _, names in os.walk(root, onerror=refuse):
            for file in (Path(directory, name) for name in names):
                with suppress(FileNotFoundError):  # a draft of another rank
                    sizes[str(file.relative_to(root))] = file.stat().st_size
        return sizes

    def exists(self, name: str) -> bool:
        try:
            return (self.path / name).exists()
        except PermissionError:
            return True

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: str) -> None:
        replace_file(self.path / name, content, mode=0o644, is_synced=True)

    def rename(self, name: str, other: str) -> None:
        (self.path / name).replace(self.path / other)
        self.sync(str(Path(name).parent))

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # another rank may still write into it
        else:
            path.unlink(missing_ok=True)

    def sync(self, *folders: str) -> None:
        for folder in folders:
            descriptor = os.open(self.path / folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @contextmanager
    def writing(self, part: str) -> Iterator[Path]:
        path = self.path / part
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            yield draft
            _replace_directory(path, draft)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @contextmanager
    def reading(self, part: str) -> Iterator[Path]:
        yield self.path / part


def storage_of(place: Path | Storage) -> Storage:
    """Return a place for checkpoints as a `Storage`; a path is that of a directory."""
    return Directory(place) if isinstance(place, Path) else place


def _replace_directory(path: Path, draft: Path) -> None:
    former = draft.with_name(f"{draft.name}.former")
    while draft.exists():
        try:
            draft.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            with suppress(FileNotFoundError):  # another rank may have moved it
                path.rename(former)
            shutil.rmtree(former, ignore_errors=True)


_ATTEMPTS: Final = 4
_BACK_OFF_S: Final = 0.5
_BACK_OFF_MAX_S: Final = 10.0
_LOCAL: Final = ("file://", "local://")
_NO_CREDENTIALS: Final = frozenset({"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"})
"""Errors of the libraries of stores for credentials that are missing."""
_INSTALL: Final = "install it, such as by pip install 'chameleon-ft[stores]' for S3"
_RIGHTS: Final = (
    "check the credentials in the environment of this process, and that they may list, read, write and delete there"
)

Result = TypeVar("Result")


class ObjectStore:
    """A folder of an object store as a `Storage`. It connects with the first request.

    Credentials and endpoints are found by the libraries: in environment variables and files, or from the machine's
    role. One object can be used by several threads.

    Args:
        url: The folder, such as s3://bucket/runs/mine.
        timeout_s: for which a request may make no progress.
        gives_up: If false, requests are repeated without end, and only a refusal is an error.
        run_of: the run that writes the checkpoint of a step there.
    """

    def __init__(self, url: str, *, timeout_s: float, gives_up: bool = True, run_of: RunOf = unknown_run) -> None:
        self.url = url.rstrip("/")
        self.run_of = run_of
        self._timeout_s = timeout_s
        self._gives_up = gives_up

    def check(self) -> None:
        """Write, read, list and remove an object. Raises ConfigError, which says what to change."""
        probe, found = f".probe-{uuid.uuid4().hex}", b""
        try:
            self.exists(probe)
            self.write(probe, probe)
            found = self.read(probe)
            listed = probe in self.names()
            self.remove(probe)
        except FileNotFoundError:
            raise ConfigError(
                f"store.url = {self.url}: there is no such bucket; create it, or correct the URL"
            ) from None
        except StoreError as error:
            raise ConfigError(f"store.url = {error}") from None
        if found != probe.encode() or not listed:
            raise ConfigError(f"store.url = {self.url}: does not give back what is written; take another store")

    def place(self, name: str = "") -> str:
        return f"{self.url}/{name}" if name else self.url

    def names(self, folder: str = "") -> list[str]:
        try:
            found = self._request(folder, lambda fs, path, _: fs.ls(path, detail=False))
        except FileNotFoundError:
            return []
        return sorted({str(each).rstrip("/").rpartition("/")[2] for each in found})

    def sizes(self, folder: str) -> Mapping[str, int]:
        found = self._request(folder, lambda fs, path, _: (path, fs.find(path, detail=True)))
        path, entries = found
        return {name.removeprefix(f"{path}/"): int(entry["size"]) for name, entry in entries.items()}

    def exists(self, name: str) -> bool:
        try:
            self._request(name, lambda fs, path, _: fs.info(path))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        content: bytes = self._request(name, lambda fs, path, _: fs.cat_file(path))
        return content

    def write(self, name: str, content: str) -> None:
        self._replace(name, lambda fs, path, _: fs.pipe_file(path, content.encode()))

    def rename(self, name: str, other: str) -> None:
        self.write(other, self.read(name).decode(errors="replace"))
        self.remove(name)

    def remove(self, name: str) -> None:
        try:
            self._request(name, lambda fs, path, _: fs.rm(path, recursive=True))
        except FileNotFoundError:
            return

    def sync(self, *folders: str) -> None:
        """Nothing is left to do: an object is safe once it is written."""

    @contextmanager
    def writing(self, part: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="chameleon-") as scratch:
            draft, archive = Path(scratch, "part"), Path(scratch, f"part{ARCHIVE}")
            yield draft
            with tarfile.open(archive, "w") as tar:
                for file in sorted(draft.iterdir()):
                    tar.add(file, arcname=file.name)
                    file.unlink()  # there may be little room
            self.upload(archive, f"{part}{ARCHIVE}")

    @contextmanager
    def reading(self, part: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="chameleon-") as scratch:
            archive, files = Path(scratch, f"part{ARCHIVE}"), Path(scratch, "part")
            self.download(f"{part}{ARCHIVE}", archive)
            files.mkdir()
            try:
                with tarfile.open(archive, "r:") as tar:
                    tar.extractall(files, filter="data")
            except (tarfile.TarError, EOFError, ValueError) as error:
                place = self.place(f"{part}{ARCHIVE}")
                raise DamagedCheckpointError(f"{place} is not as it was written: {error}") from None
            archive.unlink()
            yield files

    def upload(self, file: Path, name: str) -> None:
        """Store a local file under a name, as a whole."""
        self._replace(name, lambda fs, path, progress: fs.put_file(str(file), path, callback=progress))

    def download(self, name: str, file: Path) -> None:
        """Copy a file of this store to a local path."""
        self._request(name, lambda fs, path, progress: fs.get_file(path, str(file), callback=progress))

    # --- requests ----------------------------------------------------------------------------------------------------

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the path of this folder in it. Raises StoreError."""
        # Others change the store, too, so no listing may be remembered.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.url.startswith(_LOCAL):
            options["auto_mkdir"] = True
        try:
            fs, path = fsspec.url_to_fs(self.url, **options)
        except ImportError as error:
            raise StoreError(f"{self.url}: {error}; {_INSTALL}") from None
        except ValueError as error:
            raise StoreError(f"{self.url}: {error}; use s3://, gs://, abfs:// or file://") from None
        except Exception as error:  # noqa: BLE001 - some connect at once, and each library has its own
            raise StoreError(f"{self.url}: cannot be opened: {_described(error)}; {_RIGHTS}") from None
        return fs, str(path).rstrip("/")

    def _replace(self, name: str, act: Callable[[Any, str, Callback], object]) -> None:
        """Have `act` write a file that appears as a whole, which every file of an object store does."""

        def write(fs: Any, path: str, progress: Callback) -> None:
            if self.url.startswith(_LOCAL):
                draft = f"{path}.{uuid.uuid4().hex}"
                act(fs, draft, progress)
                Path(draft).replace(path)
            else:
                act(fs, path, progress)

        self._request(name, write)

    def _request(self, name: str, act: Callable[[Any, str, Callback], Result]) -> Result:
        """Return the answer to a request. Raises FileNotFoundError or StoreError; see the module."""
        fs, root = self._opened
        path, place = f"{root}/{name}" if name else root, self.place(name)
        for attempt in itertools.count(1):
            try:
                return _unless_stuck(partial(act, fs, path), self._timeout_s)
            except FileNotFoundError:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", place) from None
            except _StuckError:
                is_last, problem = True, f"does not answer for {duration(self._timeout_s)}"
            except Exception as error:  # noqa: BLE001 - each library has its own
                if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
                    raise StoreError(f"{place}: is refused: {_described(error)}; {_RIGHTS}") from None
                is_last, problem = attempt == _ATTEMPTS, f"{_described(error)}, {_ATTEMPTS} times"
            if is_last and self._gives_up:
                raise StoreError(f"{place}: {problem}")
            time.sleep(min(_BACK_OFF_S * 2 ** min(attempt - 1, 16), _BACK_OFF_MAX_S))  # it may try for days
        raise AssertionError("unreachable")


class _StuckError(Exception):
    """A request has made no progress for too long."""


class _Progress(Callback):  # type: ignore[misc]
    """Notes when a request has made progress."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s = time.monotonic()

    def call(self, *_: object, **__: object) -> None:
        self.at_s = time.monotonic()


def _unless_stuck(act: Callable[[Callback], Result], timeout_s: float) -> Result:
    """Return the result of `act` in a thread of its own; raise _StuckError after `timeout_s` without progress."""
    progress, answer = _Progress(), Future[Result]()

    def work() -> None:
        try:
            answer.set_result(act(progress))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is used
            answer.set_exception(error)

    threading.Thread(target=work, name="store", daemon=True).start()
    while not answer.done():
        left_s = progress.at_s + timeout_s - time.monotonic()
        if left_s <= 0:
            raise _StuckError
        wait([answer], left_s)
    return answer.result()


def _described(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def checkpoint_storage(config: RunConfig, run: RunDirectory, *, gives_up: bool = True) -> Storage:
    """Return the place of the checkpoints of a run: its directory, or the object store of its configuration.

    `gives_up`: whether requests to an object store that does not answer end with an error.
    """
    if not config.store.url:
        return Directory(run.checkpoints, run_of=config.run_of)
    store = config.store
    return ObjectStore(store.checkpoints, timeout_s=store.timeout_s, gives_up=gives_up, run_of=config.run_of)


def record_copies(config: RunConfig, run: RunDirectory) -> Callable[[], None]:
    """Return a function that copies the records of a run to its object store, if it has one.

    It raises StoreError.
    """
    if not config.store.url:
        return lambda: None
    return RecordCopies(run, store_of(config)).save


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
