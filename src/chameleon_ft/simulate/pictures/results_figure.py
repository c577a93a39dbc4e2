"""Policies on a trace as a picture. Imported only when one is asked for, because it loads matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from chameleon_ft.simulate.accounting.results import PolicyResult, Results
from chameleon_ft.simulate.pictures.series import MISSING, binned, live_workers, losses_s, missing
from chameleon_ft.simulate.pictures.style import LINE, MARGIN, MISSING_FILLS, ORACLE_INK, PALE, TEXT, draw_title
from chameleon_ft.simulate.run import ORACLE
from chameleon_ft.simulate.traces.trace import Trace

__all__ = ["figure_of_results"]

_WIDTH: Final = 11.0  # inches
_TOP: Final = 0.84
_ROW: Final = 0.62
_GAP: Final = 0.17
_BOTTOM: Final = 0.56
_CURVE: Final = (0.155, 0.505)
_SHARE: Final = 0.672
_BAR: Final = (0.742, 0.238)
_BINS: Final = 320
_ZOOM: Final = 0.6  # rows begin at zero where throughput falls below this
_CURVE_INK: Final = "#2b6a94"
_LOST: Final = "#a8430f"


def figure_of_results(title: str, results: Results, trace: Trace) -> Figure:
    """The figure, which belongs to no window and to no global state."""
    shown = [name for name in results.ranking if name != ORACLE] or [ORACLE]
    figure = Figure(figsize=(_WIDTH, _TOP + _ROW * (len(shown) + 1) + _BOTTOM), dpi=130)
    unit, scale_s = _time_unit(trace.duration_s)
    _live_row(_axes(figure, 0, _CURVE), trace, scale_s)
    _row_name(figure, 0, "live workers")
    oracle = results.policies.get(ORACLE)
    curves = {name: _curve(results.policies[name]) for name in shown}
    shadow = None if oracle is None or shown == [ORACLE] else _curve(oracle)
    low, high = _limits([*curves.values(), *([] if shadow is None else [shadow])])
    widest = max(sum(missing(results.policies[name])) for name in shown) or 0.01
    # Several losses that a point of the picture shows are one mark.
    points = sorted({round(_BINS * time_s / trace.duration_s) for time_s in losses_s(trace)})
    losses = [point / _BINS * trace.duration_s / scale_s for point in points]
    for number, name in enumerate(shown, start=1):
        last = number == len(shown)
        axes = _axes(figure, number, _CURVE)
        _throughput(axes, curves[name], shadow, trace.duration_s / scale_s)
        axes.set_ylim(low, high)
        axes.set_yticks([low, 1.0])
        axes.plot(
            losses,
            [0.0] * len(losses),
            "|",
            color=_LOST,
            markersize=4,
            markeredgewidth=0.5,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
        )
        axes.tick_params(labelbottom=last)
        _row_name(figure, number, name)
        _share(figure, number, results.policies[name])
        _bar(_axes(figure, number, _BAR), results.policies[name], widest, last=last)
        if last:
            axes.set_xlabel(f"time ({unit})", fontsize=8.5, color=TEXT)
    _heading(figure, title, oracle=shadow is not None)
    return figure


def _axes(figure: Figure, row: int, across: tuple[float, float]) -> Axes:
    height = figure.get_size_inches()[1]
    bottom = height - _TOP - _ROW * (row + 1) + _GAP / 2
    axes = figure.add_axes((across[0], bottom / height, across[1], (_ROW - _GAP) / height))
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(LINE)
    axes.tick_params(colors=PALE, labelsize=7, width=0.5, length=2.5)
    return axes


def _middle(figure: Figure, row: int) -> float:
    height = figure.get_size_inches()[1]
    return float((height - _TOP - _ROW * (row + 0.5)) / height)


def _row_name(figure: Figure, row: int, name: str) -> None:
    weight = "bold" if name == "chameleon" else "normal"
    figure.text(MARGIN, _middle(figure, row), name, va="center", fontsize=9, color=TEXT, weight=weight)


def _share(figure: Figure, row: int, own: PolicyResult) -> None:
    figure.text(_SHARE, _middle(figure, row), f"{own.share_of_failure_free:.2%}", va="center", fontsize=9, color=TEXT)


def _time_unit(duration_s: float) -> tuple[str, float]:
    for unit, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if duration_s >= 3 * size:
            return unit, size
    return "seconds", 1.0


def _curve(own: PolicyResult) -> list[float]:
    failure_free = own.failure_free_samples / own.duration_s
    return [rate / failure_free for rate in binned(own.timeline, own.duration_s, _BINS)]


def _limits(curves: list[list[float]]) -> tuple[float, float]:
    """Of all rows alike: from zero, unless everything is far above it."""
    least = min(min(curve) for curve in curves)
    most = max(max(curve) for curve in curves)
    if least < _ZOOM:
        return 0.0, max(1.0, most) * 1.04
    low = _below(least, 0.1 if least < 0.9 else 0.05)
    return low, most + 0.06 * (most - low)


def _below(least: float, step: float) -> float:
    """The next lower multiple of `step`: an axis that begins at `least` itself would lie on the curve."""
    return step * (math.ceil(least / step) - 1)


def _live_row(axes: Axes, trace: Trace, scale_s: float) -> None:
    times, counts = live_workers(trace)
    shares = [count / trace.workers for count in counts]
    axes.step([time_s / scale_s for time_s in times], shares, where="post", color=TEXT, linewidth=0.8)
    axes.set_xlim(0, trace.duration_s / scale_s)
    least = min(shares)
    axes.set_ylim(0 if least < _ZOOM else _below(least, 0.05), 1.015)
    axes.set_yticks([axes.get_ylim()[0], 1.0])
    axes.yaxis.set_major_formatter(_percent)
    axes.tick_params(labelbottom=False)


def _throughput(axes: Axes, curve: list[float], shadow: list[float] | None, end: float) -> None:
    middles = [end * (index + 0.5) / len(curve) for index in range(len(curve))]
    if shadow is not None:
        axes.plot(middles, shadow, color=ORACLE_INK, linewidth=0.8)
    axes.plot(middles, curve, color=_CURVE_INK, linewidth=0.9)
    axes.set_xlim(0, end)
    axes.yaxis.set_major_formatter(_percent)


def _percent(value: float, _: float) -> str:
    return f"{value:.0%}"


def _bar(axes: Axes, own: PolicyResult, widest: float, *, last: bool) -> None:
    left = 0.0
    for share, fill in zip(missing(own), MISSING_FILLS, strict=True):
        axes.barh(0, share, left=left, height=0.6, color=fill, linewidth=0)
        left += share
    axes.set_xlim(0, widest * 1.02)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.tick_params(labelbottom=last)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}" if widest < 0.04 else f"{value:.0%}")
    if last:
        axes.set_xlabel("missing to failure-free", fontsize=8.5, color=TEXT)


def _heading(figure: Figure, title: str, *, oracle: bool) -> None:
    height = figure.get_size_inches()[1]
    draw_title(figure, title)
    curves = [Line2D([], [], color=_CURVE_INK, linewidth=1.2, label="throughput, of failure-free")]
    if oracle:
        curves.append(Line2D([], [], color=ORACLE_INK, linewidth=1.2, label="the oracle's"))
    marker = Line2D([], [], color=_LOST, marker="|", markersize=6, linestyle="none", label="workers lost")
    bars = [Patch(facecolor=fill, label=name) for name, fill in zip(MISSING, MISSING_FILLS, strict=True)]
    _legend(figure, [*curves, marker], left=_CURVE[0], columns=3)
    _legend(figure, bars, left=_BAR[0], columns=2)
    figure.text(_SHARE, 1 - 0.52 / height, "samples,\nof failure-\nfree", va="center", fontsize=7.5, color=PALE)


def _legend(figure: Figure, handles: Sequence[Line2D | Patch], *, left: float, columns: int) -> None:
    height = figure.get_size_inches()[1]
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(left, 1 - 0.36 / height),
        ncols=columns,
        frameon=False,
        fontsize=7.5,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.4,
        labelspacing=0.3,
        columnspacing=1.2,
        labelcolor=TEXT,
    )
