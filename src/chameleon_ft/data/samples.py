"""Samples of a language model, windows of a row of tokens, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chameleon_ft.data.order import SampleOrder, read_sample
from chameleon_ft.data.streams import START, StreamReader
from chameleon_ft.errors import DataError
from chameleon_ft.job import is_stream

if TYPE_CHECKING:
    from chameleon_ft.data.corpus import Tokens
    from chameleon_ft.job import Dataset, TensorPair


def load_micro_batch(
    dataset: Dataset,
    order: SampleOrder,
    first: int,
    count: int,
    *,
    reading: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> TensorPair:
    """Return `count` samples from position `first` of the order on as (inputs, targets), stacked in a new dimension 0.

    Each is read as by `read_sample`, inside the context that `reading` returns for its id.
    """
    samples = []
    for position, index in enumerate(order.ids_at(first, count), first):
        with reading(index):
            samples.append(read_sample(dataset, index, seed=order.seed, epoch=position // order.num_samples))
    return stacked(samples)


def stacked(samples: Sequence[TensorPair]) -> TensorPair:
    """Return samples as (inputs, targets), stacked in a new dimension 0."""
    return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])


class SamplesInOrder:
    """The samples of a job in the order of training, read by one process.

    Those of a stream are read from its beginning, or from a position; to go back is to begin there again.
    """

    def __init__(self, dataset: Dataset | Any, seed: int) -> None:
        self._dataset: Any = dataset
        self._order = None if is_stream(dataset) else SampleOrder(len(dataset), seed)
        self._seed = seed
        self._reader: StreamReader | None = None
        self._base = (0, START)
        self._next = 0

    def begin(self, first: int, position: bytes) -> None:
        """Note that the sample number `first` of the run is the one at this position of the stream."""
        self._base, self._reader = (first, position), None

    def position(self) -> bytes:
        """Return the position of a stream after the last sample that was read."""
        return self._base[1] if self._reader is None else self._reader.position()

    def read(self, first: int, count: int) -> list[Any]:
        """Return so many samples from number `first` of the run on."""
        if self._order is not None:
            return [
                read_sample(self._dataset, index, seed=self._seed, epoch=position // self._order.num_samples)
                for position, index in enumerate(self._order.ids_at(first, count), first)
            ]
        if self._reader is None or first < self._next:
            self._next, position = self._base
            if self._reader is None:
                self._reader = StreamReader(self._dataset, self._seed, position)
            else:
                self._reader.seek(position)
        self._reader.read(first - self._next)
        self._next = first + count
        return self._reader.read(count)

    def micro_batch(self, first: int, count: int) -> TensorPair:
        """Return so many samples, stacked."""
        return stacked(self.read(first, count))


class TokenWindows:
    """Map-style dataset: sample i is tokens [i (seq_len + 1), (i + 1) (seq_len + 1)), as input and as the next token.

    Windows do not overlap, so in one epoch every token is a target at most once; tokens after the last whole window are
    not used. A sample is a pair of int64 tensors (seq_len,).
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
        # Pickling a map would copy all its contents, so only its place is pickled. A slice of a map does not know its
        # own offset and is pickled as it is.
        if isinstance(tokens, np.memmap) and isinstance(memory, mmap):
            return _reopen, (str(tokens.filename), tokens.dtype.str, tokens.offset, len(tokens), self._seq_len)
        return TokenWindows, (tokens, self._seq_len)


def _reopen(path: str, dtype: str, offset: int, num_tokens: int, seq_len: int) -> TokenWindows:
    return TokenWindows(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(num_tokens,)), seq_len)
