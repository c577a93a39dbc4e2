"""Keys for random numbers, which depend on what is drawn and not on where or when.

Before each draw the generator is seeded with a key of (run seed, purpose, position). So every worker initialises a
layer alike, reads a sample alike, and a micro-batch gets the same dropout mask on any worker.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, unique
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from numpy.random import BitGenerator

__all__ = ["Purpose", "generator_lock", "generators_kept", "init_key", "random_key", "seeded", "step_key"]

_KEY_MASK = (1 << 63) - 1

generator_lock = threading.RLock()
"""A lock on the global generators, which all threads share: hold it from a seed to the last number drawn after it.

The training thread holds it over each forward and backward. No other thread takes it while a rank trains, except to
build a layer whose factory draws random numbers; see `models.build.blank_layer`.
"""

_spare: list[BitGenerator] = []  # of NumPy, where making one takes much longer than seeding it


@unique
class Purpose(IntEnum):
    """The purpose of a key and its first part, so that two purposes never share a key by accident."""

    INIT = 1
    STEP = 2
    SHUFFLE = 3
    JOB = 4
    SAMPLE = 5
    EPOCH = 6
    MIXTURE = 7
    COLLATE = 8


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


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch's CPU inside the block; after it they go on as before it.

    They are seeded as by ``random.seed(key)``, ``numpy.random.seed(key % 2**32)`` and ``torch.manual_seed(key)``.
    """
    import numpy as np
    import torch
    from numpy.random.mtrand import get_bit_generator, set_bit_generator

    generator = torch.default_generator
    with generator_lock:
        python, numpys, torchs = random.getstate(), get_bit_generator(), generator.get_state()
        bits = _spare.pop() if _spare else np.random.MT19937()
        try:
            set_bit_generator(bits)  # many times as quick as to save and restore the state of NumPy's own
            np.random.seed(key % 2**32)
            random.seed(key)
            generator.manual_seed(key)
            yield
        finally:
            random.setstate(python)
            set_bit_generator(numpys)
            generator.set_state(torchs)
            _spare.append(bits)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Let the global generators of Python, NumPy and torch, also that of `device`, go on after the block as before it.

    Other threads may draw inside the block, as by `seeded`.
    """
    import numpy as np
    import torch

    own = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    with generator_lock:
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        on_device = None if own is None else own.get_rng_state(device)
    try:
        yield
    finally:
        with generator_lock:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])
            if own is not None:
                own.set_rng_state(on_device, device)


def init_key(seed: int, layer: int) -> int:
    """Return the key to seed with before building `layer`."""
    return random_key(seed, Purpose.INIT, layer)


def step_key(seed: int, *, step: int, micro_batch: int, layer: int) -> int:
    """Return the key to seed with before the forward of `layer` on a micro-batch, numbered in the global batch."""
    return random_key(seed, Purpose.STEP, step, micro_batch, layer)
