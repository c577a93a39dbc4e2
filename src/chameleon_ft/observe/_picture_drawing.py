"""The drawing of a picture. Imported only when one is asked for, because it loads matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from chameleon_ft.observe._picture_layout import Layout, Row, describe, time_unit
from chameleon_ft.observe.lanes import Lane
from chameleon_ft.observe.picture_file import fit_title
from chameleon_ft.schedule import OperationKind

__all__ = ["draw"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How boxes of a kind look: in hues that colour-blind people tell apart, and of a lightness of its own in grey."""

    name: str
    fill: str
    ink: str


_FORWARD: Final = _Kind("forward", "#a6cee8", "#10202c")
_BACKWARD: Final = _Kind("backward", "#a8430f", "#ffffff")
_INPUT_GRAD: Final = _Kind("backward, input gradient", _BACKWARD.fill, _BACKWARD.ink)
_WEIGHT_GRAD: Final = _Kind("backward, weight gradient", "#3fb598", "#06231c")
_REDUCTION: Final = _Kind("gradient all-reduce", "#35195a", "#ffffff")
_KINDS: Final = {
    OperationKind.FORWARD: _FORWARD,
    OperationKind.BACKWARD: _BACKWARD,
    OperationKind.INPUT_GRAD: _INPUT_GRAD,
    OperationKind.WEIGHT_GRAD: _WEIGHT_GRAD,
}
_IDLE: Final = "#fff1c9"
_TEXT: Final = "#1a1a1a"
_PALE_TEXT: Final = "#666666"
_LINE: Final = "#b0b0b0"
_DETOUR: Final[dict[str, Any]] = {"edgecolor": "#000000", "hatch": "////", "linewidth": 0.9}
_LOST: Final[dict[str, Any]] = {"facecolor": "#ececec", "edgecolor": _PALE_TEXT, "linewidth": 0.6, "linestyle": "--"}

_REDUCTION_SHARE: Final = 0.22
# Widths over the size of the font: of a digit, and at most of a bold letter.
_DIGIT_WIDTH: Final = 0.64
_LETTER_WIDTH: Final = 0.7
_NUMBER_SIZES: Final = (4.0, 8.0)
_POINTS_PER_INCH: Final = 72.0
_TICK_WIDTH: Final = 70.0
_RIGHT: Final = 44.0
_BOTTOM: Final = 76.0
_MARGIN: Final = 10.0
_TITLE_SIZE: Final = 13.0


@dataclass(frozen=True, slots=True)
class _Box:
    """A filled rectangle: left and right in seconds, top and bottom in points."""

    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class _OperationBox(_Box):
    """The box of an operation."""

    kind: OperationKind
    micro_batch: int
    detour: bool


def draw(layout: Layout, title: str, lanes: Sequence[Lane], detours: frozenset[tuple[int, int]]) -> Figure:
    """Draw a chart under its title and legend, in a figure that belongs to no window and to no global state."""
    drawing = _Drawing(layout, lanes)
    boxes = list(drawing.operation_boxes(detours))
    drawing.strips()
    drawing.operations(boxes)
    drawing.reductions()
    drawing.numbers(boxes)
    drawing.labels()
    drawing.heading(title, boxes)
    return drawing.figure


