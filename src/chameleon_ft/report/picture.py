"""Checks, titles and writing of pictures; importing this module does not load matplotlib.

A timeline of a step with its gradient reductions, as pictures and traces show it.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chameleon_ft.cost.step import StepEstimate
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import TimedOperation, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_SUFFIXES: Final = (".svg", ".png", ".pdf")
_TITLE_LINES: Final = 2
# The width of the narrowest letter over the font size.
_NARROWEST_LETTER: Final = 0.3
# A title that would have to be smaller than this share of the usual size is shortened.
_MIN_TITLE: Final = 0.7


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
    least = _MIN_TITLE * size
    shrunk = size * min(1.0, width / _bold_width(title, size)) if title else size
    if shrunk >= least:
        return title, shrunk
    most = int(width / (_NARROWEST_LETTER * least))
    for characters in range(min(len(title), most), 0, -1):
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


@dataclass(frozen=True, slots=True)
class WorkerReduction:
    """One worker's part in the all-reduce of the gradients of `layers`, in seconds since the start of the step."""

    worker: int
    layers: LayerRange
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One timeline of a step; `name` is "predicted" or "measured", and `reductions` is empty if they are unknown."""

    name: str
    timeline: Timeline
    reductions: tuple[WorkerReduction, ...] = ()

    @classmethod
    def predicted(cls, estimate: StepEstimate) -> Lane:
        """Return the predicted timeline of a step."""
        reductions = tuple(
            WorkerReduction(worker, reduction.segment.layers, reduction.start_s, reduction.end_s)
            for reduction in estimate.sync.reductions
            for worker in reduction.segment.holders
        )
        return cls("predicted", estimate.timeline, reductions)

    @property
    def program_s(self) -> float:
        """Seconds until the last operation has ended."""
        return self.timeline.step_s

    @property
    def step_s(self) -> float:
        """Seconds until all operations have ended and all gradients are reduced."""
        return max([self.program_s, *(reduction.end_s for reduction in self.reductions)])

    def operations(self) -> dict[int, list[TimedOperation]]:
        """Return the operations of each worker that has any, in its order."""
        found: dict[int, list[TimedOperation]] = defaultdict(list)
        for timed in self.timeline.operations:
            found[timed.worker].append(timed)
        return dict(found)

    def busy(self) -> dict[int, float]:
        """Return for each worker with operations the share of `program_s` in which it computes."""
        return {
            worker: math.fsum(timed.end_s - timed.start_s for timed in own) / self.program_s if self.program_s else 0.0
            for worker, own in self.operations().items()
        }
