"""Throughput over time, a row for each policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks._policies_observed import Observed

_FILL: Final = "#a6cee8"
_EDGE: Final = "#2b6a94"
_LOST: Final = "#a8430f"
_BACK: Final = "#1f8a70"
_TEXT: Final = "#1a1a1a"
_PALE: Final = "#666666"
_ROW: Final = 0.92  # inches
_TOP: Final = 0.84
_BOTTOM: Final = 0.5
_WIDTH: Final = 10.0
_LEFT: Final = 0.015  # of the width


def draw(
    path: Path, *, title: str, about: str, runs: Mapping[str, Observed], undisturbed_per_s: float, scale: float
) -> None:
    """Draw the throughput of each policy relative to failure-free throughput, in an SVG or PNG file.

    Args:
        undisturbed_per_s: samples per second of the wall clock before the first failure.
        scale: seconds of the wall clock per second of the time axis.
    """
    height = _TOP + _ROW * len(runs) + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height), dpi=130)
    ends = max(each.duration_s for each in runs.values()) / scale
    fastest = max((own.samples_per_s for each in runs.values() for own in each.stretches), default=0.0)
    top = max(1.3, 1.1 * fastest / undisturbed_per_s)
    for number, (policy, observed) in enumerate(runs.items()):
        bottom = 1 - (_TOP + _ROW * (number + 1) - 0.14) / height
        axes = figure.add_axes((0.16, bottom, 0.745, (_ROW - 0.22) / height))
        _row(axes, observed, undisturbed_per_s, scale)
        axes.set_ylim(0, top)
        axes.set_xlim(0, ends)
        last = number == len(runs) - 1
        axes.tick_params(labelbottom=last)
        if last:
            axes.set_xlabel("seconds of the emulated devices", fontsize=9, color=_TEXT)
        share = observed.samples_per_s / undisturbed_per_s
        middle = bottom + (_ROW - 0.22) / height / 2
        figure.text(_LEFT, middle, policy, va="center", fontsize=9, color=_TEXT)
        axes.text(1.015, 0.62, f"{share:.1%}", transform=axes.transAxes, va="center", fontsize=10, color=_TEXT)
        note = "ended early" if observed.ended else "on average"
        axes.text(1.015, 0.28, note, transform=axes.transAxes, va="center", fontsize=7, color=_PALE)
    _heading(
        figure,
        (title, about),
        height,
        returns=any(change.live > 0 for each in runs.values() for change in each.changes),
    )
    figure.savefig(path, facecolor="white", metadata={"Title": title})


def _row(axes: Axes, observed: Observed, undisturbed_per_s: float, scale: float) -> None:
    times, shares = [0.0], [0.0]
    for stretch in observed.stretches:
        share = stretch.samples_per_s / undisturbed_per_s
        times += [stretch.begin_s / scale] * 2 + [stretch.end_s / scale] * 2
        shares += [0.0, share, share, 0.0]
    axes.fill_between(times, shares, facecolor=_FILL, edgecolor=_EDGE, linewidth=0.5)
    axes.step(*_capacity(observed, scale), where="post", color=_TEXT, linewidth=0.9, linestyle=(0, (2, 2)))
    for change in observed.changes:
        lost = change.live < 0
        axes.plot(
            [change.at_s / scale],
            [0.95],
            marker="v" if lost else "^",
            markersize=5,
            color=_LOST if lost else _BACK,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
        if lost:
            axes.axvline(change.at_s / scale, color=_LOST, linewidth=0.7)
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.tick_params(labelsize=7, colors=_PALE, width=0.5, length=2)
    axes.grid(axis="y", color="#d8d8d8", linewidth=0.5)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_linewidth(0.5)


def _capacity(observed: Observed, scale: float) -> tuple[list[float], list[float]]:
    live = observed.workers
    times, shares = [0.0], [1.0]
    for change in observed.changes:
        live += change.live
        times.append(change.at_s / scale)
        shares.append(live / observed.workers)
    return [*times, observed.duration_s / scale], [*shares, shares[-1]]


def _heading(figure: Figure, title: tuple[str, str], height: float, *, returns: bool) -> None:
    for y, text, size, weight in ((0.2, title[0], 11, "bold"), (0.39, title[1], 9, "normal")):
        figure.text(_LEFT, 1 - y / height, text, size=size, weight=weight, color=_TEXT, va="center", parse_math=False)
    mark: dict[str, Any] = {"linestyle": "none", "markersize": 6}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=_FILL, edgecolor=_EDGE, label="throughput, by that without a failure"),
        Line2D([], [], color=_TEXT, linewidth=0.9, linestyle=(0, (2, 2)), label="live workers, by those of the start"),
        Line2D([], [], marker="v", color=_LOST, label="a worker is killed", **mark),
    ]
    if returns:
        handles.append(Line2D([], [], marker="^", color=_BACK, label="one is back", **mark))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(_LEFT, 1 - 0.54 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.6,
        labelcolor=_TEXT,
    )
