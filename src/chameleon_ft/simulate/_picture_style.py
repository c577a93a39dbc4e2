"""Colours and fonts of pictures of simulations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["LINE", "MISSING_FILLS", "ORACLE_INK", "PALE", "TEXT", "Ink", "ink_of"]

TEXT: Final = "#1a1a1a"
PALE: Final = "#666666"
LINE: Final = "#d0d0d0"
ORACLE_INK: Final = "#9a9a9a"
MISSING_FILLS: Final = ("#a6cee8", "#a8430f", "#e8a33d", "#3fb598", "#35195a")


@dataclass(frozen=True, slots=True)
class Ink:
    """How the line of a policy looks."""

    colour: str
    marker: str
    width: float = 1.3


_INKS: Final = {
    "chameleon": Ink("#c2410c", "o", 2.4),
    "reroute": Ink("#2b6a94", "s"),
    "repair": Ink("#7a9e2f", "v"),
    "repartition": Ink("#1f8a70", "^"),
    "recycle": Ink("#6aaed6", "D"),
    "oobleck": Ink("#8b5cb8", "P"),
    "paper": Ink("#d48fb0", "X"),
    "drop-replica": Ink("#a07c2c", "<"),
    "redundant": Ink("#4d4d4d", ">"),
    "restart": Ink("#111111", "*"),
}


def ink_of(policy: str) -> Ink:
    """Of a policy; that of the oracle for others."""
    return _INKS.get(policy, Ink(ORACLE_INK, "."))
