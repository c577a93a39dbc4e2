"""Texts: UTF-8 files and folders of them, found in an order that depends only on names."""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from chameleon_ft.errors import DataError

BYTE_VOCABULARY = 256
"""Number of token ids of a text."""

_SEPARATOR = b"\n"
_CHUNK_BYTES = 1 << 20
_STDLIB_BYTES = 8 << 20
# Installed packages differ between machines, and tests contain deliberately broken text.
_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that is left out of a text, and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The non-empty files of a text, in order, and its length, which includes a newline between two files."""

    files: tuple[Path, ...]
    num_bytes: int
    skipped: tuple[SkippedFile, ...] = ()


def find_text(path: Path | None, *, is_excluded: Callable[[Path], bool] = lambda _: False) -> TextFiles:
    """Find the text of a file, or of all files of a folder and its subfolders in the order of their names.

    Files and folders whose names begin with a dot, and subfolders for which `is_excluded` holds, are ignored. Files of
    a folder that are empty, cannot be read or are not UTF-8 are skipped and listed. Without a path it is the source
    text of Python's standard library, up to 8 MiB.

    Raises:
        DataError: there is no such path, or no text in it.
    """
    if path is None:
        return _standard_library()
    if path.is_file():
        found = _inspect((path,))
        if found.skipped:
            raise DataError(f"data.path {path}: {found.skipped[0].reason}; give a UTF-8 text, a folder or a token file")
        return found
    if not path.is_dir():
        state = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise DataError(f"data.path {path} {state}: give a text file, a folder of text or a token file")
    found = _inspect(walk(path, is_excluded))
    if not found.files:
        content = f"{len(found.skipped)} files, none of them UTF-8 text" if found.skipped else "no files"
        raise DataError(f"data.path {path} holds {content}: give a folder with text in it")
    return found


def write_text(text: TextFiles, out: BinaryIO) -> None:
    """Write the bytes of `text` to `out`. Raises DataError if the files have changed since they were found."""
    written = 0
    for index, path in enumerate(text.files):
        if index:
            written += out.write(_SEPARATOR)
        for chunk in _chunks(path):
            written += out.write(chunk)
    if written != text.num_bytes:
        raise DataError(f"the text changed while it was read ({text.num_bytes} bytes, then {written}): start again")


def read_text(text: TextFiles) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of `text` as tokens. Raises DataError as `write_text`."""
    buffer = BytesIO()
    write_text(text, buffer)
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def _standard_library() -> TextFiles:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    total = 0
    for path in walk(root, lambda folder: folder.name in _STDLIB_EXCLUDED):
        if path.suffix == ".py" and path.is_file():
            total += path.stat().st_size + len(_SEPARATOR)
            if total > _STDLIB_BYTES:
                break
            files.append(path)
    found = _inspect(files)
    if not found.files:
        raise DataError(
            f"there is no source text of the standard library in {root}: set data.path to a text of your own"
        )
    # The skipped files are empty ones of Python itself.
    return TextFiles(found.files, found.num_bytes)


def walk(root: Path, is_excluded: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield all files below `root` that are not hidden, in an order that depends only on names.

    Folders that are not entered because they are links or unreadable follow at the end, to be reported.
    """
    not_entered: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=lambda error: not_entered.append(Path(error.filename))):
        visible = [Path(folder, name) for name in sorted(subfolders) if not name.startswith(".")]
        included = [path for path in visible if not is_excluded(path)]
        # `os.walk` enters what is left in this list.
        subfolders[:] = [path.name for path in included]
        not_entered.extend(path for path in included if path.is_symlink())
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
    yield from not_entered


def _inspect(paths: Iterable[Path]) -> TextFiles:
    files: list[Path] = []
    skipped: list[SkippedFile] = []
    total = 0
    for path in paths:
        try:
            size = _text_size(path)
        except UnicodeDecodeError:
            skipped.append(SkippedFile(path, "is not UTF-8 text"))
        except OSError as error:
            skipped.append(SkippedFile(path, f"cannot be read ({error.strerror})"))
        except ValueError as error:
            skipped.append(SkippedFile(path, str(error)))
        else:
            total += size + (len(_SEPARATOR) if files else 0)
            files.append(path)
    return TextFiles(tuple(files), total, tuple(skipped))


def _text_size(path: Path) -> int:
    """Return the length of a text in bytes. Raises ValueError if the file is not a text, OSError if unreadable."""
    if path.is_dir():
        raise ValueError("is a folder that is linked or cannot be listed")
    if not path.is_file():
        # Opening a pipe would wait for a writer.
        raise ValueError("is not a regular file")
    size = 0
    for text in codecs.iterdecode(_chunks(path), "utf-8"):
        if "\0" in text:
            raise ValueError("holds zero bytes, so it is not text")
        size += len(text.encode())
    if not size:
        raise ValueError("is empty")
    return size


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
