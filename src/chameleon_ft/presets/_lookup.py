"""Presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from chameleon_ft.errors import ConfigError

Preset = TypeVar("Preset")


def named(presets: Mapping[str, Preset], name: str, kind: str) -> Preset:
    """Return the preset of this name, in any case, or the only one whose name continues it after a "-".

    Raises ConfigError if there is none.
    """
    asked = name.lower()
    if asked in presets:
        return presets[asked]
    begun = [known for known in presets if known.startswith(f"{asked}-")]
    if len(begun) == 1:
        return presets[begun[0]]
    raise ConfigError.unknown_name(kind, name, presets)
