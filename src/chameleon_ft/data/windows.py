"""Samples of a language model: windows of a long row of tokens."""

from __future__ import annotations

from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chameleon_ft.errors import DataError

if TYPE_CHECKING:
    from chameleon_ft.data.tokens import Tokens
    from chameleon_ft.job import TensorPair

__all__ = ["TokenWindows"]


class TokenWindows:
    """Map-style dataset: sample i is tokens [i (seq_len + 1), (i + 1) (seq_len + 1)), as input and as the next token.

    Windows do not overlap, so in one epoch every token is a target once at most; what is left after the last whole
    window is not used. A sample is a pair of int64 tensors (seq_len,).
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        if len(tokens) <= seq_len:
            raise DataError(f"{len(tokens)} tokens are less than one sample of {seq_len} + 1: give more data")
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return len(self._tokens) // (self._seq_len + 1)

    def __getitem__(self, index: int) -> TensorPair:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self._seq_len + 1
        window = torch.from_numpy(self._tokens[index * length : (index + 1) * length].astype(np.int64))
        return window[:-1], window[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        tokens = self._tokens
        memory: object = tokens.base
        # A map would be pickled with all its contents: what is sent is where to find them. A part of a map cannot be
        # found again, as it does not know its own offset.
        if isinstance(tokens, np.memmap) and isinstance(memory, mmap):
            return _reopened, (str(tokens.filename), tokens.dtype.str, tokens.offset, len(tokens), self._seq_len)
        return TokenWindows, (tokens, self._seq_len)


def _reopened(path: str, dtype: str, offset: int, num_tokens: int, seq_len: int) -> TokenWindows:
    return TokenWindows(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(num_tokens,)), seq_len)
