"""The tokens of a run: checked before it starts, then fixed, and the same in all processes.

A text has one token per byte. It is copied once into the run directory; the workers, `verify` and a resumed run map
this file, so they see the same samples even if the source has changed. A file of token ids is mapped in place, and
recognised by its fingerprint. Processes share the pages of a map and read only what they need.
"""

from __future__ import annotations

import codecs
import json
import os
import struct
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TypeAlias

import numpy as np

from chameleon_ft.errors import DataError

if TYPE_CHECKING:
    from chameleon_ft.config import TrainConfig


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


def find_text(path: Path | None, *, is_excluded: Callable[[Path], bool]) -> TextFiles:
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
    found = _inspect(_walk(path, is_excluded))
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
    # The skipped files are empty ones of Python itself.
    return TextFiles(found.files, found.num_bytes)


def _walk(root: Path, is_excluded: Callable[[Path], bool]) -> Iterator[Path]:
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


Tokens: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.integer[Any]]]"
"""Token ids in one dimension."""

_CHUNK_TOKENS = 1 << 22
_FINGERPRINT_BYTES = 1 << 20
_HEADER_BYTES: Final = 256 * 4
_HEADER_DTYPES: Final = {20240520: "uint16", 20240801: "uint32"}
"""Element types by the first number of the headers of llm.c."""
_INDEX_MAGIC: Final = b"MMIDIDX\x00\x00"
_INDEX_HEAD: Final = struct.Struct("<QBQQ")
"""Version, code of the element type, number of sequences and of documents."""
_INDEX_DTYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_NUMPY_MAGIC: Final = b"\x93NUMPY"
_NO_IDS: Final = {
    b"PK\x03\x04": "an archive, such as .npz or .pt",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b\x08": "a compressed file",
    b"\x28\xb5\x2f\xfd": "a compressed file",
    b"\x89HDF": "an HDF5 file",
}
"""Files that are often taken for one of ids, by their first bytes."""


def open_tokens(path: Path, dtype: str) -> Tokens:
    """Map the ids in `path`, read-only: a numpy file, or ids of type `dtype` in native byte order.

    The latter are raw, as of nanoGPT; or follow a header of 256 int32 (a number of the format, its version, the number
    of ids) as of llm.c; or have the index of Megatron-LM beside them, which must name that type.

    Raises:
        DataError: the file is missing, empty or unreadable, or is not a one-dimensional array of integers; or its
            header, or its index, tells another type or length than it has.
    """
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"data.path {path} {state}: give a token file (.bin of raw ids, or .npy)")
    try:
        num_bytes = path.stat().st_size
        tokens = _map_file(path, np.dtype(dtype), num_bytes) if num_bytes else np.array((), np.uint8)
    except OSError as error:
        raise DataError(f"data.path {path} cannot be read ({error.strerror or error})") from None
    if not tokens.size:
        raise DataError(f"data.path {path} is empty: give a file with token ids in it")
    return tokens


def _map_file(path: Path, dtype: np.dtype[Any], num_bytes: int) -> Tokens:
    tokens: Tokens
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    if start.startswith(_INDEX_MAGIC):
        raise DataError(f"data.path {path} is an index of Megatron-LM, without tokens: give the .bin file beside it")
    if found := next((kind for magic, kind in _NO_IDS.items() if start.startswith(magic)), None):
        raise DataError(f"data.path {path} is {found}, and no file of token ids: give a .npy file, or one of raw ids")
    if path.suffix == ".npy" or start.startswith(_NUMPY_MAGIC):
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"data.path {path} is not a numpy file of numbers ({error})") from None
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"data.path {path} holds {tokens.dtype.name} of shape {tokens.shape}: give integers in one dimension"
            )
        return tokens
    offset = _header_bytes(path, start, dtype, num_bytes)
    if num_bytes % dtype.itemsize:
        raise DataError(
            f"data.path {path} has {num_bytes} bytes, which is not a whole number of {dtype.name} ids "
            f"({dtype.itemsize} bytes each): set data.dtype to the type it was written with"
        )
    _check_index(path.with_suffix(".idx"), path, dtype, num_bytes)
    tokens = np.memmap(path, dtype=dtype, mode="r", offset=offset) if num_bytes > offset else np.array((), np.uint8)
    return tokens


