"""Schedules as pictures; checks, titles and writing for all pictures. Only drawing loads matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.lanes import Lane
from chameleon_ft.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_schedule", "fit_title", "require_picture", "save_picture"]

_SUFFIXES: Final = (".svg", ".png", ".pdf")
_TITLE_LINES: Final = 2
_LEAST_TITLE: Final = 0.7  # of the usual size of a title; one that would have to be smaller is shortened


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
    from chameleon_ft.observe._picture_drawing import Drawing

    save_picture(Drawing(title, plan, pipelines, lanes, lost).figure, path, title=title)


def require_picture(path: Path) -> None:
    """Raise ConfigError if no picture can be written to `path`: wrong suffix, no such folder, or no matplotlib."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: a picture is of the kind {', '.join(_SUFFIXES)}; end the name in one of these")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the picture cannot be written: no such folder; give a file in a folder that exists")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{path}: pictures need matplotlib, which cannot be loaded ({error}); "
            "install it by: pip install 'chameleon-ft[pictures]'"
        ) from None


def save_picture(figure: Figure, path: Path, *, title: str) -> None:
    """Write or replace a picture. Raises ConfigError if that fails."""
    try:
        figure.savefig(path, facecolor="white", metadata={"Title": title})
    except OSError as error:
        raise ConfigError(
            f"{path}: the picture cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from None


def fit_title(title: str, *, width: float, size: float) -> tuple[str, float]:
    """Fit a bold title into a picture: in a smaller font if it is too wide, then on two lines, then shortened.

    Args:
        title: one line.
        width: points between the margins of the picture.
        size: font size in points of a short title.

    Returns:
        The title, with a line break if it takes two lines, and its font size.
    """
    least = _LEAST_TITLE * size
    shrunk = size * min(1.0, width / _bold_width(title, size)) if title else size
    if shrunk >= least:
        return title, shrunk
    for characters in range(len(title), 0, -1):
        lines = textwrap.wrap(title, characters, max_lines=_TITLE_LINES, placeholder="…")
        if max(_bold_width(line, least) for line in lines) <= width:
            return "\n".join(lines), least
    return "", least


def _bold_width(text: str, size: float) -> float:
    """Return the width of a line in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size, weight="bold")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])
