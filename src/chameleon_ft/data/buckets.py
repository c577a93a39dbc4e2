"""Samples of different lengths, padded to a few lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map

from chameleon_ft.data.samples import IGNORED, LABELS
from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from chameleon_ft.job.datasets import Collate
    from chameleon_ft.job.job import Job

_PADDING: Final = {LABELS: IGNORED, "target": IGNORED}


@dataclass(frozen=True, slots=True)
class Buckets:
    """A `collate` that pads each micro-batch to the smallest of some lengths that its longest sample fits into.

    Samples are pairs (input, target), or dicts of fields with labels. Fields that are as long as the first one, or the
    input, are padded at their end; all others are stacked as they are.

    Attributes:
        lengths: ascending.
        padding: by the name of a field, or "input" and "target" of a pair, what it is padded with. Default: -100 for
            labels and the target, which `cross_entropy` ignores, and 0 for all others.
        collate: makes a micro-batch of samples before it is padded in dimension 1, such as a data collator of
            transformers; None: samples are padded to the longest and stacked.

    Raises:
        ConfigError: the lengths are not ascending numbers from 1 on.
    """

    lengths: Sequence[int]
    padding: Mapping[str, float] = field(default_factory=dict)
    collate: Collate | None = None
    _is_cut: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths or self.lengths[0] < 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"the lengths of buckets are {list(self.lengths)}: give ascending numbers from 1 on")

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, Any] | dict[str, Any]:
        """Return a micro-batch, as `Job.collate`. Raises ValueError if a sample is longer than the last length."""
        batch = self._stacked(samples) if self.collate is None else self.collate(list(samples))
        is_dict = isinstance(batch, Mapping)
        named = dict(batch) if is_dict else dict(zip(("input", "target"), batch, strict=True))
        longest = _length(named)
        length = next((each for each in self.lengths if each >= longest), self.lengths[-1])
        if longest > length and not self._is_cut:
            raise ValueError(
                f"a sample has the length {longest}, and the last bucket {length}; cut it, or add a bucket"
            )

        def padded(name: str, tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.shape[1:2] != (longest,):
                return tensor
            sizes = (*[0] * (2 * tensor.ndim - 3), length - longest)
            return functional.pad(tensor, sizes, value=self._value(name))

        found = {name: tree_map(lambda each, name=name: padded(name, each), tree) for name, tree in named.items()}
        return found if is_dict else (found["input"], found["target"])

    def only(self, length: int) -> Self:
        """Return a `collate` that pads or cuts every micro-batch to one length, to examine a job by."""
        return replace(self, lengths=(length,), _is_cut=True)

    def number_of(self, inputs: Any) -> int:
        """Return the number of the bucket that a micro-batch with these inputs is in."""
        return self.lengths.index(_length(inputs if isinstance(inputs, dict) else {"input": inputs}))

    def _stacked(self, samples: Sequence[Any]) -> Any:
        is_dict = isinstance(samples[0], Mapping)
        rows = [_tensors(each) for each in samples]
        if other := next((row for row in rows if row.keys() != rows[0].keys()), None):
            raise ValueError(f"a sample has the fields {', '.join(rows[0])}, and another one {', '.join(other)}")
        lengths = [next(iter(row.values())).shape[:1] for row in rows]

        def stacked(name: str) -> Tensor:
            column = _of_one_type([row[name] for row in rows])
            if lengths[0] and all(each.shape[:1] == length for each, length in zip(column, lengths, strict=True)):
                return pad_sequence(column, batch_first=True, padding_value=self._value(name))
            if len({each.shape for each in column}) > 1:
                raise ValueError(
                    f"the samples' {name} differ in their shapes, and are not as long as {next(iter(rows[0]))}, which "
                    "is the length of a sample: make that the first field, and leave others out"
                )
            return torch.stack(column)

        found = {name: stacked(name) for name in rows[0]}
        return found if is_dict else (found["input"], found["target"])

    def _value(self, name: str) -> float:
        return self.padding.get(name, _PADDING.get(name, 0))


def _tensors(sample: Any) -> dict[str, Tensor]:
    """Return the fields of a sample as tensors. Raises ValueError if it has none, or one that is no tensor."""
    if not isinstance(sample, Mapping) and not (isinstance(sample, list | tuple) and len(sample) == 2):
        raise ValueError(f"a sample is {type(sample).__name__}, and buckets take a pair (input, target) or a dict")
    named = sample if isinstance(sample, Mapping) else dict(zip(("input", "target"), sample, strict=True))
    tensors = {}
    for name, value in named.items():
        try:
            tensors[name] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            kind = type(value).__name__
            raise ValueError(f"a sample's {name} is {kind}, and no tensor: leave it out of the samples") from None
    if not tensors:
        raise ValueError("a sample is an empty dict")
    return tensors


def _of_one_type(column: list[Tensor]) -> list[Tensor]:
    """Return tensors in a type that holds the values of all. An empty list has no type of its own."""
    dtype = reduce(torch.promote_types, {each.dtype for each in column if each.numel()} or {torch.int64})
    return [each.to(dtype) for each in column]


def _length(named: Mapping[str, Any]) -> int:
    """Return the length of a micro-batch by its inputs, (micro-batch, length, ...)."""
    tensors = [each for each in tree_leaves(next(iter(named.values()))) if isinstance(each, Tensor) and each.ndim > 1]
    if not tensors:
        raise ValueError("the first field of a micro-batch in buckets has no dimension 1, which is its length")
    return tensors[0].shape[1]


def buckets_of(job: Job) -> Buckets | None:
    """Return the buckets of a job; None if all its micro-batches have one shape."""
    return job.collate if isinstance(job.collate, Buckets) else None


def largest_bucket(job: Job) -> Job:
    """Return a job whose micro-batches all have the shape of the largest bucket, if it has any."""
    buckets = buckets_of(job)
    return job if buckets is None else replace(job, collate=buckets.only(buckets.lengths[-1]))
