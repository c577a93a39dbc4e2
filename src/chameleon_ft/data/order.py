"""The order of samples, for each epoch a pseudo-random permutation, evaluated at any step in O(1); and their draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING

from chameleon_ft.errors import ConfigError
from chameleon_ft.keys import Purpose, random_key, seeded

if TYPE_CHECKING:
    from chameleon_ft.job.datasets import Dataset, TensorPair

_ROUNDS = 8
_WORD = (1 << 64) - 1


class Order(ABC):
    """The order of samples as a function of (seed, step), without state to save or transfer."""

    __slots__ = ()
    seed: int

    def ids(self, step: int, batch_size: int) -> list[int]:
        """Return the sample ids of a step, in the order of its micro-batches.

        Args:
            step: number of the step, from 0.
            batch_size: samples of one step: all micro-batches times their size.
        """
        if step < 0 or batch_size < 1:
            raise ConfigError(f"step {step} of {batch_size} samples: the step must be >= 0 and the batch >= 1")
        return self.ids_at(step * batch_size, batch_size)

    def ids_at(self, first: int, count: int) -> list[int]:
        """Return `count` sample ids in the order of the stream, from position `first` on."""
        return [index for index, _ in self.draws_at(first, count)]

    @abstractmethod
    def draws_at(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return (sample id, epoch) of `count` positions of the stream, from `first` on."""


@dataclass(frozen=True, slots=True)
class SampleOrder(Order):
    """The order of `num_samples` samples.

    The steps read one endless stream of samples, epoch after epoch; each epoch is a permutation of all samples. An
    epoch may end, and the next begin, in the middle of a step.
    """

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"a sample order needs at least one sample, not {self.num_samples}: check the data set")

    def draws_at(self, first: int, count: int) -> list[tuple[int, int]]:
        """See `Order`."""
        # Radices of the Feistel network: the box [0, left * right) exceeds num_samples by less than `left`.
        left = isqrt(self.num_samples - 1) + 1
        right = -(-self.num_samples // left)
        keys: tuple[int, ...] = ()
        keys_epoch = -1
        draws = []
        for position in range(first, first + count):
            epoch, value = divmod(position, self.num_samples)
            if epoch != keys_epoch:
                keys_epoch = epoch
                keys = _keys(self.seed, epoch)
            # Cycle walking: a permutation of the box, repeated until its value is a sample, is a permutation of the
            # samples. The box exceeds them by less than its square root, so repetitions are rare.
            value = _permute_box(value, keys, left, right)
            while value >= self.num_samples:
                value = _permute_box(value, keys, left, right)
            draws.append((value, epoch))
        return draws


@dataclass(frozen=True, slots=True)
class EvaluationOrder(SampleOrder):
    """The samples of an evaluation, from the first to the last, which then fills the last micro-batch."""

    def draws_at(self, first: int, count: int) -> list[tuple[int, int]]:
        """See `Order`; a sample is evaluated as it is read first."""
        return [(min(position, self.num_samples - 1), 0) for position in range(first, first + count)]


def read_sample(dataset: Dataset, index: int, *, seed: int, epoch: int = 0) -> TensorPair:
    """Return sample `index` as every worker reads it, with the random numbers of one draw for each epoch.

    Python's, NumPy's and torch's global generators are seeded by (seed, epoch, index) for the read, and continue after
    it as before it. So a crop or a mask is the same on the first and on the last stage, after a failure and in a plain
    loop, and another one in the next epoch.

    Args:
        dataset: map-style.
        index: id of the sample, as `SampleOrder` gives it.
        seed: seed of the run.
        epoch: how many times all samples have been read before.
    """
    with seeded(random_key(seed, Purpose.SAMPLE, epoch, index)):
        return dataset[index]


@lru_cache(64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(random_key(seed, Purpose.SHUFFLE, epoch, number) for number in range(_ROUNDS))


def _permute_box(value: int, keys: tuple[int, ...], left: int, right: int) -> int:
    """Apply a Feistel network over the radices left and right: each round adds a hash of one digit to the other."""
    high, low = divmod(value, right)
    for number, key in enumerate(keys):
        if number % 2:
            low = (low + _mix(high ^ key)) % right
        else:
            high = (high + _mix(low ^ key)) % left
    return high * right + low


def _mix(value: int) -> int:
    """Apply the finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
