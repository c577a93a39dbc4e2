"""The picture of docs/paper.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INKS: Final = {
    "chameleon": "#c2410c",
    "oobleck": "#8b5cb8",
    "recycle": "#2b6a94",
    "reroute": "#7fb2d6",
    "paper": "#c06a90",
}
_TEXT: Final = "#1a1a1a"
_PALE: Final = "#666666"
_LINE: Final = "#d0d0d0"
_WORKERS: Final = 32


def draw(
    path: Path,
    *,
    after: Mapping[str, Sequence[Sequence[float]]],
    ratios: Mapping[tuple[str, bool], Mapping[str, Sequence[float]]],
    published: Mapping[str, float],
    published_loss: float,
) -> None:
    """Draw the throughput after losses, and the ratios of Chameleon's average throughput to that of others.

    Args:
        path: file to write.
        after: policy -> for each number of lost workers the throughputs, relative to the failure-free one.
        ratios: (interval, whether workers come back) -> baseline -> ratios.
        published: baseline -> the largest ratio that the paper reports.
        published_loss: the largest loss of throughput after a recovery that the paper reports.
    """
    figure = Figure(figsize=(10.5, 3.9), dpi=130)
    left, right = figure.add_axes((0.06, 0.14, 0.35, 0.7)), figure.add_axes((0.545, 0.2, 0.44, 0.64))
    _after(left, after, published_loss)
    _ratios(right, ratios, published)
    figure.savefig(path, facecolor="white", metadata={"Title": "The paper's comparison, simulated", "Date": None})


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9.5, color=_TEXT, loc="left")
    axes.tick_params(colors=_PALE, labelsize=8, width=0.5, length=2.5)
    axes.grid(axis="y", color=_LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_LINE)


def _after(axes: Axes, after: Mapping[str, Sequence[Sequence[float]]], published_loss: float) -> None:
    _plain(axes, "throughput after recovery, of failure-free")
    lost = list(range(1, len(next(iter(after.values()))) + 1))
    for policy, values in after.items():
        ink, width = _INKS[policy], 2.4 if policy == "chameleon" else 1.4
        axes.plot(
            lost,
            [statistics.fmean(each) for each in values],
            "o-",
            color=ink,
            linewidth=width,
            markersize=3.5,
            label=policy,
        )
        axes.fill_between(
            lost, [min(each) for each in values], [max(each) for each in values], color=ink, alpha=0.12, linewidth=0
        )
    axes.plot(lost, [1 - count / _WORKERS for count in lost], "--", color=_PALE, linewidth=1, label="live workers")
    axes.axhline(1 - published_loss, color=_TEXT, linewidth=0.8, linestyle=":", label="published: at least")
    axes.set_xlabel(f"workers lost of {_WORKERS}", fontsize=8.5, color=_TEXT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(fontsize=7.5, frameon=False, loc="lower left", labelcolor=_TEXT)


def _ratios(
    axes: Axes, ratios: Mapping[tuple[str, bool], Mapping[str, Sequence[float]]], published: Mapping[str, float]
) -> None:
    _plain(axes, "Chameleon's average throughput, by the other's")
    baselines = list(next(iter(ratios.values())))
    width = 0.8 / len(baselines)
    for number, policy in enumerate(baselines):
        places = [index - 0.4 + width * (number + 0.5) for index in range(len(ratios))]
        heights = [statistics.fmean(each[policy]) for each in ratios.values()]
        axes.bar(places, [height - 1 for height in heights], width * 0.92, bottom=1, color=_INKS[policy], label=policy)
        for place, each in zip(places, ratios.values(), strict=True):
            axes.plot([place] * 2, [min(each[policy]), max(each[policy])], color=_TEXT, linewidth=0.7)
        if policy in published:
            axes.axhline(published[policy], color=_INKS[policy], linewidth=1, linestyle=":")
            axes.text(
                len(ratios) - 0.45,
                published[policy],
                f"published: up to {published[policy]}",
                fontsize=7.5,
                ha="right",
                va="bottom",
                color=_INKS[policy],
            )
    kinds = {False: "for good", True: "back again"}
    axes.set_xticks(range(len(ratios)), [f"{interval}\n{kinds[returns]}" for interval, returns in ratios])
    axes.axhline(1, color=_TEXT, linewidth=0.8)
    axes.set_xlim(-0.55, len(ratios) - 0.45)
    low = min(min(values) for each in ratios.values() for values in each.values())
    high = max(max(values) for each in ratios.values() for values in each.values())
    axes.set_ylim(min(0.97, low - 0.02), max(1.42, high + 0.1))
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", ncols=len(baselines), labelcolor=_TEXT)
