"""Schedules as pictures: workers down, time across."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from chameleon_ft.observe._picture_layout import arrange
from chameleon_ft.observe.lanes import Lane
from chameleon_ft.observe.picture_file import require_picture, save_picture
from chameleon_ft.plan import Plan
from chameleon_ft.plan.detours import detoured_hops

__all__ = ["draw_schedule"]


def draw_schedule(
    path: Path,
    *,
    title: str,
    plan: Plan,
    pipelines: Sequence[Sequence[int]],
    lanes: Sequence[Lane],
    lost: Collection[int] = (),
) -> None:
    """Draw timelines of one step, one of them or several to be compared, which share each worker's row.

    Boxes are operations, coloured by kind and numbered by micro-batch where there is room; detours are hatched. What
    lies open between them is idle time. Gradient reductions run along the lower edge of a worker's row, for they
    overlap with its operations. A row's percentage is the share of the time until the last operation has ended in which
    its worker computes.

    Args:
        path: file to write, whose suffix says of which kind: .svg, .png or .pdf. What is there is replaced.
        title: what the picture shows, in a line.
        plan: what is run.
        pipelines: the workers of each pipeline by stage, before anything failed: how rows are grouped, which of them
            are of lost workers, and what is a detour (see `detoured_hops`).
        lanes: the timelines, of the same plan; at least one.
        lost: workers that were lost before the plan was made, which a re-partition has left without a pipeline.

    Raises:
        ConfigError: another suffix, matplotlib is not installed, or the file cannot be written.
        PlanError: a worker is in two pipelines.
    """
    require_picture(path)
    from chameleon_ft.observe._picture_drawing import draw

    figure = draw(arrange(plan, pipelines, lanes, lost=lost), title, lanes, detoured_hops(plan, pipelines))
    save_picture(figure, path, title=title)