def _header_bytes(path: Path, start: bytes, dtype: np.dtype[Any], num_bytes: int) -> int:
    """Return the bytes of the header of a file that begins with `start`; 0 if it has none. Raises DataError."""
    if len(start) < _HEADER_BYTES:
        return 0
    magic, _, count, *rest = np.frombuffer(start, "<i4").tolist()
    body = num_bytes - _HEADER_BYTES
    # Others use this header with numbers of their own.
    is_header = magic in _HEADER_DTYPES or (magic and count > 0 and not any(rest) and body in (2 * count, 4 * count))
    if not is_header:
        return 0
    written = _HEADER_DTYPES.get(magic, "uint16" if body == 2 * count else "uint32")
    if body != count * np.dtype(written).itemsize:
        raise DataError(
            f"data.path {path} has a header for {count:,} ids of {written}, and {body:,} bytes after it: it is cut "
            "short or damaged; write it again"
        )
    if dtype.itemsize != np.dtype(written).itemsize:
        raise DataError(f"data.path {path} has a header for ids of {written}: set data.dtype to {written}")
    return _HEADER_BYTES


def _check_index(index: Path, path: Path, dtype: np.dtype[Any], num_bytes: int) -> None:
    """Raise DataError if there is an index of Megatron-LM for a file of ids, and it tells another type or length."""
    if not index.is_file():
        return
    with index.open("rb") as file:
        head = file.read(len(_INDEX_MAGIC) + _INDEX_HEAD.size)
        if not head.startswith(_INDEX_MAGIC) or len(head) < len(_INDEX_MAGIC) + _INDEX_HEAD.size:
            return
        _, code, sequences, _ = _INDEX_HEAD.unpack(head[len(_INDEX_MAGIC) :])
        # Those of multimodal data have other lists after the lengths.
        lengths = np.fromfile(file, "<i4", sequences)
    written = _INDEX_DTYPES.get(code, "no integers")
    if written != dtype.name:
        raise DataError(
            f"data.path {path} has the index {index}, which says that its ids are {written}: set data.dtype"
        )
    if num_bytes != (count := int(lengths.sum(dtype=np.int64))) * dtype.itemsize:
        raise DataError(
            f"data.path {path} has {num_bytes:,} bytes, and its index {index} says that it has {count:,} ids of "
            f"{written}: one of the two is cut short or damaged; write both again"
        )


