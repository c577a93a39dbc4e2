"""What planners share: which plan all hold, which was decided on, and the way back to a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from chameleon_ft.estimate import total_work_bound_s
from chameleon_ft.recovery import Checkpoints, FailureModel, LossRisk, Prospect
from chameleon_ft.schedule import CostModel
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners.options import Chosen, Option, SimulatorState, best_option

__all__ = ["ActivePlan"]

_P = TypeVar("_P")


class ActivePlan(ABC, Generic[_P]):
    """The frame of a decision; what ways there are to go on is up to the planner.

    A plan is reached when the change to it is complete. Until then, what all hold is the one before.
    """

    def __init__(self, costs: CostModel, parameters: Parameters, *, has_checkpoints: bool) -> None:
        self._costs = costs
        self._parameters = parameters
        self._has_checkpoints = has_checkpoints
        # The plan whose layers its workers hold; None if nothing is held.
        self._reached: _P | None = None
        self._decided: _P | None = None
        # Workers that were lost since then. Those that are back hold nothing.
        self._lost: frozenset[int] = frozenset()

    def start(self, speeds: Mapping[int, float], checkpoints: Checkpoints) -> Chosen | None:
        """See `Planner`."""
        prospect = self._prospect(self._parameters.rate, speeds, checkpoints, after_incident=False)
        options = self._starts(speeds)
        best = best_option([(option, self._risk(option.plan, speeds)) for option in options], prospect)
        return None if best is None else self._activate(best, speeds)

    def decide(self, state: SimulatorState) -> Chosen | None:
        """See `Planner`."""
        if not state.interrupted:
            self._reach(self._decided)
        self._lose(state.lost)
        options = self._options(self._reached, state) if self._reached is not None and state.speeds else []
        best = self._best(options or self._restored(state), state)
        if best is None:
            self._reached = self._decided = None
            return None
        if best.from_checkpoint:
            self._reached = None
        return self._activate(best, state.speeds)

    def _restored(self, state: SimulatorState) -> list[Option]:
        """The ways to go on from the last checkpoint."""
        if not (self._has_checkpoints and state.speeds):
            return []
        restart_s, repeat_s = self._parameters.restart_s, state.checkpoints.unsaved_s
        return [
            replace(option, kind="checkpoint", stall_s=restart_s, repeat_s=repeat_s, from_checkpoint=True)
            for option in self._restarts(state)
        ]

    def _best(self, options: Sequence[Option], state: SimulatorState) -> Option | None:
        if len(options) < 2:
            return next(iter(options), None)
        after_incident = bool(state.lost)
        prospect = self._prospect(state.rate, state.speeds, state.checkpoints, after_incident=after_incident)
        return best_option([(option, self._risk(option.plan, state.speeds)) for option in options], prospect)

    def _prospect(
        self, failures: FailureModel, speeds: Mapping[int, float], checkpoints: Checkpoints, *, after_incident: bool
    ) -> Prospect:
        """Return what lies ahead of these workers."""
        return Prospect.of(
            failures,
            workers=len(speeds),
            after_incident=after_incident,
            held=None if self._reached is None else self._risk(self._reached, speeds),
            restart_s=self._parameters.restart_s,
            checkpoints=checkpoints,
            reference_step_s=self._reference_step_s(speeds),
            has_checkpoints=self._has_checkpoints,
        )

    def _reference_step_s(self, speeds: Mapping[int, float]) -> float:
        """Return seconds of a step of these workers if they were never idle."""
        whole = sum(worker.speed for worker in self._costs.cluster.workers)
        return total_work_bound_s(self._costs) * whole / sum(speeds.values())

    def _activate(self, option: Option, live: Collection[int]) -> Chosen:
        self._decided = option.plan
        return Chosen(option=option, used=self._used(option.plan), risk=self._risk(option.plan, live))

    def _reach(self, plan: _P | None) -> None:
        self._reached = plan
        self._lost = frozenset()

    def _lose(self, lost: frozenset[int]) -> None:
        self._lost |= lost

    @abstractmethod
    def _starts(self, speeds: Mapping[int, float]) -> Sequence[Option]:
        """The plans to begin with."""

    @abstractmethod
    def _used(self, plan: _P) -> frozenset[int]:
        """The workers of a plan."""

    @abstractmethod
    def _risk(self, plan: _P, live: Collection[int]) -> LossRisk | None:
        """Return which of the live workers and hosts hold the layers of a plan; None if some layer has no holder."""

    @abstractmethod
    def _options(self, reached: _P, state: SimulatorState) -> Sequence[Option]:
        """The ways to go on from what is held."""

    @abstractmethod
    def _restarts(self, state: SimulatorState) -> Sequence[Option]:
        """The plans to go on with from a checkpoint."""
