"""Samples of a language model, windows of a row of tokens, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from chameleon_ft.data.corpus import kind_of, open_path
from chameleon_ft.data.mixture import sample_order
from chameleon_ft.data.order import read_sample
from chameleon_ft.data.shards import ShardFolder, is_shard_folder
from chameleon_ft.data.streams import START, StreamReader
from chameleon_ft.data.text import find_text, read_text
from chameleon_ft.data.token_files import Place, map_place, place_of
from chameleon_ft.errors import ConfigError, DataError
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.keys import Purpose, random_key, seeded

if TYPE_CHECKING:
    from chameleon_ft.data.order import Order
    from chameleon_ft.data.token_files import TokenArray, Tokens
    from chameleon_ft.job.datasets import Collate, Dataset


_Key = TypeVar("_Key")

INPUT_IDS: Final = "input_ids"
LABELS: Final = "labels"
MASK: Final = "attention_mask"
DOCUMENT_IDS: Final = "document_ids"
IGNORED: Final = -100
"""The label of a token that is no term of a loss, as for torch and transformers."""


def load_micro_batch(
    dataset: Dataset,
    order: Order,
    first: int,
    count: int,
    *,
    collate: Collate | None = None,
    reading: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> tuple[Any, Any]:
    """Return `count` samples from position `first` of the order on as (inputs, targets), by `collated`.

    Each is read as by `read_sample`, inside the context that `reading` returns for its id.
    """
    draws = list(order.draws_at(first, count))
    samples = list(_read(dataset, order.seed, draws, reading))
    return collated(samples, collate, seed=order.seed, place=(0, first), ids=[index for index, _ in draws])


def load_readable(
    dataset: Dataset,
    order: Order,
    first: int,
    count: int,
    *,
    collate: Collate | None = None,
    reading: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> tuple[tuple[Any, Any], dict[int, Exception]]:
    """Return as `load_micro_batch`, and the errors of samples that cannot be read, by their rows.

    In the row of such a sample there is another one, which does not count.

    Raises:
        Exception: as the first sample, if neither these nor as many after them can be read; or as `collate`, if it
            fails for no sample by itself.
    """
    samples: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    draws = list(order.draws_at(first, 2 * count))
    for row, (index, epoch) in enumerate(draws):
        if row >= count and samples:
            break
        try:
            with reading(index):
                samples[row] = read_sample(dataset, index, seed=order.seed, epoch=epoch)
        except Exception as error:  # noqa: BLE001 - of the dataset
            errors[row] = error
    if not samples:
        raise errors[0]
    ids = [index for index, _ in draws[:count]]
    collating = partial(collated, collate=collate, seed=order.seed, place=(0, first), ids=ids)

    def filled() -> list[Any]:
        stand_in = next(iter(samples.values()))
        return [samples.get(row, stand_in) for row in range(count)]

    try:
        pair = collating(filled())
    except Exception:
        for row, failure in uncollated(collating, dict(samples), count):
            errors[row] = failure
            del samples[row]
        if not samples:
            raise
        pair = collating(filled())
    return pair, {row: error for row, error in errors.items() if row < count}


def _read(
    dataset: Dataset,
    seed: int,
    draws: Iterable[tuple[int, int]],
    reading: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Any]:
    """Yield the samples of a map-style dataset for draws of (id, epoch)."""
    for index, epoch in draws:
        with reading(index):
            sample = read_sample(dataset, index, seed=seed, epoch=epoch)
        yield sample


def collated(
    samples: Sequence[Any],
    collate: Collate | None,
    *,
    seed: int,
    place: tuple[int, int],
    ids: Sequence[int] | None = None,
) -> tuple[Any, Any]:
    """Return samples as (inputs, targets) of a micro-batch: tensors, or trees of them.

    Pairs of tensors are stacked in a new dimension 0, other samples by torch's `default_collate`. The inputs of samples
    that are dicts are their fields: all tensors but the labels, which are the targets. A function of the job's own is
    called with the random numbers of one draw for each micro-batch.

    Args:
        samples: of a micro-batch, in order.
        collate: the function of the job.
        seed: seed of the run.
        place: (0, position) of the first sample; of a stream (epoch, number in it).
        ids: of the samples, for messages; None: they follow the first one.

    Raises:
        ConfigError: samples without a function differ in their shapes; or what it returned is neither a pair of trees
            of tensors nor a dict of them with labels.
    """
    numbers = ids or range(place[1], place[1] + len(samples))
    if collate is None:
        try:
            if is_pair(samples[0]) and all(isinstance(each, torch.Tensor) for each in samples[0]):
                return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
            batch = default_collate(list(samples))
        except Exception as error:
            require_one_shape(dict(zip(numbers, map(shapes_of, samples), strict=True)), cause=error)
            raise
    else:
        try:
            with seeded(random_key(seed, Purpose.COLLATE, *place)):
                batch = collate(list(samples))
        except Exception as error:
            error.add_note(f"of samples {', '.join(map(str, numbers))}")
            raise
    if isinstance(batch, Mapping):
        targets = batch.get(LABELS)
        fields = {name: each for name, each in batch.items() if name != LABELS and isinstance(each, torch.Tensor)}
        if fields and _is_tree(targets):
            return fields, targets
    elif is_pair(batch):
        return batch[0], batch[1]
    given = f"samples are {_kind(samples[0])}" if collate is None else f"`collate` returns {_kind(batch)}"
    raise ConfigError(
        f"{given}: let the dataset, or `collate`, return (inputs, targets), the tensors for layer 0 and the loss; or "
        "a dict of tensors, such as input_ids and position_ids, and labels. Lists become tensors by "
        '`transformers.default_data_collator`, or by `with_format("torch")` of `datasets`'
    )


def _kind(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(f'{key} ({type(each).__name__})' for key, each in value.items())}"
    if isinstance(value, list | tuple) and len(value) <= _FEW:
        return f"a {name} of {', '.join(type(each).__name__ for each in value)}"
    return name


def require_one_shape(shapes: Mapping[int, Mapping[str, str]], *, cause: Exception | None = None) -> None:
    """Raise ConfigError if a sample has parts of other shapes than the first one. They are those of `shapes_of`."""
    (first, expected), *others = shapes.items()
    for number, found in others:
        for part, shape in expected.items():
            if (other := found.get(part, "missing")) != shape:
                raise ConfigError(
                    f"samples have other shapes: {part} is {shape} in sample {first}, and {other} in sample {number}; "
                    "make all of one shape, such as by padding, or give the job a `collate` that does, such as "
                    "chameleon_ft.data.Buckets"
                ) from cause


def shapes_of(sample: Any) -> dict[str, str]:
    """Return the shapes of the parts of a sample by name; of lists, the lengths."""
    parts = {"the sample": sample}
    if isinstance(sample, Mapping):
        parts = dict(sample)
    elif isinstance(sample, list | tuple) and len(sample) == 2:
        parts = dict(zip(("the input", "the target"), sample, strict=True))
    return {name: _shape(part) for name, part in parts.items()}


def _shape(part: Any) -> str:
    if isinstance(part, list | tuple):
        return f"a {type(part).__name__} of {len(part)}"
    if isinstance(part, int | float):
        return "a number"
    return f"of shape {tuple(part.shape)}" if hasattr(part, "shape") else type(part).__name__


def uncollated(
    collating: Callable[[list[Any]], object], samples: Mapping[_Key, Any], count: int
) -> Iterator[tuple[_Key, Exception]]:
    """Yield those of `samples` of which no micro-batch of `count` can be made, each with the error."""
    for key, sample in samples.items():
        try:
            collating([sample] * count)
        except Exception as error:  # noqa: BLE001 - of the job
            yield key, error


def fields_of(inputs: Any, targets: Any) -> dict[str, torch.Tensor]:
    """Return the fields of a micro-batch by name, its labels among them; none unless its inputs are a dict."""
    if not isinstance(inputs, dict):
        return {}
    named = {**inputs, LABELS: targets}
    return {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}


def _is_tree(value: object) -> bool:
    leaves = tree_leaves(value)
    return bool(leaves) and all(isinstance(each, torch.Tensor) for each in leaves)


def is_pair(value: object) -> bool:
    """Return whether a sample, or a micro-batch, is a pair of tensors, or of trees of them."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_tree, value))


