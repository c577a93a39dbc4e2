"""Files of token ids, mapped into memory, so that all processes share the pages and read only what they need."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from chameleon_ft.errors import DataError

__all__ = ["Tokens", "check_ids", "fingerprint", "open_tokens"]

Tokens: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.integer[Any]]]"
"""Token ids in one dimension."""

_CHUNK_TOKENS = 1 << 22
_FINGERPRINT_BYTES = 1 << 20


def open_tokens(path: Path, dtype: str) -> Tokens:
    """Map the ids in `path`, read-only: a numpy file (``.npy``), or raw ids of type `dtype` in native byte order.

    Raises:
        DataError: the file is missing, empty or unreadable, or is not a one-dimensional array of integers.
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
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"data.path {path} is not a numpy file of numbers ({error})") from None
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"data.path {path} holds {tokens.dtype.name} of shape {tokens.shape}: give integers in one dimension"
            )
        return tokens
    if num_bytes % dtype.itemsize:
        raise DataError(
            f"data.path {path} has {num_bytes} bytes, which is not a whole number of {dtype.name} ids "
            f"({dtype.itemsize} bytes each): set data.dtype to the type it was written with"
        )
    tokens = np.memmap(path, dtype=dtype, mode="r")
    return tokens


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
