"""The cost of the control plane over the number of ranks, each with its bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from chameleon_ft.simulate.figures import LINE, PALE, TEXT

if TYPE_CHECKING:
    from benchmarks.control_plane import Measured

_PANELS: Final[tuple[tuple[str, Callable[[Measured], float]], ...]] = (
    ("all joined, s", lambda each: each.joined_s),
    ("loss to orders, s", lambda each: each.losses.median),
    ("heartbeats, cores", lambda each: each.heartbeats),
    ("memory, GiB", lambda each: (each.peak_bytes + each.helper_bytes) / 2**30),
)
_COLOUR: Final = "#1f77b4"


def draw(path: Path, measured: Sequence[Measured]) -> None:
    """Draw each cost over the number of ranks, and a line of linear growth from the smallest, in an SVG or PNG file."""
    figure = Figure(figsize=(9.2, 2.5), dpi=130)
    ranks = [each.ranks for each in measured]
    for axes, (title, value) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        values = [value(each) for each in measured]
        axes.plot(ranks, values, marker="o", markersize=4, color=_COLOUR)
        linear = [values[0] * each / ranks[0] for each in ranks]
        axes.plot(ranks, linear, linestyle=":", linewidth=1.0, color=PALE)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [str(each) for each in ranks])
        axes.set_yticks(values, [f"{each:.2g}" for each in values])
        axes.minorticks_off()
        axes.set_title(title, fontsize=9, color=TEXT, loc="left")
        axes.tick_params(labelsize=7, colors=PALE, width=0.5, length=2.5)
        for name, spine in axes.spines.items():
            spine.set_visible(name in ("left", "bottom"))
            spine.set_color(LINE)
    figure.supxlabel("ranks (dotted: linear growth)", fontsize=8, color=TEXT)
    figure.tight_layout()
    figure.savefig(path, facecolor="white", metadata={"Title": "the control plane over the number of ranks"})
