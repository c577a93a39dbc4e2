"""How much a search does before it settles for what it has, and what parts of it may cost."""

from __future__ import annotations

from typing import Final

from chameleon_ft.schedule.best import DEFAULT_EFFORT as PROGRAM_EFFORT

DEFAULT_EFFORT: Final = 160_000
"""About how many operations a search may schedule before it settles for what it has; some tenths of a second."""

# The share of a search's effort that a look at a pipeline may take, and the least for it: some millisecond.
_LOOK: Final = 1 / 8
LOOK: Final = 10_000
# List schedules of a pipeline that effort should do for; what a search may cost however little effort it is given.
_LOOKS: Final = 24
_LEAST_EFFORT: Final = 160_000
# F, and B or I and W.
_OPERATIONS_PER_HOP: Final = 3


def is_dear(depth: int, micro_batches: float, effort: int | None) -> bool:
    """Whether to schedule a pipeline takes too much of a search's effort."""
    return _OPERATIONS_PER_HOP * depth * micro_batches > max(effort or 0, _LEAST_EFFORT) / _LOOKS


def look_effort(effort: int | None) -> int:
    """What a look at a pipeline may cost in a search of this effort, in operations to schedule."""
    return PROGRAM_EFFORT if effort is None else min(max(int(effort * _LOOK), LOOK), PROGRAM_EFFORT)


def polish_effort(effort: int | None) -> int:
    """The same for the program of a pipeline that will be run."""
    return PROGRAM_EFFORT if effort is None else min(max(effort, LOOK), PROGRAM_EFFORT)
