"""Pictures of sweeps. Imported only when one is asked for, because it loads matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from chameleon_ft.simulate.accounting.oracle import ORACLE
from chameleon_ft.simulate.accounting.results import PolicyResult
from chameleon_ft.simulate.pictures.style import LINE, ORACLE_INK, PALE, TEXT, draw_title, ink_of, set_axes_style
from chameleon_ft.simulate.sweep import Sweep

_SIZE: Final = (11.0, 4.6)  # inches
_PANELS: Final = ((0.07, 0.12, 0.315, 0.735), (0.56, 0.12, 0.315, 0.735))
_LEAST: Final = 1e-5  # smallest gap that differs from none
_LABEL_GAP: Final = 0.05  # of a panel's height
_NAMES: Final = {
    "rate": "failures, times those of the trace",
    "workers": "workers",
    "memory": "memory of a worker (GB)",
    "bandwidth": "bandwidth, times that of the links",
    "micro-batches": "micro-batches of a step",
}


def figure_of_sweep(title: str, sweep: Sweep) -> Figure:
    """Return the figure, which belongs to no window and to no global state; at least one point has results."""
    figure = Figure(figsize=_SIZE, dpi=130)
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
    axes.autoscale_view()  # else only done when drawn
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
