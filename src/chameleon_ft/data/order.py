"""Which samples make up a step: for each epoch a pseudo-random permutation, evaluated anywhere in O(1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt

from chameleon_ft.errors import ConfigError
from chameleon_ft.keys import Purpose, random_key

__all__ = ["SampleOrder"]

_ROUNDS = 8
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order in which samples are drawn, as a function of (seed, step): no state, nothing to save or hand over.

    The steps read one endless stream of samples, epoch after epoch; each epoch is a permutation of all samples, so none
    is lost or repeated in it. An epoch may end, and the next begin, in the middle of a step.

    Attributes:
        num_samples: samples in the data set, at least 1.
        seed: the seed of the run.
    """

    num_samples: int
    seed: int
    # Radices of the Feistel network: it permutes [0, left * right), which exceeds num_samples by less than `left`.
    _left: int = field(init=False, repr=False, compare=False)
    _right: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"a sample order needs at least one sample, not {self.num_samples}: check the data set")
        left = isqrt(self.num_samples - 1) + 1
        object.__setattr__(self, "_left", left)
        object.__setattr__(self, "_right", -(-self.num_samples // left))

    def ids(self, step: int, batch_size: int) -> list[int]:
        """The sample ids of a step, in the order of its micro-batches.

        Args:
            step: number of the step, from 0.
            batch_size: samples of one step: all micro-batches times their size.
        """
        if step < 0 or batch_size < 1:
            raise ConfigError(f"step {step} of {batch_size} samples: the step must be >= 0 and the batch >= 1")
        keys: tuple[int, ...] = ()
        keys_epoch = -1
        ids = []
        for position in range(step * batch_size, (step + 1) * batch_size):
            epoch, offset = divmod(position, self.num_samples)
            if epoch != keys_epoch:
                keys, keys_epoch = self._round_keys(epoch), epoch
            ids.append(self._permute(offset, keys))
        return ids

    def _round_keys(self, epoch: int) -> tuple[int, ...]:
        return tuple(random_key(self.seed, Purpose.SHUFFLE, epoch, number) for number in range(_ROUNDS))

    def _permute(self, value: int, keys: tuple[int, ...]) -> int:
        # Cycle walking: a permutation of the box, repeated until it lands in the data set, is a permutation of the data
        # set. The box exceeds it by less than its square root, so a second turn is rare.
        while True:
            value = self._permute_box(value, keys)
            if value < self.num_samples:
                return value

    def _permute_box(self, value: int, keys: tuple[int, ...]) -> int:
        """A Feistel network over the mixed radix left x right: each round adds a hash of one digit to the other."""
        left, right = self._left, self._right
        high, low = divmod(value, right)
        for number, key in enumerate(keys):
            if number % 2:
                low = (low + _mix(high ^ key)) % right
            else:
                high = (high + _mix(low ^ key)) % left
        return high * right + low


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
