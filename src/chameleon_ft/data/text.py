"""Text as training data: which files, and their bytes, one after another.

A byte is a token, so every text has a vocabulary of 256 and needs no tokenizer.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from chameleon_ft.errors import DataError

__all__ = ["BYTE_VOCABULARY", "SkippedFile", "TextFiles", "find_text", "write_text"]

BYTE_VOCABULARY = 256
"""Token ids that text, read as bytes, may hold."""

_SEPARATOR = b"\n"
_CHUNK_BYTES = 1 << 20
# Enough for a small model to keep learning from, little enough to be read before anyone notices.
_STDLIB_BYTES = 8 << 20
# Installed packages differ from machine to machine, and tests hold text that is broken on purpose.
_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file of a folder that is not trained on, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files that make up a text, in the order in which they are read.

    Attributes:
        files: all of them text, none empty.
        num_bytes: the length of the text, the newline between two files included.
        skipped: what else was found, and why it is left out.
    """

    files: tuple[Path, ...]
    num_bytes: int
    skipped: tuple[SkippedFile, ...] = ()


def find_text(path: Path | None, *, passed_over: Callable[[Path], bool]) -> TextFiles:
    """Find the text under `path`: one file, or all files of a folder and its subfolders in the order of their names.

    In a folder, what is hidden (begins with a dot) is passed over, and so are subfolders that `passed_over` holds for;
    what is empty, cannot be read or is not UTF-8 is skipped and listed. A path of None stands for the source text of
    Python's standard library, as much of it as 8 MiB hold.

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
    found = _inspect(_walk(path, passed_over))
    if not found.files:
        what = f"{len(found.skipped)} files, none of them UTF-8 text" if found.skipped else "no files"
        raise DataError(f"data.path {path} holds {what}: give a folder with text in it")
    return found


def write_text(text: TextFiles, out: BinaryIO) -> None:
    """Write the bytes of `text` to `out`, the files separated by newlines.

    Raises:
        DataError: the files have changed since they were found.
    """
    written = 0
    for index, path in enumerate(text.files):
        if index:
            written += out.write(_SEPARATOR)
        for chunk in _chunks(path):
            written += out.write(chunk)
    if written != text.num_bytes:
        raise DataError(f"the text changed while it was read ({text.num_bytes} bytes, then {written}): start again")


def _standard_library() -> TextFiles:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    total = 0
    for path in _walk(root, lambda folder: folder.name in _STDLIB_EXCLUDED):
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
    # What little is skipped here (empty files) is nothing that its reader put there.
    return TextFiles(found.files, found.num_bytes)


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _walk(root: Path, passed_over: Callable[[Path], bool]) -> Iterator[Path]:
    """All files below `root` that are not hidden, in an order that depends on names alone.

    Folders that are not entered (links, and what may not be listed) are among them: they too are to be reported.
    """
    closed: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=lambda error: closed.append(Path(error.filename))):
        entered = [
            path for name in sorted(subfolders) if not (_is_hidden(path := Path(folder, name)) or passed_over(path))
        ]
        # In place: this is how os.walk is told where to go on.
        subfolders[:] = [path.name for path in entered]
        closed.extend(path for path in entered if path.is_symlink())
        yield from (path for name in sorted(names) if not _is_hidden(path := Path(folder, name)))
    yield from closed


def _inspect(paths: Iterable[Path]) -> TextFiles:
    files: list[Path] = []
    skipped: list[SkippedFile] = []
    total = 0
    for path in paths:
        try:
            size = _text_size(path)
        except (OSError, ValueError) as error:
            skipped.append(SkippedFile(path, _reason(error)))
        else:
            total += size + (len(_SEPARATOR) if files else 0)
            files.append(path)
    return TextFiles(tuple(files), total, tuple(skipped))


def _text_size(path: Path) -> int:
    """The length of a text in bytes; ValueError if it is none."""
    if path.is_dir():
        raise ValueError("is a folder that is linked or cannot be listed")
    if not path.is_file():
        # Opening a pipe would wait for a writer.
        raise ValueError("is not a regular file")
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    for chunk in _chunks(path):
        if b"\0" in chunk:
            raise ValueError("holds zero bytes, so it is not text")
        decoder.decode(chunk)
        size += len(chunk)
    decoder.decode(b"", final=True)
    if not size:
        raise ValueError("is empty")
    return size


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8 text"
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror})"
    return str(error)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
