"""Sweeps as pictures. Imported only when one is asked for, because it loads matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from chameleon_ft.simulate.accounting.results import PolicyResult
from chameleon_ft.simulate.pictures.style import LINE, ORACLE_INK, PALE, TEXT, draw_title, ink_of
from chameleon_ft.simulate.run import ORACLE
from chameleon_ft.simulate.sweep import Sweep

__all__ = ["figure_of_sweep"]

_SIZE: Final = (11.0, 4.6)  # inches
_PANELS: Final = ((0.07, 0.12, 0.315, 0.735), (0.56, 0.12, 0.315, 0.735))
_LEAST: Final = 1e-5  # of what is missing, that is told from nothing
_LABEL_GAP: Final = 0.05  # of a panel's height
_NAMES: Final = {
    "rate": "failures, times those of the trace",
    "workers": "workers",
    "memory": "memory of a worker (GB)",
    "bandwidth": "bandwidth, times that of the links",
    "micro-batches": "micro-batches of a step",
}


def figure_of_sweep(title: str, sweep: Sweep) -> Figure:
    """The figure, which belongs to no window and to no global state; at least one point has results."""
    figure = Figure(figsize=_SIZE, dpi=130)
    draw_title(figure, title)
    left, right = (figure.add_axes(panel) for panel in _PANELS)
    if sweep.name == "workers":
        _panel(left, sweep, sweep.policies, "samples per second and worker", lambda own: own.goodput / own.workers)
    else:
        _panel(left, sweep, sweep.policies, "samples per second", lambda own: own.goodput)
    policies = [policy for policy in sweep.policies if policy != ORACLE]
    bounded = ORACLE in sweep.policies
    name = "missing to the oracle, the less the better" if bounded else "missing to failure-free, the less the better"
    right.set_yscale("log")
    _panel(right, sweep, policies or sweep.policies, name, _missing_to_oracle if bounded else _missing_to_free)
    right.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    return figure


def _missing_to_oracle(own: PolicyResult) -> float:
    return max(_LEAST, 1 - own.share_of_oracle)


def _missing_to_free(own: PolicyResult) -> float:
    return max(_LEAST, 1 - own.share_of_failure_free)


def _panel(
    axes: Axes, sweep: Sweep, policies: Sequence[str], name: str, value_of: Callable[[PolicyResult], float]
) -> None:
    found = [(point.value, point.results.policies) for point in sweep.points if point.results is not None]
    values = [value for value, _ in found]
    if values[-1] > 5 * values[0]:
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
    axes.xaxis.set_major_locator(FixedLocator(_ticks(values, log=axes.get_xscale() == "log")))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color=LINE, linewidth=0.5)
    axes.tick_params(colors=PALE, labelsize=7.5, width=0.5, length=2.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)
    _labels(axes, values[-1], ends)


def _ticks(values: Sequence[float], *, log: bool) -> list[float]:
    """The values, as far as there is room to write them."""
    if len(values) < 3 or not log:
        return list(values)
    kept = [values[0]]
    for value in values[1:]:
        if value > kept[-1] * (values[-1] / values[0]) ** 0.06:
            kept.append(value)
    return kept


def _labels(axes: Axes, last: float, ends: Sequence[tuple[float, str]]) -> None:
    """The policies beside the ends of their lines, apart from each other, and joined to them."""
    axes.autoscale_view()  # else only done when drawn
    to_share = axes.transData + axes.transAxes.inverted()
    heights = sorted((float(to_share.transform((last, value))[1]), policy) for value, policy in ends)
    for (end, policy), height in zip(heights, _apart([end for end, _ in heights]), strict=True):
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


def _apart(heights: Sequence[float]) -> list[float]:
    """Rising heights at least `_LABEL_GAP` apart and near where they were."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _span(groups[-2])[1] + _LABEL_GAP > _span(groups[-1])[0]:
            groups[-2:] = [[*groups[-2], *groups[-1]]]
    return list(itertools.chain.from_iterable(_spread(group) for group in groups))


def _spread(group: Sequence[float]) -> list[float]:
    low, _ = _span(group)
    return [low + _LABEL_GAP * index for index in range(len(group))]


def _span(group: Sequence[float]) -> tuple[float, float]:
    """Where the lowest and the highest label of a group stand: round the middle of its heights."""
    reach = _LABEL_GAP * (len(group) - 1)
    low = sum(group) / len(group) - reach / 2
    return low, low + reach