_TRIES: Final = 16
_FEW: Final = 4


class SamplesInOrder:
    """The samples of a job in the order of training, read by one process.

    Those of a stream are read from its beginning, or from a position; to go back is to begin there again.

    Args:
        is_tolerant: In the place of samples that cannot be read, micro-batches have others, and streams the next ones.

    Attributes:
        left_out: (epoch, id) of the samples that a run could not read.
    """

    def __init__(
        self, dataset: Dataset | Any, seed: int, collate: Collate | None = None, *, is_tolerant: bool = False
    ) -> None:
        self._dataset: Any = dataset
        self._is_tolerant = is_tolerant
        self._collate = collate
        self._order = None if is_stream(dataset) else sample_order(dataset, seed)
        self._seed = seed
        self._reader: StreamReader | None = None
        self._base = (0, START)
        self._next = 0
        self.left_out: frozenset[tuple[int, int]] = frozenset()

    def begin(self, first: int, position: bytes) -> None:
        """Note that the sample number `first` of the run is the one at this position of the stream."""
        self._base, self._reader = (first, position), None

    def position(self) -> bytes:
        """Return the position of a stream after the last sample that was read."""
        return self._base[1] if self._reader is None else self._reader.position()

    def read(self, first: int, count: int) -> list[Any]:
        """Return so many samples from number `first` of the run on."""
        if self._order is not None:
            return list(_read(self._dataset, self._seed, self._order.draws_at(first, count)))
        if self._reader is None or first < self._next:
            self._next, position = self._base
            if self._reader is None:
                self._reader = StreamReader(self._dataset, self._seed, position, left_out=self.left_out)
            else:
                self._reader.seek(position)
        try:
            self._reader.read(first - self._next)
            self._next = first
            samples = self._reader.read(count)
        except DataError:
            raise
        except Exception:
            if not self._is_tolerant or len(self.left_out) == _TRIES:
                raise
            self.left_out |= {self._reader.at}
            self._reader = None
            return self.read(first, count)
        self._next += count
        return samples

    def left_out_of(self, first: int, count: int) -> set[int]:
        """Return the rows that do not count, of so many samples; a stream has the next samples in their place."""
        draws = () if self._order is None else self._order.draws_at(first, count)
        return {row for row, (index, epoch) in enumerate(draws) if (epoch, index) in self.left_out}

    def micro_batch(self, first: int, count: int) -> tuple[Any, Any]:
        """Return so many samples, by `collated`; in the rows of those left out there are others."""
        if self._order is None:
            # Read on to there.
            self.read(first, 0)
            place = (0, first) if self._reader is None else self._reader.at
            return collated(self.read(first, count), self._collate, seed=self._seed, place=place)
        if not self.left_out and not self._is_tolerant:
            return load_micro_batch(self._dataset, self._order, first, count, collate=self._collate)
        pair, errors = load_readable(self._dataset, self._order, first, count, collate=self._collate)
        if (unknown := errors.keys() - self.left_out_of(first, count)) and not self._is_tolerant:
            raise errors[min(unknown)]
        return pair


