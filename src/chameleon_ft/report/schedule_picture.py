"""Schedules as pictures; importing this module loads matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from chameleon_ft.plan import Plan
from chameleon_ft.plan.layouts import detoured_hops
from chameleon_ft.quantities import duration, in_ranges
from chameleon_ft.report.picture import Lane, fit_title, require_picture, save_picture
from chameleon_ft.schedule import Operation, OperationKind


class _Style(NamedTuple):
    """Colours of a kind of boxes, distinct for colour-blind readers, and in grey by their lightness."""

    name: str
    fill: str
    ink: str


KIND_STYLES: Final = {
    OperationKind.FORWARD: _Style("forward", "#a6cee8", "#10202c"),
    OperationKind.BACKWARD: _Style("backward", "#a8430f", "#ffffff"),
    OperationKind.INPUT_GRAD: _Style("backward, input gradient", "#a8430f", "#ffffff"),
    OperationKind.WEIGHT_GRAD: _Style("backward, weight gradient", "#3fb598", "#06231c"),
}
_REDUCTION: Final = _Style("gradient all-reduce", "#35195a", "#ffffff")
_IDLE: Final = "#fff1c9"
_TEXT: Final = "#1a1a1a"
_PALE_TEXT: Final = "#666666"
_LINE: Final = "#b0b0b0"
_DETOUR: Final[dict[str, Any]] = {"edgecolor": "#000000", "hatch": "////", "linewidth": 0.9}
_LOST: Final[dict[str, Any]] = {"facecolor": "#ececec", "edgecolor": _PALE_TEXT, "linewidth": 0.6, "linestyle": "--"}
_NOTES: Final = {
    "busy": "Numbers are those of micro-batches; busy is the share of the time until the last operation has ended in "
    "which a worker computes.",
    "detour": "A detour is an operation for a micro-batch of another pipeline, one that has lost the worker for it.",
    "split": "A stage that begins at layer 0 has no input gradient to make: its W is the whole backward.",
}

# Lengths in points (1/72 inch). With few workers strips are high; with many the chart is long, so that numbers fit.
_POINTS_PER_INCH: Final = 72.0
_STRIPS_HEIGHT: Final = 620.0
_STRIP_HEIGHTS: Final = (13.0, 30.0)
_WIDTHS: Final = (880.0, 1900.0)
_BOX_WIDTH: Final = 8.0
_BOX_DIGIT: Final = 4.0
_WORKER_GAP: Final = 6.0
_LANE_GAP: Final = 1.5
_PIPELINE_GAP: Final = 15.0
_EDGE: Final = 6.0
_REDUCTION_SHARE: Final = 0.22
_TICK_WIDTH: Final = 70.0
_RIGHT: Final = 44.0
_BOTTOM: Final = 76.0
_MARGIN: Final = 10.0
_TITLE_SIZE: Final = 13.0
_NUMBER_SIZES: Final = (4.0, 8.0)
# The widths of a digit and of a bold letter, at most, over the font size.
_DIGIT_WIDTH: Final = 0.64
_LETTER_WIDTH: Final = 0.7


@dataclass(frozen=True, slots=True)
class _Row:
    """The row of a worker: strips that begin at `tops`, one for each timeline, or an empty one if it is lost.

    `layers` describes the layers that it holds, and is empty for a lost worker.
    """

    pipeline: str
    worker: int
    layers: str
    tops: tuple[float, ...]
    bottom: float


class _OperationBox(NamedTuple):
    """The box of an operation: left and right in seconds, top and bottom in points."""

    left: float
    right: float
    top: float
    bottom: float
    operation: Operation
    is_detour: bool


_Sides: TypeAlias = tuple[float, float, float, float]


def draw_schedule(
    path: Path,
    *,
    title: str,
    plan: Plan,
    pipelines: Sequence[Sequence[int]],
    lanes: Sequence[Lane],
    lost: Collection[int] = (),
) -> None:
    """Draw one or several timelines of a step: workers down, time across, each worker's timelines in one row.

    Boxes are operations, coloured by kind, hatched for detours, and numbered by micro-batch if there is room. Gaps
    between them are idle time. Gradient reductions, which overlap with operations, are along the lower edge of a row.
    The percentage of a row is the share of the time until the end of the last operation in which its worker computes.

    Args:
        path: file to write or replace, with the suffix .svg, .png or .pdf.
        title: one line.
        plan: plan of the step.
        pipelines: the workers of each pipeline by stage, before any failure. They group the rows, and tell lost workers
            and detours (see `detoured_hops`).
        lanes: timelines of this plan, at least one.
        lost: workers lost before the plan was made, which may be in no pipeline after a re-partition.

    Raises:
        ConfigError: another suffix, matplotlib is not installed, or the file cannot be written.
        PlanError: a worker is in two pipelines.
    """
    require_picture(path)
    save_picture(_Drawing(title, plan, pipelines, lanes, lost).figure, path, title=title)


class _Drawing:
    """A figure with one chart (x in a unit of time, y in points downwards), its title, legend and notes.

    The arguments are those of `draw_schedule`. The figure belongs to no window and to no global state.
    """

    def __init__(
        self,
        title: str,
        plan: Plan,
        pipelines: Sequence[Sequence[int]],
        lanes: Sequence[Lane],
        lost: Collection[int],
    ) -> None:
        self._lanes = lanes
        self._arrange(plan, pipelines, lost)
        self._live_rows = [row for row in self._rows if row.layers]
        self._reductions = [[each for each in lane.reductions if each.end_s > each.start_s] for lane in lanes]
        self._operation_height = self._strip_height * (1 - _REDUCTION_SHARE if any(self._reductions) else 1)
        self._longest_s = max(lane.step_s for lane in lanes) or 1.0
        units = (("s", 1.0), ("ms", 1e3))
        self._unit, self._scale = next((unit for unit in units if self._longest_s * unit[1] >= 1), ("µs", 1e6))
        self._operations = list(self._operation_boxes(detoured_hops(plan, pipelines)))
        self._make_figure()
        self._draw_strips()
        self._draw_operations()
        self._draw_reductions()
        self._draw_numbers()
        self._draw_labels()
        self._draw_heading(title)

    def _arrange(self, plan: Plan, pipelines: Sequence[Sequence[int]], lost: Collection[int]) -> None:
        """Give every worker a row, pipeline by pipeline, then the workers in no pipeline; derive the chart's size."""
        named = [(f"pipeline {number}", tuple(workers)) for number, workers in enumerate(pipelines)]
        others = tuple(sorted({*plan.workers, *lost}.difference(*pipelines)))
        groups = [*named, ("no pipeline" if named else "", others)]
        live = set(plan.workers)
        strips = sum(len(self._lanes) if worker in live else 1 for _, workers in groups for worker in workers)
        self._strip_height = float(np.clip(_STRIPS_HEIGHT / strips, *_STRIP_HEIGHTS))
        self._rows: list[_Row] = []
        top = _EDGE
        for name, workers in groups:
            for worker in workers:
                count = len(self._lanes) if worker in live else 1
                tops = tuple(top + index * (self._strip_height + _LANE_GAP) for index in range(count))
                held = plan.placement.layers_of(worker)
                layers = f"layer{'' if len(held) == 1 else 's'} {in_ranges(held)}" if worker in live else ""
                self._rows.append(_Row(name, worker, layers, tops, tops[-1] + self._strip_height))
                top = self._rows[-1].bottom + _WORKER_GAP
            top += _PIPELINE_GAP - _WORKER_GAP if workers else 0
        self._height = self._rows[-1].bottom + _EDGE
        most = max((len(own) for lane in self._lanes for own in lane.operations().values()), default=0)
        box_width = _BOX_WIDTH + _BOX_DIGIT * len(str(plan.micro_batches - 1))
        self._width = float(np.clip(most * box_width, *_WIDTHS))

    def _operation_boxes(self, detours: frozenset[tuple[int, int]]) -> Iterator[_OperationBox]:
        """Yield the operations that take any time."""
        for index, lane in enumerate(self._lanes):
            operations = lane.operations()
            for row in self._live_rows:
                top, bottom = row.tops[index], row.tops[index] + self._operation_height
                for _, operation, start_s, end_s in operations.get(row.worker, ()):
                    if end_s > start_s:
                        is_detour = (operation.micro_batch, operation.hop) in detours
                        yield _OperationBox(start_s, end_s, top, bottom, operation, is_detour)

    def _make_figure(self) -> None:
        self._left = 92.0 if len(self._lanes) == 1 else 138.0
        self._top = 70.0 + 14.0 * len(self._lanes)
        self._page = self._left + self._width + _RIGHT, self._top + self._height + _BOTTOM
        width, height = self._page
        self.figure = Figure(figsize=(width / _POINTS_PER_INCH, height / _POINTS_PER_INCH), dpi=150)
        axes = self.figure.add_axes((self._left / width, _BOTTOM / height, self._width / width, self._height / height))
        axes.set_xlim(0, self._longest_s * self._scale)
        axes.set_ylim(self._height, 0)
        axes.set_yticks([])
        axes.set_axisbelow(True)
        axes.locator_params(axis="x", nbins=round(self._width / _TICK_WIDTH))
        axes.grid(axis="x", color=_LINE, linewidth=0.5)
        axes.tick_params(axis="x", top=True, labeltop=True, colors=_TEXT, labelsize=8, width=0.6)
        axes.set_xlabel(f"time since the start of the step ({self._unit})", fontsize=9, color=_TEXT)
        for spine in axes.spines.values():
            spine.set_visible(False)
        self._axes = axes

    def _draw_strips(self) -> None:
        """Fill the background, which stays visible as idle time and as the rows of lost workers."""
        height = self._strip_height
        strips = [(lane, row.tops[index]) for index, lane in enumerate(self._lanes) for row in self._live_rows]
        steps = [(0.0, lane.step_s, top, top + height) for lane, top in strips]
        idle = [(0.0, lane.program_s, top, top + self._operation_height) for lane, top in strips]
        lost = [(0.0, self._longest_s, row.tops[0], row.bottom) for row in self._rows if not row.layers]
        self._fill("step", steps, facecolor="white", edgecolor=_LINE, linewidth=0.8)
        self._fill("idle", idle, facecolor=_IDLE, edgecolor="none")
        self._fill("lost", lost, **_LOST)

    def _draw_operations(self) -> None:
        """Fill the boxes, detours last, so that no neighbour covers their outlines."""
        plain, detours = ("", {"edgecolor": "white", "linewidth": 0.4}), (", detour", _DETOUR)
        for suffix, edges in (plain, detours):
            for kind, style in KIND_STYLES.items():
                found = (each for each in self._operations if each.operation.kind is kind)
                boxes = [each[:4] for each in found if each.is_detour == bool(suffix)]
                self._fill(style.name + suffix, boxes, facecolor=style.fill, **edges)

    def _draw_reductions(self) -> None:
        rows = {row.worker: row for row in self._live_rows}
        boxes = []
        for index, reductions in enumerate(self._reductions):
            for each in reductions:
                top = rows[each.worker].tops[index]
                boxes.append((each.start_s, each.end_s, top + self._operation_height, top + self._strip_height))
        self._fill(_REDUCTION.name, boxes, facecolor=_REDUCTION.fill, edgecolor="white", linewidth=0.4)

    def _fill(self, name: str, boxes: Sequence[_Sides], **style: Any) -> None:
        """Draw all boxes of a name as one collection, because there may be thousands."""
        if not boxes:
            return
        sides = np.array(boxes) * (self._scale, self._scale, 1, 1)
        collection = PolyCollection(list(sides[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]), clip_on=False, **style)
        collection.set_gid(name.replace(",", "").replace(" ", "-"))  # the id of the group in SVG
        self._axes.add_collection(collection, autolim=False)

    def _draw_numbers(self) -> None:
        """Write the micro-batches into the boxes that have room, most of them in one size."""
        points_per_s = self._width / self._longest_s
        texts = [str(each.operation.micro_batch) for each in self._operations]
        fitting = [
            ((each.right - each.left) * points_per_s - 1.5) / (_DIGIT_WIDTH * len(text))
            for each, text in zip(self._operations, texts, strict=True)
        ]
        least, most = _NUMBER_SIZES
        usual = min(most, 0.72 * self._operation_height, max(least, statistics.median(fitting or [least])))
        for each, text, size in zip(self._operations, texts, fitting, strict=True):
            if size >= least:
                style = KIND_STYLES[each.operation.kind]
                # Not by the axes, which would clip each of thousands, and take twice as long.
                self.figure.text(
                    (each.left + each.right) / 2 * self._scale,
                    (each.top + each.bottom) / 2,
                    text,
                    size=min(usual, size),
                    color=style.ink,
                    ha="center",
                    va="center_baseline",
                    parse_math=False,
                    transform=self._axes.transData,
                    # No hatching behind the number of a detour.
                    bbox={"facecolor": style.fill, "edgecolor": "none", "pad": 0.5} if each.is_detour else None,
                )

    def _draw_labels(self) -> None:
        """Write the names of workers, pipelines and timelines on the left, and the busy shares on the right."""
        busy = [lane.busy() for lane in self._lanes]
        self._label(self._width + 8, -8, "busy", size=8, color=_PALE_TEXT)
        for name, group in groupby(self._rows, key=lambda row: row.pipeline):
            rows = list(group)
            top, bottom = rows[0].tops[0], rows[-1].bottom
            size = min(8.5, (bottom - top) / (_LETTER_WIDTH * len(name))) if name else 0.0
            if size >= _NUMBER_SIZES[0]:  # a pipeline of one low row has no room
                middle = (top + bottom) / 2
                self._label(10 - self._left, middle, name, size=size, rotation=90, ha="center", weight="bold")
            self._axes.plot(
                [(18 - self._left) / self._width] * 2,
                [top, bottom],
                color=_PALE_TEXT,
                linewidth=1.2,
                transform=self._axes.get_yaxis_transform(),
                clip_on=False,
            )
            for row in rows:
                self._label_worker(row)
                for index, top in enumerate(row.tops if row.layers else ()):
                    middle = top + self._operation_height / 2
                    self._label(self._width + 8, middle, f"{busy[index].get(row.worker, 0.0):.0%}", size=8)
                    if len(self._lanes) > 1:
                        self._label(-6, middle, self._lanes[index].name, size=6.5, color=_PALE_TEXT, ha="right")

    def _label_worker(self, row: _Row) -> None:
        left, middle = 24 - self._left, (row.tops[0] + row.bottom) / 2
        if row.layers:
            self._label(left, middle - 4.5, f"worker {row.worker}", size=8)
            self._label(left, middle + 4.5, row.layers, size=6.5, color=_PALE_TEXT)
        else:
            self._label(left, middle, f"worker {row.worker}, lost", size=8, color=_PALE_TEXT, style="italic")

    def _label(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write beside the chart, at points from its top left."""
        style = {"va": "center", "color": _TEXT, "parse_math": False, **style}
        self._axes.text(x / self._width, y, text, transform=self._axes.get_yaxis_transform(), **style)

    def _draw_heading(self, title: str) -> None:
        """Write the title, a summary of each timeline and the legend, and notes below the chart."""
        width, height = self._page
        fitted, size = fit_title(title, width=width - 2 * _MARGIN, size=_TITLE_SIZE)
        self._write(16, fitted, size=size, weight="bold")
        for number, lane in enumerate(self._lanes):
            self._write(34 + 14 * number, self._describe(lane), size=9.5)
        handles = list(self._legend())
        self.figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(_MARGIN / width, 1 - (self._top - 40) / height),
            borderaxespad=0,
            borderpad=0,
            frameon=False,
            ncols=len(handles),
            fontsize=8.5,
            labelcolor=_TEXT,
            columnspacing=1.6,
            handletextpad=0.5,
        )
        notes = [_NOTES["busy"]]
        if any(each.is_detour for each in self._operations):
            notes.append(_NOTES["detour"])
        if any(each.operation.kind is OperationKind.WEIGHT_GRAD for each in self._operations):
            notes.append(_NOTES["split"])
        for number, note in enumerate(notes):
            self._write(height - 36 + 12 * number, note, size=8, color=_PALE_TEXT)

    def _describe(self, lane: Lane) -> str:
        """Return the step time, compared with the first timeline's, the time of sync alone, and the bubble."""
        first = self._lanes[0]
        compared = f" ({lane.step_s / first.step_s - 1:+.1%})" if lane is not first and first.step_s else ""
        sync_s = lane.step_s - lane.program_s
        sync = f", the last {duration(sync_s)} of it gradient all-reduce alone" if sync_s > 0 else ""
        bubble = 1 - sum(lane.busy().values()) / len(self._live_rows)
        return f"{lane.name}: step time {duration(lane.step_s)}{compared}{sync}, bubble {bubble:.1%}"

    def _write(self, y: float, text: str, **style: Any) -> None:
        # A title that looks like a formula to matplotlib is not one.
        style = {"va": "center", "color": _TEXT, "parse_math": False, **style}
        self.figure.text(_MARGIN / self._page[0], 1 - y / self._page[1], text, **style)

    def _legend(self) -> Iterator[Patch]:
        kinds = {each.operation.kind for each in self._operations}
        for kind, style in KIND_STYLES.items():
            if kind in kinds:
                yield Patch(facecolor=style.fill, edgecolor="white", label=f"{kind}  {style.name}")
        if any(self._reductions):
            yield Patch(facecolor=_REDUCTION.fill, edgecolor="white", label=_REDUCTION.name)
        if any(each.is_detour for each in self._operations):
            yield Patch(facecolor="white", label="detour", **_DETOUR)
        yield Patch(facecolor=_IDLE, edgecolor=_LINE, linewidth=0.4, label="idle")
        if len(self._live_rows) < len(self._rows):
            yield Patch(label="lost worker", **_LOST)
