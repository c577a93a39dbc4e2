"""Keys for everything random: a number that depends on what is drawn, not on where or when it is drawn.

A layer is initialised alike on every worker that builds it, and a micro-batch meets the same dropout mask wherever a
layer runs, because each draw is preceded by seeding with a key made of (run seed, purpose, position).
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import blake2b

__all__ = ["Purpose", "init_key", "random_key", "step_key"]

_KEY_MASK = (1 << 63) - 1


class Purpose(IntEnum):
    """What a key is for; the first part of a key, so that two purposes never share a key by accident."""

    INIT = 1
    STEP = 2
    SHUFFLE = 3


def random_key(seed: int, *parts: int) -> int:
    """A key in [0, 2**63) that is a fixed function of its arguments, on every machine and Python version.

    Args:
        seed: the seed of the run.
        parts: what the key is for, e.g. a `Purpose` and a layer; any integers, of any size. The number of parts counts
            too: ``random_key(1, 2)`` and ``random_key(1, 2, 0)`` are unrelated.
    """
    # Decimal text with a separator is the same for an int and an IntEnum, and has no limit of size.
    text = ",".join(str(int(part)) for part in (seed, *parts))
    return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "little") & _KEY_MASK


def init_key(seed: int, layer: int) -> int:
    """The key that is seeded with before layer `layer` is built."""
    return random_key(seed, Purpose.INIT, layer)


def step_key(seed: int, *, step: int, micro_batch: int, layer: int) -> int:
    """The key that is seeded with before `layer` runs forward on a micro-batch, by its number in the global batch."""
    return random_key(seed, Purpose.STEP, step, micro_batch, layer)
