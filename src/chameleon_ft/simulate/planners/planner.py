"""A policy in a simulation: its active plan, and the frame of its decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.cost.snapshots import snapshots_fit
from chameleon_ft.cost.step import lost_share_s, total_work_bound_s
from chameleon_ft.plan import Placement
from chameleon_ft.plan.shards import owners_on_ring
from chameleon_ft.recovery import (
    Candidate,
    Checkpoints,
    FailureModel,
    LossRisk,
    Policy,
    Prospect,
    Snapshots,
    best_of,
    score,
)
from chameleon_ft.simulate.by_class.world import World


class WorkersPlan(Protocol):
    """A plan, of the type of its planner."""

    @property
    def used(self) -> frozenset[int]:
        """Its workers: the loss of any other interrupts nothing."""


_Plan = TypeVar("_Plan", bound=WorkersPlan)


@dataclass(frozen=True, kw_only=True)
class SimulatorState:
    """The known facts after an event.

    Attributes:
        speeds: The speed of each live worker.
        lost: workers that were lost just now.
        repeat_s: work of the interrupted step that is done again.
        running_s: seconds since training resumed with the active plan; zero in a stall.
        in_place: True if to continue at once, without moving layers; everything else is decided later.
        interrupted: True if the last change was not completed, so that its plan was not reached.
        checkpoints: how often they are written, and the steps since the last one.
        snapshots: likewise; None if there is none to go back to.
        rate: the failure model.
    """

    speeds: Mapping[int, float]
    lost: frozenset[int]
    repeat_s: float
    running_s: float
    in_place: bool = False
    interrupted: bool
    checkpoints: Checkpoints
    snapshots: Snapshots | None = None
    rate: FailureModel

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """The live workers."""
        return np.fromiter(self.speeds, dtype=np.int64, count=len(self.speeds))

    @property
    def horizon_s(self) -> float:
        """Expected seconds until the next failure (D)."""
        return self.rate.horizon_s(len(self.speeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Candidate, Generic[_Plan]):
    """A candidate with its plan.

    Attributes:
        still_s: seconds of standing still; `stall_s` adds `repeat_s`.
        repeat_s: work that is done again.
        saves_first: True if a checkpoint is written first, so that nothing is done again.
        from_snapshot: with `from_checkpoint`: whether its state is that of a snapshot.
        in_place: True if it continues the current step.
        share_s: seconds by which that step takes longer, without the stall.
    """

    plan: _Plan
    step_s: float
    still_s: float = 0.0
    repeat_s: float = 0.0
    stall_s: float = field(init=False)
    saves_first: bool = False
    from_snapshot: bool = False
    in_place: bool = False
    share_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stall_s", self.still_s + self.repeat_s)


class Planner(ABC, Generic[_Plan]):
    """A policy with its active plan. Subclasses define the options of a decision.

    A plan is reached when the change to it is complete. Until then, workers hold the layers of the plan before.

    Args:
        policy: A policy of the runtime, or one that exists only in simulations.
        world: costs, and layouts by class.
        start_number: selects one of several start layouts.

    Attributes:
        salvages: True if interrupted steps are completed, and layers move during training.
        restores_copies: True if slices of the optimizer's state get other owners in place of lost ones, by a switch.
        snapshot_rule: under which plans snapshots are taken.
    """

    def __init__(self, policy: Policy, world: World, *, start_number: int = 0) -> None:
        self._policy = policy
        self._world = world
        self._costs = world.costs
        self._hosts = world.costs.cluster.hosts
        # Seconds of a step on one worker of speed 1.
        self._work_s = total_work_bound_s(world.costs) * sum(worker.speed for worker in world.costs.cluster.workers)
        self._parameters = world.parameters
        self._start_number = start_number
        self._has_checkpoints = world.parameters.has_checkpoints or policy.restarts
        self.salvages = policy.salvages and world.parameters.salvage
        self.restores_copies = self.salvages and (world.costs.workload.owners or 0) > 1
        self.snapshot_rule = world.parameters.snapshot_rule(self._hosts.values())
        # The plan whose layers its workers hold; None if nothing is held.
        self._reached: _Plan | None = None
        # That plan when it was reached, before any loss.
        self._whole: _Plan | None = None
        self._decided: _Plan | None = None
        # Workers of the reached plan that were lost since. Workers that are back hold nothing.
        self._lost: frozenset[int] = frozenset()

    def start(self, state: SimulatorState) -> Option[_Plan] | None:
        """Return the plan to start with, which is active then; None if nothing fits the live workers."""
        best = self._best(self._starts(state.speeds), state)
        return None if best is None else self._activate(best)

    def decide(self, state: SimulatorState) -> Option[_Plan] | None:
        """Return the best option, which is active then; None if nothing can be done but wait for workers."""
        if not state.interrupted:
            self._reached = self._whole = self._decided
            self._lost = frozenset()
        before, gone = self._reached, self._lost
        options: Sequence[Option[_Plan]] = []
        if before is not None:
            self._lost |= state.lost & before.used
            reached = self._reached = self._without(before, state.lost)
            can_continue = bool(state.speeds) and self._keeps_optimizer_state()
            option = self._in_place(reached, state) if state.in_place and can_continue else None
            if option is not None:
                return self._activate(self._salvaged(option, self._placement(before).without(gone), state))
            options = self._options(reached, state) if can_continue else []
        near = None if before is None else state.snapshots
        if not options and (self._has_checkpoints or near is not None) and state.speeds:
            options = [
                replace(
                    option,
                    policy="checkpoint" if near is None else "snapshot",
                    still_s=self._parameters.restart_cost_s if near is None else near.return_s,
                    repeat_s=(state.checkpoints if near is None else near.taken).unsaved_s,
                    from_checkpoint=True,
                    from_snapshot=near is not None,
                )
                for option in self._restarts(state)
            ]
        best = self._best(options, state)
        if best is None:
            self._reached = self._decided = None
            return None
        if best.from_checkpoint:
            self._reached = None
        return self._activate(best)

    def _keeps_optimizer_state(self) -> bool:
        """Return whether the workers that are left own all slices of the optimizer's state."""
        owners = self._costs.workload.owners
        if owners is None or self._whole is None or len(self._lost) < owners:
            return True
        is_lost = np.zeros(len(self._world.host_numbers), dtype=np.bool_)
        is_lost[list(self._lost)] = True
        return not any(is_lost[owners_on_ring(ring, owners)].all(axis=1).any() for ring in self._rings(self._whole))

    def _assessed(self, option: Option[_Plan], state: SimulatorState) -> Option[_Plan]:
        """Return an option with its risk, and whether snapshots are taken under its plan."""
        rule = self.snapshot_rule
        # Most often no memory is given, and a placement of thousands of workers takes time.
        fits = not rule.host_memory or snapshots_fit(
            self._placement(option.plan), self._costs.workload, self._hosts, rule
        )
        return replace(option, risk=self._risk(option.plan, state), has_snapshots=fits)

    def _salvaged(self, option: Option[_Plan], held: Placement, state: SimulatorState) -> Option[_Plan]:
        """Return an option in place with its costs; `held` has the layers of the workers that were lost just now."""
        return replace(
            self._assessed(option, state),
            still_s=self._parameters.after_loss.total_s if state.lost else 0.0,
            share_s=lost_share_s(held, state.lost, self._costs),
            in_place=True,
        )

    def _best(self, options: Sequence[Option[_Plan]], state: SimulatorState) -> Option[_Plan] | None:
        """Return the option that `recovery.decide` would choose, with its risk; None if there is none."""
        speeds = state.speeds
        options = [self._assessed(option, state) for option in options]
        if len(options) < 2:
            return next(iter(options), None)
        prospect = Prospect.of(
            state.rate,
            workers=len(speeds),
            after_incident=bool(state.lost),
            held=None if self._reached is None else self._risk(self._reached, state),
            restart_cost_s=self._parameters.restart_cost_s,
            checkpoints=state.checkpoints,
            # Of workers that are never idle.
            reference_step_s=self._work_s / sum(speeds.values()),
            has_checkpoints=self._has_checkpoints,
            salvages=self.salvages,
            snapshots=state.snapshots,
        )
        index = best_of(score(options, prospect, samples=1), prospect)
        return None if index is None else options[index]

    def _activate(self, option: Option[_Plan]) -> Option[_Plan]:
        self._decided = option.plan
        return option

    def _without(self, plan: _Plan, lost: frozenset[int]) -> _Plan:
        """Return a plan with gaps in place of lost workers, if its type has gaps."""
        return plan

    @abstractmethod
    def _starts(self, speeds: Mapping[int, float]) -> Sequence[Option[_Plan]]:
        """Return the plans to start with."""

    @abstractmethod
    def _placement(self, plan: _Plan) -> Placement:
        """Return the layers that the workers of a plan hold."""

    @abstractmethod
    def _in_place(self, reached: _Plan, state: SimulatorState) -> Option[_Plan] | None:
        """Return the plan whose peers do the work of lost workers, without its costs; None if that is not possible."""

    @abstractmethod
    def _risk(self, plan: _Plan, state: SimulatorState) -> LossRisk | None:
        """Return which of the live workers and hosts hold the layers of a plan; None if some layer has no holder."""

    @abstractmethod
    def _rings(self, plan: _Plan) -> Sequence[NDArray[np.int64]]:
        """Return the different sets of workers that hold some layer of a plan, as `owners_on_ring` takes them."""

    @abstractmethod
    def _options(self, reached: _Plan, state: SimulatorState) -> Sequence[Option[_Plan]]:
        """Return the ways to continue with the layers that are held."""

    @abstractmethod
    def _restarts(self, state: SimulatorState) -> Sequence[Option[_Plan]]:
        """Return the plans to continue with from a checkpoint."""
