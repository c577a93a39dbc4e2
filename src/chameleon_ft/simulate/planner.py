"""What the simulator asks of whoever plans, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from chameleon_ft.recovery import FailureRate

__all__ = ["Chosen", "Option", "Outlook", "Planner", "best_option"]

# As in `recovery.decide`: samples that differ by less are equal.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known when something has happened to workers.

    Attributes:
        speeds: of all live workers.
        lost: workers that were lost just now.
        horizon_s: seconds until the next failure that are to be expected (D).
        repeat_s: work of the interrupted step that is done again.
        rollback_s: the same, with all steps since the last checkpoint, for those that go back to one.
        running_s: seconds since training went on with the plan in force; zero in a stall.
        interrupted: whether the change that was decided last had not been completed, so that its plan was not reached.
        rate: what the horizon is from.
    """

    speeds: Mapping[int, float]
    lost: frozenset[int]
    horizon_s: float
    repeat_s: float
    rollback_s: float
    running_s: float
    interrupted: bool
    rate: FailureRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way to go on.

    Attributes:
        kind: what kind of plan it is.
        plan: the plan, whatever the planner has for one.
        step_s: seconds of a step.
        stall_s: seconds of standing still, work that is done again left out.
        again_s: work that is done again.
        moved_bytes: what workers receive.
        from_checkpoint: whether all go back to the last checkpoint.
        saves_first: whether a checkpoint is written first, so that nothing is done again.
    """

    kind: str
    plan: Any
    step_s: float
    stall_s: float
    again_s: float = 0.0
    moved_bytes: int = 0
    from_checkpoint: bool = False
    saves_first: bool = False

    @property
    def predicted_stall_s(self) -> float:
        """Seconds in which nothing is gained."""
        return self.stall_s + self.again_s

    def steps_until(self, horizon_s: float) -> float:
        """Steps until the next failure: samples(D) = B max(0, D - stall) / step time, without B."""
        return max(0.0, horizon_s - self.predicted_stall_s) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a planner has settled for.

    Attributes:
        option: the way to go on.
        used: workers that are part of it; the loss of another one disturbs nobody.
    """

    option: Option
    used: frozenset[int]


class Planner(Protocol):
    """A policy with the plan that it has in force."""

    def start(self, speeds: Mapping[int, float]) -> Chosen | None:
        """Begin with these workers; None where nothing fits them."""

    def decide(self, outlook: Outlook) -> Chosen | None:
        """What to do next, which is then in force; None where nothing can be done but to wait for workers."""


def best_option(options: Sequence[Option], horizon_s: float) -> Option | None:
    """The one with the most samples until the next failure; of equals the fewest bytes, and then the first."""
    if not options:
        return None
    steps = [option.steps_until(horizon_s) for option in options]
    enough = max(steps) * (1 - _ROUNDING)
    equals = [index for index, each in enumerate(steps) if each >= enough]
    return options[min(equals, key=lambda index: (options[index].moved_bytes, index))]
