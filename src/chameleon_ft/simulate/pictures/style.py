"""Colours and fonts of pictures of simulations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chameleon_ft.observe.picture import fit_title

TEXT: Final = "#1a1a1a"
PALE: Final = "#666666"
LINE: Final = "#d0d0d0"
ORACLE_INK: Final = "#9a9a9a"
MARGIN: Final = 0.015  # of the width
_TITLE_SIZE: Final = 10.5  # points
_POINTS_PER_INCH: Final = 72.0


@dataclass(frozen=True, slots=True)
class Ink:
    """Colour, marker and width of the line of a policy."""

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
    """Return the ink of a policy; that of the oracle for others."""
    return _INKS.get(policy, Ink(ORACLE_INK, "."))


def set_axes_style(axes: Axes, *, label_size: float) -> None:
    """Draw pale ticks, and spines only at the left and at the bottom."""
    axes.tick_params(colors=PALE, labelsize=label_size, width=0.5, length=2.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)


def draw_title(figure: Figure, title: str) -> None:
    """Write the title on top of a figure, as large as it fits."""
    width, height = figure.get_size_inches()
    fitted, size = fit_title(title, width=(1 - 2 * MARGIN) * width * _POINTS_PER_INCH, size=_TITLE_SIZE)
    style: dict[str, Any] = {"va": "center", "fontsize": size, "weight": "bold", "color": TEXT, "linespacing": 1.1}
    figure.text(MARGIN, 1 - 0.2 / height, fitted, parse_math=False, **style)
