"""Tokenised corpora: folders of shards of token ids, with a manifest that is written last."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import xxhash
from pydantic import TypeAdapter, ValidationError

from chameleon_ft.data.token_files import TokenArray, TokenShards
from chameleon_ft.errors import DataError
from chameleon_ft.quantities import counted

MANIFEST: Final = "manifest.json"
_TOKENIZER: Final = "tokenizer.json"
_DOCUMENTS: Final = "documents.bin"
_LOCK: Final = ".lock"
_CHUNK_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file of ids, without a header; its checksum is XXH3 with 128 bits."""

    file: str
    tokens: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a folder of shards.

    Attributes:
        dtype: type of the ids, little-endian.
        vocab_size: number of token ids of the tokenizer.
        end_of_document: id of the token after each document.
        tokenizer: checksum of ``tokenizer.json``, a copy of the tokenizer.
        tokens: number of ids in all shards.
        documents: number of documents.
        starts: checksum of ``documents.bin``, the position of each document's first token in the corpus, as int64.
        shards: the files, in order.
    """

    format: Literal["chameleon-tokens"] = "chameleon-tokens"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    end_of_document: int
    tokenizer: str
    tokens: int
    documents: int
    starts: str
    shards: tuple[Shard, ...]

    def describe(self) -> str:
        """Describe it in a line."""
        amounts = f"{counted(self.documents, 'document')} with {counted(self.tokens, 'token')}"
        return f"{amounts} of {self.dtype} from {self.vocab_size:,}, in {counted(len(self.shards), 'shard')}"


_ADAPTER: Final = TypeAdapter(Manifest)


def is_shard_folder(path: Path) -> bool:
    """Return whether a path is a folder of shards, which its manifest tells."""
    return (path / MANIFEST).is_file()


@dataclass(frozen=True, slots=True)
class ShardFolder:
    """An opened folder of shards: its ids and the positions of its documents are mapped."""

    path: Path
    manifest: Manifest
    tokens: TokenShards
    starts: np.ndarray[tuple[int], np.dtype[np.int64]]

    @classmethod
    def open(cls, path: Path) -> ShardFolder:
        """Open a folder. Raises DataError if its manifest cannot be read, or a file has not the length in it."""
        try:
            manifest = _ADAPTER.validate_json((path / MANIFEST).read_bytes())
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else _first_problem(error)
            raise DataError(f"{path / MANIFEST} is not the manifest of a tokenised corpus ({why})") from None
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        try:
            arrays = [_map(path / shard.file, dtype, shard.tokens) for shard in manifest.shards]
            starts = _map(path / _DOCUMENTS, np.dtype("<i8"), manifest.documents)
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read ({error.strerror}): tokenise the corpus again") from None
        if not arrays or sum(map(len, arrays)) != manifest.tokens:
            raise DataError(f"{path / MANIFEST} tells a number of tokens that its shards do not have")
        return cls(path, manifest, TokenShards(arrays), starts)

    def verify(self) -> None:
        """Compare all files with their checksums. Raises DataError if one differs."""
        expected = {shard.file: shard.checksum for shard in self.manifest.shards}
        expected |= {_DOCUMENTS: self.manifest.starts, _TOKENIZER: self.manifest.tokenizer}
        for name, checksum in expected.items():
            found = xxhash.xxh3_128()
            try:
                with (self.path / name).open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        found.update(chunk)
            except OSError as error:
                raise DataError(f"{self.path / name} cannot be read ({error.strerror})") from None
            if found.hexdigest() != checksum:
                raise DataError(
                    f"{self.path / name} has changed since it was written, or is damaged: copy it again, or tokenise "
                    "the corpus again"
                )


class ShardWriter:
    """Writes ids and documents into an empty folder, and last the manifest, which makes it a tokenised corpus.

    Shards have equal lengths but for the last: where one ends depends on no document.
    """

    def __init__(self, folder: Path, *, vocab_size: int, end_of_document: int, shard_tokens: int) -> None:
        self._folder, self._vocab_size, self._end_of_document = folder, vocab_size, end_of_document
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: _CheckedFile | None = None
        self._in_shard = 0
        self._starts = _CheckedFile(folder / _DOCUMENTS)
        self._next_start = 0
        self.tokens = self.documents = 0

    def add(self, ids: TokenArray, ends: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Append ids, and documents by their ends: positions among these ids. The last may end in a later call."""
        if len(ends):
            ends = ends + self.tokens
            self._starts.write(np.concatenate(([self._next_start], ends[:-1])).astype("<i8"))
            self._next_start = int(ends[-1])
            self.documents += len(ends)
        self.tokens += len(ids)
        ids = ids.astype(np.dtype(self._dtype).newbyteorder("<"))
        while len(ids):
            if self._file is None:
                self._file, self._in_shard = _CheckedFile(self._folder / f"{len(self._shards):05d}.bin"), 0
            part = ids[: self._shard_tokens - self._in_shard]
            self._file.write(part)
            self._in_shard += len(part)
            ids = ids[len(part) :]
            if self._in_shard == self._shard_tokens:
                self._end_shard(self._file)

    def finish(self, tokenizer: str) -> Manifest:
        """Write the rest, the tokenizer and the manifest."""
        if self._file is not None:
            self._end_shard(self._file)
        copy = _CheckedFile(self._folder / _TOKENIZER)
        copy.write(tokenizer.encode())
        manifest = Manifest(
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            end_of_document=self._end_of_document,
            tokenizer=copy.close(),
            tokens=self.tokens,
            documents=self.documents,
            starts=self._starts.close(),
            shards=tuple(self._shards),
        )
        written = _CheckedFile(self._folder / MANIFEST)
        written.write(_ADAPTER.dump_json(manifest, indent=2) + b"\n")
        written.close()
        return manifest

    def close(self) -> None:
        """Close the files, finished or not."""
        for each in (self._starts, self._file):
            if each is not None:
                each.close()

    def _end_shard(self, file: _CheckedFile) -> None:
        self._shards.append(Shard(file=file.path.name, tokens=self._in_shard, checksum=file.close()))
        self._file = None


class _CheckedFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("xb")
        self._checksum = xxhash.xxh3_128()

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._checksum.update(view)
        self._file.write(view)

    def close(self) -> str:
        """Have the content on the disk, and return its checksum."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._checksum.hexdigest()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` after the block, so that nothing is there which is not complete.

    If the process is killed, the draft is left beside `path`, and the next one begins anew in its place.

    Raises:
        DataError: there is something at `path`, another process writes it, or it cannot be written.
    """
    require_free(path)
    draft = path.with_name(f"{path.name}.partial")
    try:
        draft.mkdir(parents=True, exist_ok=True)
        with (draft / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{draft} is being written by another process: wait, or give another place") from None
            for left in draft.iterdir():
                if left.name != _LOCK:
                    left.unlink()
            try:
                yield draft
                draft.rename(path)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            (path / _LOCK).unlink()
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}): free some space or give another place"
        ) from None


def require_free(path: Path) -> None:
    """Raise DataError unless `path` does not exist, or is an empty folder."""
    if path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None):
        raise DataError(f"{path} exists already: give another place, or remove it first")


def _map(path: Path, dtype: np.dtype[Any], count: int) -> Any:
    if path.stat().st_size != count * dtype.itemsize:
        raise DataError(
            f"{path} has {path.stat().st_size:,} bytes, and its manifest says {count:,} of {dtype.name}: it is cut "
            "short or damaged; copy it again, or tokenise the corpus again"
        )
    return np.memmap(path, dtype=dtype, mode="r") if count else np.array((), dtype)


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
