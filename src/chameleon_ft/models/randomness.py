"""The global random generators beside torch's, which no worker seeds."""

from __future__ import annotations

import random
import sys
from typing import Any


class OtherGenerators:
    """The states of Python's and of NumPy's global generator, to see later whether they have been used."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def used_since(self) -> str:
        """Return the name of a generator whose state has changed, empty if none has."""
        if random.getstate() != self._python:
            return "random"
        return "numpy.random" if self._numpy is not None and _numpy_state() != self._numpy else ""


def _numpy_state() -> tuple[Any, ...] | None:
    """Return the state of NumPy's global generator, None if NumPy is not loaded."""
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest
