"""Presets by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from chameleon_ft.errors import ConfigError

Preset = TypeVar("Preset")


def named(presets: Mapping[str, Preset], name: str, kind: str) -> Preset:
    """The preset called `name`, in any case, or the only one whose name goes on after it with a "-".

    Raises ConfigError with all there are, and with the nearest where one is near.
    """
    asked = name.lower()
    if asked in presets:
        return presets[asked]
    begun = [known for known in presets if known.startswith(f"{asked}-")]
    if len(begun) == 1:
        return presets[begun[0]]
    near = difflib.get_close_matches(asked, presets, n=1)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    raise ConfigError(f"there is no {kind} {name!r}; {hint} are {', '.join(presets)}")