def check_ids(tokens: Tokens, vocab_size: int, *, source: str) -> None:
    """Check, a chunk at a time, that every id is in [0, vocab_size).

    Raises:
        DataError: one is not; the message states its position or the required vocabulary size.
    """
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    largest = 0
    for start in range(0, tokens.size, _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        if limits.min < 0 and chunk.min() < 0:
            at = start + int(chunk.argmin())
            raise DataError(
                f"{source}: token {at} is {tokens[at]}, and ids begin at 0; is data.dtype {tokens.dtype.name} right?"
            )
        largest = max(largest, int(chunk.max()))
    if largest >= vocab_size:
        raise DataError(
            f"{source} has token ids up to {largest}, and model.vocab_size is {vocab_size}: set it to {largest + 1} "
            f"or more, or correct data.dtype if the ids are not {tokens.dtype.name}"
        )


def fingerprint(tokens: Tokens) -> str:
    """Return a short hash of the number of ids, their type, and the first and the last MiB.

    It detects a replaced or truncated file without reading all of it, but not a change in the middle.
    """
    count = max(1, _FINGERPRINT_BYTES // tokens.itemsize)
    digest = blake2b(f"{tokens.dtype.str},{tokens.size};".encode("ascii"), digest_size=16)
    digest.update(np.ascontiguousarray(tokens[:count]).tobytes())
    digest.update(np.ascontiguousarray(tokens[-count:]).tobytes())
    return digest.hexdigest()


_TOKEN_SUFFIXES = frozenset({".bin", ".npy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """The data that a configuration names.

    Attributes:
        source: description.
        kind: ``text`` (a byte is a token) or ``tokens``.
        num_tokens: tokens, including those after the last whole sample.
        num_samples: non-overlapping windows of ``seq_len + 1`` tokens.
        num_files: files that they come from.
        skipped: files of the folder that are left out.
    """

    source: str
    kind: Literal["text", "tokens"]
    num_tokens: int
    num_samples: int
    num_files: int
    skipped: tuple[SkippedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class _Record:
    """The source of the data in a run directory; written last, so its presence means that they are complete."""

    path: str
    kind: str
    fingerprint: str


def check_data(config: TrainConfig) -> DataSummary:
    """Check the data of `config`: all files of a text, or all ids of a token file.

    Raises:
        DataError: the data is missing, empty, shorter than one sample, or does not fit the vocabulary.
    """
    text = None
    if _kind(config) == "tokens":
        tokens = _open_source(config)
        check_ids(tokens, config.model.vocab_size, source=_source_name(config))
        num_tokens = tokens.size
    else:
        text = _find_source_text(config, config.output_dir)
        num_tokens = text.num_bytes
    return DataSummary(
        source=_source_name(config),
        kind=_kind(config),
        num_tokens=num_tokens,
        num_samples=num_tokens // (config.model.seq_len + 1),
        num_files=1 if text is None else len(text.files),
        skipped=() if text is None else text.skipped,
    )


def prepare_data(config: TrainConfig, run_dir: Path, *, may_differ: bool = False) -> Path:
    """Prepare the data of `config` for a run in `run_dir`, and return the file of token ids that will be mapped.

    If that was done before, only check that the data has not changed, unless it `may_differ`. Every host calls it for
    the run directory that it sees. The ids of a token file are not checked; see `check_data`.

    Raises:
        DataError: as `check_data`; or `run_dir` was prepared for other data, or its token file has changed since; or
            the run directory cannot be written.
    """
    text_file = run_dir / "data" / "text.bin"
    if _record_file(run_dir).exists() and not may_differ:
        _open_prepared(config, run_dir)
    else:
        if _kind(config) == "tokens":
            tokens = _open_source(config)
        else:
            text = _find_source_text(config, run_dir)
            _write_atomically(text_file, lambda out: write_text(text, out))
            tokens = open_tokens(text_file, "uint8")
        record = _Record(config.data.path, _kind(config), fingerprint(tokens))
        encoded = (json.dumps(asdict(record), indent=2) + "\n").encode()
        _write_atomically(_record_file(run_dir), lambda out: out.write(encoded))
    return _path(config) if _kind(config) == "tokens" else text_file


def load_tokens(config: TrainConfig) -> Tokens:
    """Return the tokens prepared in ``config.output_dir``, or those of the source if there are none.

    Raises:
        DataError: as `prepare_data`.
    """
    if config.output_dir is not None and _record_file(config.output_dir).exists():
        return _open_prepared(config, config.output_dir)
    if _kind(config) == "tokens":
        return _open_source(config)
    buffer = BytesIO()
    write_text(_find_source_text(config, config.output_dir), buffer)
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def _open_prepared(config: TrainConfig, run_dir: Path) -> Tokens:
    path = _record_file(run_dir)
    try:
        record = _Record(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it to have the data prepared again") from None
    if record.kind != _kind(config) or (record.kind == "text" and record.path != config.data.path):
        raise DataError(
            f"the run in {run_dir} trains on data.path {record.path!r} as {record.kind}, and data.path is now "
            f"{config.data.path!r} as {_kind(config)}: set it back, or begin a new run"
        )
    text_file = run_dir / "data" / "text.bin"
    tokens = _open_source(config) if record.kind == "tokens" else open_tokens(text_file, "uint8")
    if fingerprint(tokens) != record.fingerprint:
        changed = _source_name(config) if record.kind == "tokens" else text_file
        raise DataError(
            f"{changed} has changed since the run in {run_dir} began: bring it back, begin a new run, or continue with "
            "it by --accept-changes data"
        )
    _check_length(config, tokens.size)
    return tokens


def _record_file(run_dir: Path) -> Path:
    return run_dir / "data" / "source.json"


def _kind(config: TrainConfig) -> Literal["text", "tokens"]:
    if config.data.format != "auto":
        return config.data.format
    return "tokens" if Path(config.data.path).suffix in _TOKEN_SUFFIXES else "text"


def _path(config: TrainConfig) -> Path:
    return Path(config.data.path).expanduser()


def _source_name(config: TrainConfig) -> str:
    return f"data.path {_path(config)}" if config.data.path else "the source text of Python's standard library"


def _open_source(config: TrainConfig) -> Tokens:
    if not config.data.path:
        raise DataError('data.format is "tokens", and data.path is empty: name a token file')
    tokens = open_tokens(_path(config), config.data.dtype)
    _check_length(config, tokens.size)
    return tokens


def _find_source_text(config: TrainConfig, run_dir: Path | None) -> TextFiles:
    if config.model.vocab_size < BYTE_VOCABULARY:
        raise DataError(
            f"model.vocab_size is {config.model.vocab_size}, and text is read as bytes: set it to {BYTE_VOCABULARY}"
        )

    def is_run(folder: Path) -> bool:
        # Run directories may be below the folder of the text, and no run may train on the files of a run.
        return _record_file(folder).exists() or (run_dir is not None and folder.resolve() == run_dir.resolve())

    text = find_text(_path(config) if config.data.path else None, is_excluded=is_run)
    _check_length(config, text.num_bytes)
    return text


def _check_length(config: TrainConfig, num_tokens: int) -> None:
    needed = config.model.seq_len + 1
    if num_tokens < needed:
        raise DataError(
            f"{_source_name(config)} has {num_tokens} tokens, and one sample takes model.seq_len + 1 = {needed}: "
            "give more data, or lower model.seq_len"
        )


def _write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    # Each process has its own draft. Processes that prepare the same run write equal files, and the last one wins.
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as out:
            write(out)
        draft.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}): free some space or name another --output-dir"
        ) from None
    finally:
        with suppress(OSError):
            draft.unlink()
