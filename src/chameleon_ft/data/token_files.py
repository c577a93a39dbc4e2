"""Files of token ids, of other tools too: recognised by their headers and indexes, and mapped read-only."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from mmap import mmap
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from chameleon_ft.errors import DataError

TokenArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
"""Token ids in one dimension."""


class TokenShards:
    """The ids of several arrays of one type, one after the other: read by slices, as an array of all of them would be.

    Only a slice across the end of an array is a copy.
    """

    def __init__(self, arrays: Sequence[TokenArray]) -> None:
        self._arrays = tuple(arrays)
        self._ends = tuple(accumulate(map(len, self._arrays)))
        self.dtype: np.dtype[np.integer[Any]] = self._arrays[0].dtype
        self.size = self._ends[-1]
        self.num_arrays = len(self._arrays)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> TokenArray:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise IndexError("shards are read in steps of 1")
        number, found = bisect_right(self._ends, start), list[TokenArray]()
        while start < stop:
            array, end = self._arrays[number], self._ends[number]
            begin = end - len(array)
            found.append(array[start - begin : min(stop, end) - begin])
            start, number = end, number + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [self._arrays[0][:0]])

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_shards, (tuple(place_of(array) or array for array in self._arrays),)


Tokens: TypeAlias = TokenArray | TokenShards
Place: TypeAlias = tuple[str, str, int, int]
"""A part of a file: its path, the type of its ids, the offset in bytes, and the number of ids."""


def place_of(tokens: Tokens) -> Place | None:
    """Return where the ids of a whole map are: pickling a map would copy its contents.

    It is None for any other array. A slice of a map does not know its own offset.
    """
    memory: object = tokens.base if isinstance(tokens, np.memmap) else None
    if isinstance(tokens, np.memmap) and isinstance(memory, mmap):
        return str(tokens.filename), tokens.dtype.str, tokens.offset, len(tokens)
    return None


def map_place(place: Place) -> TokenArray:
    """Map the ids of a place of `place_of`."""
    path, dtype, offset, count = place
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _reopen_shards(parts: Sequence[Place | TokenArray]) -> TokenShards:
    return TokenShards([map_place(part) if isinstance(part, tuple) else part for part in parts])


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


def files_of_pattern(path: Path) -> list[Path]:
    """Return the files that a path with ``*``, ``?`` or ``[`` names, sorted; none if it has none of these."""
    if path.exists() or not set("*?[") & set(str(path)):
        return []
    found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise DataError(f"data.path {path} is a pattern that no file matches: correct it")
    return found


def open_tokens(path: Path, dtype: str) -> TokenArray:
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


def _map_file(path: Path, dtype: np.dtype[Any], num_bytes: int) -> TokenArray:
    tokens: TokenArray
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
        if not head.startswith(_INDEX_MAGIC):
            return
        if len(head) < len(_INDEX_MAGIC) + _INDEX_HEAD.size:
            raise DataError(f"data.path {path} has the index {index}, which is cut short: write both again")
        _, code, sequences, _ = _INDEX_HEAD.unpack(head[len(_INDEX_MAGIC) :])
        # Those of multimodal data have other lists after the lengths.
        lengths = np.fromfile(file, "<i4", sequences)
    if (written := _INDEX_DTYPES.get(code)) is None:
        raise DataError(f"data.path {path} has the index {index}, which says that it has no integers: give token ids")
    if written != dtype.name:
        raise DataError(
            f"data.path {path} has the index {index}, which says that its ids are {written}: set data.dtype to "
            f"{written}"
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
            at = int(chunk.argmin())
            raise DataError(
                f"{source}: token {start + at} is {chunk[at]}, and ids begin at 0; is data.dtype "
                f"{tokens.dtype.name} right?"
            )
        largest = max(largest, int(chunk.max()))
    if largest >= vocab_size:
        raise DataError(
            f"{source} has token ids up to {largest}, and model.vocab_size is {vocab_size}: set it to {largest + 1} "
            f"or more, or correct data.dtype if the ids are not {tokens.dtype.name}"
        )


def fingerprint(tokens: Tokens, *checksums: str) -> str:
    """Return a short hash of the number of ids, their type, the first and the last MiB, and known checksums.

    It detects a replaced or truncated file without reading all of it, but not a change in the middle.
    """
    count = max(1, _FINGERPRINT_BYTES // tokens.dtype.itemsize)
    digest = blake2b(f"{tokens.dtype.str},{tokens.size};".encode("ascii"), digest_size=16)
    digest.update(np.ascontiguousarray(tokens[:count]).tobytes())
    digest.update(np.ascontiguousarray(tokens[-count:]).tobytes())
    digest.update("".join(checksums).encode())
    return digest.hexdigest()
