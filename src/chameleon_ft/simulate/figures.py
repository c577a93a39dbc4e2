"""Pictures of policies on a trace, and of sweeps. Imported only for one, because it loads matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from chameleon_ft.report.picture import fit_title
from chameleon_ft.simulate.account import ORACLE
from chameleon_ft.simulate.results import PolicyResult, Results, Throughput
from chameleon_ft.simulate.run import Sweep
from chameleon_ft.simulate.traces.trace import Trace

TEXT: Final = "#1a1a1a"
PALE: Final = "#666666"
LINE: Final = "#d0d0d0"
ORACLE_INK: Final = "#9a9a9a"
# Share of the width.
MARGIN: Final = 0.015
_TITLE_POINTS: Final = 10.5
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
    fitted, size = fit_title(title, width=(1 - 2 * MARGIN) * width * _POINTS_PER_INCH, size=_TITLE_POINTS)
    style: dict[str, Any] = {"va": "center", "fontsize": size, "weight": "bold", "color": TEXT, "linespacing": 1.1}
    figure.text(MARGIN, 1 - 0.2 / height, fitted, parse_math=False, **style)


_MISSING: Final = {
    "slower steps": "#a6cee8",
    "stalls": "#a8430f",
    "lost work": "#e8a33d",
    "checkpoints": "#3fb598",
    "too few workers": "#35195a",
}
_UNITS: Final = {"days": 86_400.0, "hours": 3_600.0, "minutes": 60.0}
# Inches.
_WIDTH: Final = 11.0
_TOP: Final = 0.84
_ROW: Final = 0.62
_GAP: Final = 0.17
_BOTTOM: Final = 0.56
# Shares of the width: left edge and width.
_CURVE: Final = (0.155, 0.505)
_SHARE: Final = 0.672
_BAR: Final = (0.742, 0.238)
_BINS: Final = 320
# Rows begin at zero if throughput falls below this share.
_ZOOM: Final = 0.6
_CURVE_INK: Final = "#2b6a94"
_LOST: Final = "#a8430f"


def binned(timeline: Sequence[Throughput], duration_s: float, bins: int) -> list[float]:
    """Return the mean samples per second in equal parts of the time; zero before the first record."""
    times_s = [*(each.time_s for each in timeline), duration_s]
    done = np.cumsum([0.0, *(np.diff(times_s) * [each.samples_per_s for each in timeline])])
    edges_s = np.linspace(0.0, duration_s, bins + 1)
    means: list[float] = (np.diff(np.interp(edges_s, times_s, done)) * bins / duration_s).tolist()
    return means


def live_workers(trace: Trace) -> tuple[list[float], list[int]]:
    """Return (times, live workers from then on), up to the end of the trace."""
    times, counts, live = [0.0], [trace.workers], trace.workers
    for time_s, events in trace.groups():
        live += sum({"lost": -1, "back": 1}.get(event.kind, 0) * len(event.workers) for event in events)
        times.append(time_s)
        counts.append(live)
    return [*times, trace.duration_s], [*counts, live]


def losses_s(trace: Trace) -> list[float]:
    """Return the times of losses, without workers that are absent from the start."""
    return [time_s for time_s, events in trace.groups() if time_s and any(event.kind == "lost" for event in events)]


def missing(own: PolicyResult) -> tuple[float, ...]:
    """Return the shares of the failure-free samples that a policy lacks, in the order of the legend.

    Time in which nothing was gained counts as at the failure-free rate; the rest is the slowness of steps.
    """
    shares = [seconds / own.duration_s for seconds in (own.stall_s, own.lost_s, own.checkpoint_s, own.down_s)]
    return max(0.0, 1.0 - own.share_of_failure_free - math.fsum(shares)), *shares


def figure_of_results(title: str, results: Results, trace: Trace) -> Figure:
    """Return the figure, which belongs to no window and to no global state."""
    shown = [name for name in results.ranking if name != ORACLE] or [ORACLE]
    figure = Figure(figsize=(_WIDTH, _TOP + _ROW * (len(shown) + 1) + _BOTTOM), dpi=130)
    unit, scale_s = next(
        ((unit, size_s) for unit, size_s in _UNITS.items() if trace.duration_s >= 3 * size_s), ("seconds", 1.0)
    )
    _draw_live_workers(_axes(figure, 0, _CURVE), trace, scale_s)
    _write(figure, 0, MARGIN, "live workers")
    oracle = results.policies.get(ORACLE)
    curves = {name: _curve(results.policies[name]) for name in shown}
    shadow = None if oracle is None or shown == [ORACLE] else _curve(oracle)
    low, high = _limits([*curves.values(), *([] if shadow is None else [shadow])])
    widest = max(sum(missing(results.policies[name])) for name in shown) or 0.01
    # Losses that lie on one point of the picture are one mark.
    points = sorted({round(_BINS * time_s / trace.duration_s) for time_s in losses_s(trace)})
    losses = [point / _BINS * trace.duration_s / scale_s for point in points]
    for number, name in enumerate(shown, start=1):
        last = number == len(shown)
        axes = _axes(figure, number, _CURVE)
        _draw_throughput(axes, curves[name], shadow, trace.duration_s / scale_s)
        axes.set_ylim(low, high)
        axes.set_yticks([low, 1.0])
        marks = Line2D(losses, [0.0] * len(losses), color=_LOST, marker="|", markersize=4, markeredgewidth=0.5)
        marks.set(linestyle="none", clip_on=False, transform=axes.get_xaxis_transform())
        axes.add_line(marks)
        axes.tick_params(labelbottom=last)
        if last:
            axes.set_xlabel(f"time ({unit})", fontsize=8.5, color=TEXT)
        own = results.policies[name]
        _write(figure, number, MARGIN, name)
        _write(figure, number, _SHARE, f"{own.share_of_failure_free:.2%}")
        _draw_bar(_axes(figure, number, _BAR), own, widest, last=last)
    _draw_heading(figure, title, oracle=shadow is not None)
    return figure


def _axes(figure: Figure, row: int, across: tuple[float, float]) -> Axes:
    left, width = across
    height = figure.get_size_inches()[1]
    bottom = height - _TOP - _ROW * (row + 1) + _GAP / 2
    axes = figure.add_axes((left, bottom / height, width, (_ROW - _GAP) / height))
    set_axes_style(axes, label_size=7)
    return axes


def _write(figure: Figure, row: int, left: float, text: str) -> None:
    height = figure.get_size_inches()[1]
    weight = "bold" if text == "chameleon" else "normal"
    middle = float((height - _TOP - _ROW * (row + 0.5)) / height)
    figure.text(left, middle, text, va="center", fontsize=9, color=TEXT, weight=weight)


def _curve(own: PolicyResult) -> list[float]:
    """Return the throughput over time as a share of the failure-free one."""
    failure_free = own.failure_free_samples / own.duration_s
    return [rate / failure_free for rate in binned(own.timeline, own.duration_s, _BINS)]


def _limits(curves: list[list[float]]) -> tuple[float, float]:
    """Return the limits of all rows: from zero, unless everything is far above it."""
    least = min(min(curve) for curve in curves)
    most = max(max(curve) for curve in curves)
    if least < _ZOOM:
        return 0.0, max(1.0, most) * 1.04
    low = _below(least, 0.1 if least < 0.9 else 0.05)
    return low, most + 0.06 * (most - low)


def _below(least: float, step: float) -> float:
    """Return the next lower multiple of `step`: an axis that begins at `least` itself would lie on the curve."""
    return step * (math.ceil(least / step) - 1)


def _draw_live_workers(axes: Axes, trace: Trace, scale_s: float) -> None:
    times, counts = live_workers(trace)
    shares = [count / trace.workers for count in counts]
    axes.step([time_s / scale_s for time_s in times], shares, where="post", color=TEXT, linewidth=0.8)
    axes.set_xlim(0, trace.duration_s / scale_s)
    low = 0.0 if min(shares) < _ZOOM else _below(min(shares), 0.05)
    axes.set_ylim(low, 1.015)
    axes.set_yticks([low, 1.0])
    axes.yaxis.set_major_formatter(_percent)
    axes.tick_params(labelbottom=False)


def _draw_throughput(axes: Axes, curve: list[float], shadow: list[float] | None, end: float) -> None:
    middles = [end * (index + 0.5) / len(curve) for index in range(len(curve))]
    if shadow is not None:
        axes.plot(middles, shadow, color=ORACLE_INK, linewidth=0.8)
    axes.plot(middles, curve, color=_CURVE_INK, linewidth=0.9)
    axes.set_xlim(0, end)
    axes.yaxis.set_major_formatter(_percent)


def _percent(value: float, _: float) -> str:
    return f"{value:.0%}"


def _draw_bar(axes: Axes, own: PolicyResult, widest: float, *, last: bool) -> None:
    left = 0.0
    for share, fill in zip(missing(own), _MISSING.values(), strict=True):
        axes.barh(0, share, left=left, height=0.6, color=fill, linewidth=0)
        left += share
    axes.set_xlim(0, widest * 1.02)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.tick_params(labelbottom=last)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}" if widest < 0.04 else f"{value:.0%}")
    if last:
        axes.set_xlabel("short of failure-free", fontsize=8.5, color=TEXT)


def _draw_heading(figure: Figure, title: str, *, oracle: bool) -> None:
    height = figure.get_size_inches()[1]
    draw_title(figure, title)
    curves = [Line2D([], [], color=_CURVE_INK, linewidth=1.2, label="throughput, of failure-free")]
    if oracle:
        curves.append(Line2D([], [], color=ORACLE_INK, linewidth=1.2, label="the oracle's"))
    curves.append(Line2D([], [], color=_LOST, marker="|", markersize=6, linestyle="none", label="workers lost"))
    bars = [Patch(facecolor=fill, label=name) for name, fill in _MISSING.items()]
    legends: list[tuple[Sequence[Line2D | Patch], float, int]] = [(curves, _CURVE[0], 3), (bars, _BAR[0], 2)]
    for handles, left, columns in legends:
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
    figure.text(_SHARE, 1 - 0.52 / height, "samples,\nof failure-\nfree", va="center", fontsize=7.5, color=PALE)


_SIZE_INCHES: Final = (11.0, 4.6)
_PANELS: Final = ((0.07, 0.12, 0.315, 0.735), (0.56, 0.12, 0.315, 0.735))
# The smallest gap that differs from none.
_LEAST: Final = 1e-5
# Share of a panel's height.
_LABEL_GAP: Final = 0.05
_NAMES: Final = {
    "rate": "failures, times those of the trace",
    "workers": "workers",
    "memory": "memory of a worker (GB)",
    "bandwidth": "bandwidth, times that of the links",
    "micro-batches": "micro-batches of a step",
}


def figure_of_sweep(title: str, sweep: Sweep) -> Figure:
    """Return the figure, which belongs to no window and to no global state; at least one point has results."""
    figure = Figure(figsize=_SIZE_INCHES, dpi=130)
    draw_title(figure, title)
    left, right = (figure.add_axes(panel) for panel in _PANELS)
    if sweep.name == "workers":
        _draw_panel(left, sweep, sweep.policies, "samples per second and worker", lambda own: own.goodput / own.workers)
    else:
        _draw_panel(left, sweep, sweep.policies, "samples per second", lambda own: own.goodput)
    policies = [policy for policy in sweep.policies if policy != ORACLE] or sweep.policies
    bounded = ORACLE in sweep.policies

    def gap(own: PolicyResult) -> float:
        return max(_LEAST, 1 - (own.share_of_oracle if bounded else own.share_of_failure_free))

    right.set_yscale("log")
    bound = "the oracle" if bounded else "failure-free"
    _draw_panel(right, sweep, policies, f"short of {bound}, lower is better", gap)
    right.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    return figure


def _draw_panel(
    axes: Axes, sweep: Sweep, policies: Sequence[str], name: str, value_of: Callable[[PolicyResult], float]
) -> None:
    found = [(point.value, point.results.policies) for point in sweep.points if point.results is not None]
    values = [value for value, _ in found]
    log = values[-1] > 5 * values[0]
    if log:
        axes.set_xscale("log")
    ends: list[tuple[float, str]] = []
    for policy in policies:
        ink = ink_of(policy)
        series = [value_of(by_policy[policy]) for _, by_policy in found]
        style = (0, (3, 2)) if policy == ORACLE else "-"
        axes.plot(
            values, series, color=ink.colour, marker=ink.marker, markersize=4, linewidth=ink.width, linestyle=style
        )
        ends.append((series[-1], policy))
    axes.set_title(name, fontsize=9, color=TEXT, loc="left")
    axes.set_xlabel(_NAMES[sweep.name], fontsize=8.5, color=TEXT)
    # On a logarithmic axis only the values that there is room for.
    ticks = values[:1]
    for value in values[1:]:
        if not log or len(values) < 3 or value > ticks[-1] * (values[-1] / values[0]) ** 0.06:
            ticks.append(value)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color=LINE, linewidth=0.5)
    set_axes_style(axes, label_size=7.5)
    _draw_labels(axes, values[-1], ends)


def _draw_labels(axes: Axes, last: float, ends: Sequence[tuple[float, str]]) -> None:
    """Write the policies beside the ends of their lines, apart from each other, and joined to them."""
    # Without this call it is only done when drawn.
    axes.autoscale_view()
    to_share = axes.transData + axes.transAxes.inverted()
    heights = sorted((float(to_share.transform((last, value))[1]), policy) for value, policy in ends)
    for (end, policy), height in zip(heights, _spread([end for end, _ in heights]), strict=True):
        ink = ink_of(policy)
        axes.annotate(
            policy,
            xy=(float(to_share.transform((last, 1.0))[0]) + 0.012, end),
            xytext=(1.06, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=8,
            color=PALE if ink.colour == ORACLE_INK else ink.colour,
            weight="bold" if policy == "chameleon" else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": LINE, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
        )


def _spread(heights: Sequence[float]) -> list[float]:
    """Return rising heights at least `_LABEL_GAP` apart and near the given ones: groups about their mean height."""

    def spread(group: Sequence[float]) -> list[float]:
        low = sum(group) / len(group) - _LABEL_GAP * (len(group) - 1) / 2
        return [low + _LABEL_GAP * index for index in range(len(group))]

    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and spread(groups[-2])[-1] + _LABEL_GAP > spread(groups[-1])[0]:
            groups[-2:] = [[*groups[-2], *groups[-1]]]
    return list(itertools.chain.from_iterable(map(spread, groups)))