class _Drawing:
    """A figure with one chart: x in the unit of its time axis, y in points downwards."""

    def __init__(self, layout: Layout, lanes: Sequence[Lane]) -> None:
        self._layout = layout
        self._lanes = lanes
        self._reductions = [[each for each in lane.reductions if each.end_s > each.start_s] for lane in lanes]
        self._longest_s = max(lane.step_s for lane in lanes) or 1.0
        self._unit, self._scale = time_unit(self._longest_s)
        self._left = 92.0 if len(lanes) == 1 else 138.0
        self._top = 70.0 + 14.0 * len(lanes)
        self._width = self._left + layout.width + _RIGHT
        self._height = self._top + layout.height + _BOTTOM
        self.figure = Figure(figsize=(self._width / _POINTS_PER_INCH, self._height / _POINTS_PER_INCH), dpi=150)
        self._axes = self._make_axes()

    def _make_axes(self) -> Axes:
        layout = self._layout
        axes = self.figure.add_axes(
            (
                self._left / self._width,
                _BOTTOM / self._height,
                layout.width / self._width,
                layout.height / self._height,
            )
        )
        axes.set_xlim(0, self._longest_s * self._scale)
        axes.set_ylim(layout.height, 0)
        axes.set_yticks([])
        axes.set_axisbelow(True)
        axes.locator_params(axis="x", nbins=round(layout.width / _TICK_WIDTH))
        axes.grid(axis="x", color=_LINE, linewidth=0.5)
        axes.tick_params(axis="x", top=True, labeltop=True, colors=_TEXT, labelsize=8, width=0.6)
        axes.set_xlabel(f"time since the start of the step ({self._unit})", fontsize=9, color=_TEXT)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    @property
    def _operation_height(self) -> float:
        return self._layout.strip_height * (1 - _REDUCTION_SHARE if any(self._reductions) else 1)

    def operation_boxes(self, detours: frozenset[tuple[int, int]]) -> Iterator[_OperationBox]:
        """The boxes of the operations that last any time."""
        for index, lane in enumerate(self._lanes):
            operations = lane.operations()
            for row in self._live_rows():
                top = row.tops[index]
                for timed in operations.get(row.worker, ()):
                    if timed.end_s > timed.start_s:
                        operation = timed.operation
                        yield _OperationBox(
                            timed.start_s,
                            timed.end_s,
                            top,
                            top + self._operation_height,
                            operation.kind,
                            operation.micro_batch,
                            (operation.micro_batch, operation.hop) in detours,
                        )

    def _live_rows(self) -> list[Row]:
        return [row for group in self._layout.groups for row in group.rows if not row.lost]

    def strips(self) -> None:
        """The ground on which boxes lie: what stays open of it is idle time; those of lost workers stay empty."""
        height, operation_height = self._layout.strip_height, self._operation_height
        grounds = [(lane, row.tops[index]) for index, lane in enumerate(self._lanes) for row in self._live_rows()]
        steps = [_Box(0, lane.step_s, top, top + height) for lane, top in grounds]
        idle = [_Box(0, lane.program_s, top, top + operation_height) for lane, top in grounds]
        rows = [row for group in self._layout.groups for row in group.rows]
        lost = [_Box(0, self._longest_s, row.tops[0], row.tops[0] + height) for row in rows if row.lost]
        self._fill("step", steps, facecolor="white", edgecolor=_LINE, linewidth=0.8)
        self._fill("idle", idle, facecolor=_IDLE, edgecolor="none")
        self._fill("lost", lost, **_LOST)

    def operations(self, boxes: Sequence[_OperationBox]) -> None:
        """Fill the boxes, detours last, so that no neighbour covers their outlines."""
        for kind, style in _KINDS.items():
            plain = [box for box in boxes if box.kind is kind and not box.detour]
            self._fill(style.name, plain, facecolor=style.fill, edgecolor="white", linewidth=0.4)
        for kind, style in _KINDS.items():
            detours = [box for box in boxes if box.kind is kind and box.detour]
            self._fill(f"{style.name}, detour", detours, facecolor=style.fill, **_DETOUR)

    def reductions(self) -> None:
        """Fill the lower edge of strips where gradients are reduced."""
        height = self._layout.strip_height
        rows = {row.worker: row for row in self._live_rows()}
        boxes = [
            _Box(
                reduction.start_s,
                reduction.end_s,
                rows[reduction.worker].tops[index] + self._operation_height,
                rows[reduction.worker].tops[index] + height,
            )
            for index, reductions in enumerate(self._reductions)
            for reduction in reductions
        ]
        self._fill(_REDUCTION.name, boxes, facecolor=_REDUCTION.fill, edgecolor="white", linewidth=0.4)

    def _fill(self, name: str, boxes: Sequence[_Box], **style: Any) -> None:
        """One collection for all boxes of a name, for there may be thousands."""
        if not boxes:
            return
        sides = np.array([(box.left * self._scale, box.right * self._scale, box.top, box.bottom) for box in boxes])
        corners = sides[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]
        collection = PolyCollection(list(corners), clip_on=False, **style)
        # In SVG the boxes of a name can be found, and styled, by it.
        collection.set_gid(name.replace(",", "").replace(" ", "-"))
        self._axes.add_collection(collection, autolim=False)

    def numbers(self, boxes: Sequence[_OperationBox]) -> None:
        """Write the micro-batches into the boxes that have room, most of them in one size."""
        points_per_s = self._layout.width / self._longest_s
        fitting = [
            ((box.right - box.left) * points_per_s - 1.5) / (_DIGIT_WIDTH * len(str(box.micro_batch))) for box in boxes
        ]
        least, most = _NUMBER_SIZES
        usual = min(most, 0.72 * self._operation_height, max(least, statistics.median(fitting))) if boxes else least
        numbered = [(box, min(usual, fits)) for box, fits in zip(boxes, fitting, strict=True) if fits >= least]
        self._clearings([(box, size) for box, size in numbered if box.detour])
        for box, size in numbered:
            # Not by the axes, which would take as long again to clip each of thousands.
            self.figure.text(
                (box.left + box.right) / 2 * self._scale,
                (box.top + box.bottom) / 2,
                str(box.micro_batch),
                size=size,
                color=_KINDS[box.kind].ink,
                ha="center",
                va="center_baseline",
                parse_math=False,
                transform=self._axes.transData,
            )

    def _clearings(self, numbered: Sequence[tuple[_OperationBox, float]]) -> None:
        """Take the hatching away from behind numbers."""
        s_per_point = self._longest_s / self._layout.width
        for kind, style in _KINDS.items():
            clear = []
            for box, size in numbered:
                if box.kind is kind:
                    middle, centre = (box.left + box.right) / 2, (box.top + box.bottom) / 2
                    half = (_DIGIT_WIDTH * len(str(box.micro_batch)) * size / 2 + 1.0) * s_per_point
                    half = min(half, (box.right - box.left) / 2)
                    clear.append(_Box(middle - half, middle + half, centre - 0.5 * size, centre + 0.5 * size))
            self._fill(f"number of {style.name}", clear, facecolor=style.fill, edgecolor="none")

    def labels(self) -> None:
        """Name workers, pipelines and timelines on the left, and give the busy shares on the right."""
        busy = [lane.busy() for lane in self._lanes]
        self._label(self._layout.width + 8, -8, "busy", size=8, color=_PALE_TEXT)
        for group in self._layout.groups:
            top, bottom = group.rows[0].tops[0], group.rows[-1].bottom
            size = min(8.5, (bottom - top) / (_LETTER_WIDTH * len(group.name))) if group.name else 0.0
            # The name of a pipeline of one low row has no room; its worker is named anyway.
            if size >= _NUMBER_SIZES[0]:
                self._label(
                    10 - self._left, (top + bottom) / 2, group.name, size=size, rotation=90, ha="center", weight="bold"
                )
            self._axes.plot(
                [(18 - self._left) / self._layout.width] * 2,
                [top, bottom],
                color=_PALE_TEXT,
                linewidth=1.2,
                transform=self._axes.get_yaxis_transform(),
                clip_on=False,
            )
            for row in group.rows:
                self._name(row)
                for index, top in enumerate(() if row.lost else row.tops):
                    middle = top + self._operation_height / 2
                    self._label(self._layout.width + 8, middle, f"{busy[index].get(row.worker, 0.0):.0%}", size=8)
                    if len(self._lanes) > 1:
                        self._label(-6, middle, self._lanes[index].name, size=6.5, color=_PALE_TEXT, ha="right")

    def _name(self, row: Row) -> None:
        left, middle = 24 - self._left, (row.tops[0] + row.bottom) / 2
        if row.lost:
            self._label(left, middle, f"worker {row.worker}, lost", size=8, color=_PALE_TEXT, style="italic")
        else:
            self._label(left, middle - 4.5, f"worker {row.worker}", size=8)
            self._label(left, middle + 4.5, row.layers, size=6.5, color=_PALE_TEXT)

    def _label(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write beside the chart, at points from its top left."""
        style = {"va": "center", "color": _TEXT, "parse_math": False, **style}
        self._axes.text(x / self._layout.width, y, text, transform=self._axes.get_yaxis_transform(), **style)

    def heading(self, title: str, boxes: Sequence[_OperationBox]) -> None:
        """Title, what each timeline comes to, the legend, and below the chart how to read it."""
        workers = len(self._live_rows())
        fitted, size = fit_title(title, width=self._width - 2 * _MARGIN, size=_TITLE_SIZE)
        self._write(16, fitted, size=size, weight="bold")
        for number, line in enumerate(describe(self._lanes, workers)):
            self._write(34 + 14 * number, line, size=9.5)
        handles = list(self._legend(boxes))
        self.figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(_MARGIN / self._width, 1 - (self._top - 40) / self._height),
            borderaxespad=0,
            borderpad=0,
            frameon=False,
            ncols=len(handles),
            fontsize=8.5,
            labelcolor=_TEXT,
            columnspacing=1.6,
            handletextpad=0.5,
        )
        for number, note in enumerate(self._notes(boxes)):
            self._write(self._height - 36 + 12 * number, note, size=8, color=_PALE_TEXT)

    def _write(self, y: float, text: str, **style: Any) -> None:
        # What looks like a formula to matplotlib, in a title say, is not one.
        style = {"va": "center", "color": _TEXT, "parse_math": False, **style}
        self.figure.text(_MARGIN / self._width, 1 - y / self._height, text, **style)

    def _legend(self, boxes: Sequence[_OperationBox]) -> Iterator[Patch]:
        kinds = {box.kind for box in boxes}
        for kind, style in _KINDS.items():
            if kind in kinds:
                yield Patch(facecolor=style.fill, edgecolor="white", label=f"{kind}  {style.name}")
        if any(self._reductions):
            yield Patch(facecolor=_REDUCTION.fill, edgecolor="white", label=_REDUCTION.name)
        if any(box.detour for box in boxes):
            yield Patch(facecolor="white", label="detour", **_DETOUR)
        yield Patch(facecolor=_IDLE, edgecolor=_LINE, linewidth=0.4, label="idle")
        if any(row.lost for group in self._layout.groups for row in group.rows):
            yield Patch(label="lost worker", **_LOST)

    def _notes(self, boxes: Sequence[_OperationBox]) -> Iterator[str]:
        yield (
            "Numbers are those of micro-batches; busy is the share of the time until the last operation has ended in "
            "which a worker computes."
        )
        if any(box.detour for box in boxes):
            yield "A detour is an operation for a micro-batch of another pipeline, one that has lost the worker for it."
        if any(box.kind is OperationKind.WEIGHT_GRAD for box in boxes):
            yield "A stage that begins at layer 0 has no input gradient to make: its W is the whole backward."
