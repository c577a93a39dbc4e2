"""Presets by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from chameleon_ft.errors import ConfigError

Preset = TypeVar("Preset")


def named(presets: Mapping[str, Preset], name: str, kind: str) -> Preset:
    """The preset called `name`, in any case. Raises ConfigError that names the nearest and all there are."""
    found = presets.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), presets, n=1, cutoff=0.0)
        raise ConfigError(f"there is no {kind} {name!r}; did you mean {near[0]!r}? Known: {', '.join(presets)}")
    return found
