"""Mixtures: several datasets read as one, in proportion to weights, each in an order of its own."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from chameleon_ft.data.order import Order, SampleOrder
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.keys import Purpose, random_key

if TYPE_CHECKING:
    from chameleon_ft.job.datasets import Dataset, TensorPair


@dataclass(frozen=True, slots=True)
class MixtureOrder(Order):
    """The order of the samples of a mixture.

    Of any n samples from the first on, source s has n times its share of the weights, up to 1 for each source before
    it and 1 for itself. A source is read epoch after epoch, each a permutation of its samples, at its own pace.

    Attributes:
        sizes: number of samples of each source; their ids follow on each other.
        weights: positive, one for each source.
        seed: seed of the run.
    """

    sizes: tuple[int, ...]
    weights: tuple[Fraction, ...]
    seed: int

    def draws_at(self, first: int, count: int) -> list[tuple[int, int]]:
        """See `Order`; an epoch is that of the source."""
        offsets, ratios = (0, *accumulate(self.sizes)), _ratios(self.weights)
        picks = [_pick(position, ratios) for position in range(first, first + count)]
        draws: dict[int, Iterator[tuple[int, int]]] = {}
        for source, place in picks:
            if source not in draws:
                order = SampleOrder(self.sizes[source], _seed(self.seed, source))
                # The positions of a source in its own order follow on each other.
                draws[source] = iter(order.draws_at(place, sum(each == source for each, _ in picks)))
        return [(offsets[source] + index, epoch) for source, _ in picks for index, epoch in (next(draws[source]),)]


@lru_cache(64)
def _seed(seed: int, source: int) -> int:
    return random_key(seed, Purpose.MIXTURE, source)


@lru_cache(8)
def _ratios(weights: tuple[Fraction, ...]) -> tuple[tuple[int, int], ...]:
    """Return the share of each source of what those before it leave, as numerator and denominator."""
    shares = (weight / sum(weights[source:]) for source, weight in enumerate(weights))
    return tuple((share.numerator, share.denominator) for share in shares)


def _pick(position: int, ratios: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the source of a position, and how many of its samples come before.

    The first source gets the positions at which the whole part of position times ratio rises, and the others share the
    rest alike.
    """
    for source, (numerator, denominator) in enumerate(ratios):
        before = position * numerator // denominator
        if (position + 1) * numerator // denominator > before:
            return source, before
        position -= before
    raise AssertionError("the last source gets all of the rest")


class Mixture:
    """Map-style dataset of several: a run reads them in proportion to their weights.

    Sample ids of the sources follow on each other. Which ids a step reads, `sample_order` tells.
    """

    def __init__(self, sources: Sequence[tuple[Dataset, float]]) -> None:
        """Mix `sources`, pairs of a map-style dataset and its weight, which need not add up to 1.

        Raises:
            ConfigError: there are none, one is empty or a stream, or a weight is not positive.
        """
        self._datasets = tuple(dataset for dataset, _ in sources)
        if (stream := next(filter(is_stream, self._datasets), None)) is not None:
            raise ConfigError(
                f"a source of a mixture is a stream, {type(stream).__name__}: give map-style datasets, or mix streams "
                "by the library that reads them"
            )
        sizes = tuple(map(len, self._datasets))
        if not sizes or not all(sizes):
            raise ConfigError(f"a mixture needs sources with samples, and these have {sizes}: leave out empty ones")
        if bad := [weight for _, weight in sources if not (weight > 0 and math.isfinite(weight))]:
            raise ConfigError(f"a source of a mixture has the weight {bad[0]}: give a positive number")
        self.sizes = sizes
        # As it is written: 0.1 is a tenth.
        self.weights = tuple(Fraction(str(weight)) for _, weight in sources)
        self._ends = tuple(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> TensorPair:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect_right(self._ends, index)
        return self._datasets[source][index - self._ends[source] + self.sizes[source]]


def sample_order(dataset: Dataset, seed: int) -> Order:
    """Return the order in which a run reads `dataset`."""
    if isinstance(dataset, Mixture):
        return MixtureOrder(dataset.sizes, dataset.weights, seed)
    return SampleOrder(len(dataset), seed)


def describe_order(dataset: Dataset) -> str:
    """Describe in a line what the order depends on besides the seed, to compare it at a resume."""
    if not isinstance(dataset, Mixture):
        return f"permutations of {len(dataset)} samples"
    parts = (
        f"{size} samples with weight {weight}" for size, weight in zip(dataset.sizes, dataset.weights, strict=True)
    )
    return f"a mixture of {', '.join(parts)}"
