"""Where everything of a picture goes, in points (1/72 inch) from the top left of its chart, and what it says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.observe.lanes import Lane
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import duration

# A chart of few workers has high strips, one of many is allowed to become long; so that boxes keep room for numbers.
_STRIPS_HEIGHT: Final = 620.0
_STRIP_HEIGHTS: Final = (13.0, 30.0)
_WIDTHS: Final = (880.0, 1900.0)
_BOX_WIDTH: Final = 8.0
_DIGIT_WIDTH: Final = 4.0
_WORKER_GAP: Final = 6.0
_LANE_GAP: Final = 1.5
_PIPELINE_GAP: Final = 15.0
_EDGE: Final = 6.0


@dataclass(frozen=True, slots=True)
class Row:
    """A worker's place.

    Attributes:
        worker: its number.
        layers: what it holds in words; empty for a worker that is lost.
        tops: where its strip of each timeline begins; a worker that is lost has a single, empty strip.
        bottom: where the last of them ends.
    """

    worker: int
    layers: str
    tops: tuple[float, ...]
    bottom: float

    @property
    def lost(self) -> bool:
        """Whether the worker is no more."""
        return not self.layers


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of a pipeline, first stage first."""

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The chart: as wide as its busiest worker needs, as high as all its workers need."""

    groups: tuple[Group, ...]
    strip_height: float
    width: float
    height: float


def arrange(
    plan: Plan, pipelines: Sequence[Sequence[int]], lanes: Sequence[Lane], *, lost: Collection[int] = ()
) -> Layout:
    """Give every worker a row with a strip for each timeline: pipeline by pipeline, then the workers in no pipeline.

    `lost` are workers that the plan no longer has, whether or not they are in a pipeline.
    """
    named = [(f"pipeline {number}", tuple(workers)) for number, workers in enumerate(pipelines)]
    others = tuple(sorted({*plan.workers, *lost}.difference(*pipelines)))
    groups = [(name, workers) for name, workers in [*named, ("no pipeline" if named else "", others)] if workers]
    held = {worker: _layers(plan, worker) for worker in plan.workers}
    strips = sum(len(lanes) if worker in held else 1 for _, workers in groups for worker in workers)
    strip_height = _within(_STRIPS_HEIGHT / strips, _STRIP_HEIGHTS)
    top = _EDGE
    placed: list[Group] = []
    for name, workers in groups:
        rows: list[Row] = []
        for worker in workers:
            count = len(lanes) if worker in held else 1
            tops = tuple(top + index * (strip_height + _LANE_GAP) for index in range(count))
            rows.append(Row(worker, held.get(worker, ""), tops, tops[-1] + strip_height))
            top = rows[-1].bottom + _WORKER_GAP
        placed.append(Group(name, tuple(rows)))
        top += _PIPELINE_GAP - _WORKER_GAP
    most = max((len(own) for lane in lanes for own in lane.operations().values()), default=0)
    width = most * (_BOX_WIDTH + _DIGIT_WIDTH * len(str(plan.micro_batches - 1)))
    return Layout(tuple(placed), strip_height, _within(width, _WIDTHS), top - _PIPELINE_GAP + _EDGE)


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit in which times up to `longest_s` are easy to read, and how many of it are a second."""
    return next((unit for unit in (("s", 1.0), ("ms", 1e3)) if longest_s * unit[1] >= 1), ("µs", 1e6))


def describe(lanes: Sequence[Lane], workers: int) -> list[str]:
    """A line about each timeline: its step time, the bubble over so many workers, and what gradient sync adds.

    Those after the first are compared with it.
    """
    return [_describe(lane, lanes[0] if index else None, workers) for index, lane in enumerate(lanes)]


def _describe(lane: Lane, other: Lane | None, workers: int) -> str:
    compared = f" ({lane.step_s / other.step_s - 1:+.1%})" if other is not None and other.step_s else ""
    parts = [f"{lane.name}: step time {duration(lane.step_s)}{compared}"]
    if lane.step_s > lane.program_s:
        parts.append(f"the last {duration(lane.step_s - lane.program_s)} of it gradient all-reduce alone")
    parts.append(f"bubble {1 - sum(lane.busy().values()) / workers:.1%}")
    return ", ".join(parts)


def _layers(plan: Plan, worker: int) -> str:
    ranges = [(held.start, held.stop - 1) for held in plan.placement.ranges_of(worker)]
    single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return ("layer " if single else "layers ") + ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in ranges
    )


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
