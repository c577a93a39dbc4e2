"""Colours and fonts of pictures of simulations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from matplotlib.figure import Figure

from chameleon_ft.observe.picture import fit_title

__all__ = ["LINE", "MARGIN", "MISSING_FILLS", "ORACLE_INK", "PALE", "TEXT", "Ink", "draw_title", "ink_of"]

TEXT: Final = "#1a1a1a"
PALE: Final = "#666666"
LINE: Final = "#d0d0d0"
ORACLE_INK: Final = "#9a9a9a"
MARGIN: Final = 0.015  # of the width
_TITLE_SIZE: Final = 10.5  # points
_POINTS_PER_INCH: Final = 72.0
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


def draw_title(figure: Figure, title: str) -> None:
    """Write the title on top of a figure, as large as it fits."""
    width, height = figure.get_size_inches()
    fitted, size = fit_title(title, width=(1 - 2 * MARGIN) * width * _POINTS_PER_INCH, size=_TITLE_SIZE)
    style: dict[str, Any] = {"va": "center", "fontsize": size, "weight": "bold", "color": TEXT, "linespacing": 1.1}
    figure.text(MARGIN, 1 - 0.2 / height, fitted, parse_math=False, **style)
