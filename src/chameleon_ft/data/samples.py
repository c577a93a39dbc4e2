"""Samples of a language model, windows of a row of tokens, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chameleon_ft.data.corpus import kind_of, open_path
from chameleon_ft.data.mixture import sample_order
from chameleon_ft.data.order import read_sample
from chameleon_ft.data.shards import ShardFolder, is_shard_folder
from chameleon_ft.data.streams import START, StreamReader
from chameleon_ft.data.text import find_text, read_text
from chameleon_ft.data.token_files import Place, map_place, place_of
from chameleon_ft.errors import DataError
from chameleon_ft.job import is_stream

if TYPE_CHECKING:
    from chameleon_ft.data.mixture import MixtureOrder
    from chameleon_ft.data.order import SampleOrder
    from chameleon_ft.data.token_files import TokenArray, Tokens
    from chameleon_ft.job import Dataset, TensorPair


def load_micro_batch(
    dataset: Dataset,
    order: SampleOrder | MixtureOrder,
    first: int,
    count: int,
    *,
    reading: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> TensorPair:
    """Return `count` samples from position `first` of the order on as (inputs, targets), stacked in a new dimension 0.

    Each is read as by `read_sample`, inside the context that `reading` returns for its id.
    """
    samples = []
    for index, epoch in order.draws_at(first, count):
        with reading(index):
            samples.append(read_sample(dataset, index, seed=order.seed, epoch=epoch))
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
        self._order = None if is_stream(dataset) else sample_order(dataset, seed)
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
                read_sample(self._dataset, index, seed=self._seed, epoch=epoch)
                for index, epoch in self._order.draws_at(first, count)
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

    def __init__(self, tokens: Tokens, seq_len: int, *, starts: TokenArray | None = None) -> None:
        """Cut `tokens` into windows.

        Args:
            tokens: ids.
            seq_len: tokens of a sample's input, and of its target.
            starts: positions of the first tokens of documents, ascending. With them, the input is (2, seq_len): the
                tokens, and for each the number of its document in the window, from 0.

        Raises:
            DataError: there are fewer tokens than a window has.
        """
        if len(tokens) <= seq_len:
            raise DataError(f"{len(tokens)} tokens are less than one sample of {seq_len} + 1: give more data")
        self._tokens = tokens
        self._seq_len = seq_len
        self._starts = starts

    def __len__(self) -> int:
        return len(self._tokens) // (self._seq_len + 1)

    def __getitem__(self, index: int) -> TensorPair:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self._seq_len + 1
        begin = index * length
        window = torch.from_numpy(self._tokens[begin : begin + length].astype(np.int64))
        if self._starts is None:
            return window[:-1], window[1:]
        first, last = np.searchsorted(self._starts, (begin, begin + self._seq_len - 1), side="right")
        # Counts the documents that begin after the first token of the window, up to each token.
        numbers = np.zeros(self._seq_len, np.int64)
        np.add.at(numbers, self._starts[first:last] - begin, 1)
        return torch.stack((window[:-1], torch.from_numpy(numbers.cumsum()))), window[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        starts = None if self._starts is None else place_of(self._starts) or self._starts
        return _reopen, (place_of(self._tokens) or self._tokens, self._seq_len, starts)


def _reopen(tokens: Tokens | Place, seq_len: int, starts: TokenArray | Place | None) -> TokenWindows:
    tokens = map_place(tokens) if isinstance(tokens, tuple) else tokens
    starts = map_place(starts) if isinstance(starts, tuple) else starts
    return TokenWindows(tokens, seq_len, starts=starts)


def open_corpus(path: str | Path, seq_len: int, *, dtype: str = "uint16", document_ids: bool = False) -> TokenWindows:
    """Return the samples of a corpus, for the `dataset` of a job or a source of a `Mixture`.

    Args:
        path: as ``data.path``: a folder of `chameleon data tokenize`, a token file, a pattern of several, or text, of
            which each byte is a token.
        seq_len: tokens of a sample.
        dtype: type of the ids in a raw token file.
        document_ids: whether each input is (2, seq_len), tokens and the numbers of their documents; a folder of
            `chameleon data tokenize` knows where documents begin.

    Raises:
        DataError: it cannot be opened, or has fewer tokens than a sample takes.
    """
    path = Path(path).expanduser()
    starts = None
    if document_ids:
        if not is_shard_folder(path):
            raise DataError(f"{path} does not tell where documents begin: tokenise it by `chameleon data tokenize`")
        starts = ShardFolder.open(path).starts
    tokens = open_path(path, dtype) if kind_of(path) == "tokens" else read_text(find_text(path))
    return TokenWindows(tokens, seq_len, starts=starts)