class TokenWindows:
    """Map-style dataset: sample i is tokens [i (seq_len + 1), (i + 1) (seq_len + 1)), as input and as the next token.

    Windows do not overlap, so in one epoch every token is a target at most once; tokens after the last whole window are
    not used. A sample is a pair of int64 tensors (seq_len,), or a dict of them if documents are known.
    """

    def __init__(self, tokens: Tokens, seq_len: int, *, starts: TokenArray | None = None) -> None:
        """Cut `tokens` into windows.

        Args:
            tokens: ids.
            seq_len: tokens of a sample's input, and of its target.
            starts: positions of the first tokens of documents, ascending. With them, a sample has the fields input_ids,
                document_ids, numbers of documents in the window, from 0, and labels, which are the next tokens, or -100
                where the next one is of another document.

        Raises:
            DataError: there are fewer tokens than a window has, or a window would have none.
        """
        if seq_len < 1:
            raise DataError(f"samples of {seq_len} tokens: give a length of 1 or more")
        if len(tokens) <= seq_len:
            raise DataError(f"{len(tokens)} tokens are less than one sample of {seq_len} + 1: give more data")
        self._tokens = tokens
        self._seq_len = seq_len
        self._starts = starts

    def __len__(self) -> int:
        return len(self._tokens) // (self._seq_len + 1)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self._seq_len + 1
        begin = index * length
        window = torch.from_numpy(self._tokens[begin : begin + length].astype(np.int64))
        if self._starts is None:
            return window[:-1], window[1:]
        first, last = np.searchsorted(self._starts, (begin, begin + self._seq_len), side="right")
        # Counts the documents that begin after the first token of the window, up to each token.
        numbers = np.zeros(length, np.int64)
        np.add.at(numbers, self._starts[first:last] - begin, 1)
        documents = torch.from_numpy(numbers.cumsum())
        labels = window[1:].masked_fill(documents[1:] != documents[:-1], IGNORED)
        return {INPUT_IDS: window[:-1], DOCUMENT_IDS: documents[:-1], LABELS: labels}

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
        document_ids: whether samples tell the documents of their tokens; see `TokenWindows`. A folder of
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
