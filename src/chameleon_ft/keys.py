"""Keys for random numbers, which depend on what is drawn and not on where or when.

Before each draw the generator is seeded with a key of (run seed, purpose, position). So every worker initialises a
layer alike, and a micro-batch gets the same dropout mask on any worker.
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import blake2b

__all__ = ["Purpose", "init_key", "random_key", "step_key"]

_KEY_MASK = (1 << 63) - 1


class Purpose(IntEnum):
    """The purpose of a key and its first part, so that two purposes never share a key by accident."""

    INIT = 1
    STEP = 2
    SHUFFLE = 3
    JOB = 4


def random_key(seed: int, *parts: int) -> int:
    """Return a key in [0, 2**63) that is a fixed function of its arguments, on every machine and Python version.

    Args:
        seed: the seed of the run.
        parts: integers of any size, e.g. a `Purpose` and a layer. Their number counts too: ``random_key(1, 2)`` and
            ``random_key(1, 2, 0)`` are unrelated.
    """
    # Decimal text is the same for an int and an IntEnum, and has no size limit.
    text = ",".join(str(int(part)) for part in (seed, *parts))
    return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "little") & _KEY_MASK


def init_key(seed: int, layer: int) -> int:
    """Return the key to seed with before building `layer`."""
    return random_key(seed, Purpose.INIT, layer)


def step_key(seed: int, *, step: int, micro_batch: int, layer: int) -> int:
    """Return the key to seed with before the forward of `layer` on a micro-batch, numbered in the global batch."""
    return random_key(seed, Purpose.STEP, step, micro_batch, layer)
