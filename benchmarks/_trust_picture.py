"""Simulated / real throughput, a point for each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks._trust_replay import Replayed
from chameleon_ft.simulate.figures import LINE, PALE, TEXT, ink_of

_BAND: Final = 0.03


def draw(path: Path, found: Sequence[Replayed]) -> None:
    """Draw the error of each run over its real throughput, in an SVG or PNG file."""
    figure = Figure(figsize=(7.0, 3.4), dpi=130)
    axes = figure.add_axes((0.1, 0.15, 0.68, 0.74))
    axes.axhspan(-_BAND, _BAND, color="#e4eef5", linewidth=0)
    axes.axhline(0.0, color=LINE, linewidth=0.8)
    for policy in dict.fromkeys(each.made.policy for each in found):
        own = [each for each in found if each.made.policy == policy]
        ink = ink_of(policy)
        axes.plot(
            [each.real_per_s for each in own],
            [each.error for each in own],
            linestyle="none",
            marker=ink.marker,
            markersize=5,
            color=ink.colour,
            label=policy,
        )
    widest = max(0.04, *(abs(each.error) for each in found)) * 1.1
    axes.set_ylim(-widest, widest)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("real samples per second", fontsize=9, color=TEXT)
    axes.set_title("simulated throughput, by how much it is off", fontsize=10, color=TEXT, loc="left")
    axes.tick_params(labelsize=8, colors=PALE, width=0.5, length=2.5)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(LINE)
    figure.legend(loc="center left", bbox_to_anchor=(0.8, 0.52), frameon=False, fontsize=8, labelcolor=TEXT)
    figure.savefig(path, facecolor="white", metadata={"Title": "simulated and real throughput"})
