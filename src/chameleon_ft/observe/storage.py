"""Where checkpoints are kept: a directory, or an object store.

Both have files by their names, with slashes, and *parts*: folders that a rank writes and that appear as a whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from chameleon_ft.observe.files import replace_file

ARCHIVE: Final = ".tar"
"""Suffix of a part where it is one file."""

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
