"""What the simulator asks of whoever plans, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chameleon_ft.recovery import Candidate, Checkpoints, FailureModel, LossRisk, Prospect, best_of, score

__all__ = ["Chosen", "Option", "Planner", "SimulatorState", "best_option"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorState:
    """What is known when something has happened to workers.

    Attributes:
        speeds: of all live workers.
        lost: workers that were lost just now.
        horizon_s: seconds until the next failure that are to be expected (D).
        repeat_s: work of the interrupted step that is done again.
        running_s: seconds since training went on with the plan in force; zero in a stall.
        interrupted: whether the change that was decided last had not been completed, so that its plan was not reached.
        checkpoints: how often they are written, and the steps since the last one.
        rate: what the horizon is from.
    """

    speeds: Mapping[int, float]
    lost: frozenset[int]
    horizon_s: float
    repeat_s: float
    running_s: float
    interrupted: bool
    checkpoints: Checkpoints
    rate: FailureModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way to go on.

    Attributes:
        kind: what kind of plan it is.
        plan: the plan, whatever the planner has for one.
        step_s: seconds of a step.
        stall_s: seconds of standing still, work that is done again left out.
        repeat_s: work that is done again.
        moved_bytes: what workers receive.
        from_checkpoint: whether all go back to the last checkpoint.
        saves_first: whether a checkpoint is written first, so that nothing is done again.
    """

    kind: str
    plan: Any
    step_s: float
    stall_s: float
    repeat_s: float = 0.0
    moved_bytes: int = 0
    from_checkpoint: bool = False
    saves_first: bool = False

    @property
    def predicted_stall_s(self) -> float:
        """Seconds in which nothing is gained."""
        return self.stall_s + self.repeat_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a planner has settled for.

    Attributes:
        option: the way to go on.
        used: workers that are part of it; the loss of another one disturbs nobody.
        risk: which workers and hosts hold the layers.
    """

    option: Option
    used: frozenset[int]
    risk: LossRisk | None


class Planner(Protocol):
    """A policy with the plan that it has in force."""

    def start(self, speeds: Mapping[int, float], checkpoints: Checkpoints) -> Chosen | None:
        """Begin with these workers; None where nothing fits them."""

    def decide(self, state: SimulatorState) -> Chosen | None:
        """What to do next, which is then in force; None where nothing can be done but to wait for workers."""


def best_option(options: Sequence[tuple[Option, LossRisk | None]], prospect: Prospect) -> Option | None:
    """Return what `recovery.decide` would choose; None if there is nothing.

    Args:
        options: what can be done, each with who would hold the layers.
        prospect: what lies ahead.
    """
    candidates = [
        Candidate(
            policy=option.kind,
            step_s=option.step_s,
            stall_s=option.predicted_stall_s,
            moved_bytes=option.moved_bytes,
            risk=risk,
            from_checkpoint=option.from_checkpoint,
        )
        for option, risk in options
    ]
    index = best_of(score(candidates, prospect, samples=1), prospect)
    return None if index is None else options[index][0]
