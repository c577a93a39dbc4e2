"""What all policies of a simulation share: times of pipelines, mixes, and what it costs to change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import StallModel
from chameleon_ft.plan import Plan
from chameleon_ft.schedule import CostModel
from chameleon_ft.simulate.fleet import Fleet, arranged, fleet_of_plan, fleet_step, move_to
from chameleon_ft.simulate.mixes import Mix, Mixes
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.pipelines import Cut, Pipelines
from chameleon_ft.simulate.planner import Option, Outlook
from chameleon_ft.simulate.step_times import StepTimes

__all__ = ["World", "world_of"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class World:
    """The costs of a simulation, and what has been worked out of them so far.

    Attributes:
        costs: of the workload on all workers.
        parameters: what is assumed.
        times: steps by pipelines.
        mixes: the fastest pipelines by number of workers.
        start: what all policies begin with; None where each begins with what is fastest for it.
    """

    costs: CostModel
    parameters: Parameters
    times: StepTimes
    mixes: Mixes
    start: Fleet | None = None
    _notes: dict[str, object] = field(default_factory=dict, repr=False)

    def noted(self, name: str, make: Callable[[World], _T]) -> _T:
        """What a policy makes of this world, once."""
        if name not in self._notes:
            self._notes[name] = make(self)
        return cast(_T, self._notes[name])

    @property
    def pipelines(self) -> Pipelines:
        """Times of single pipelines."""
        return self.times.pipelines

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers."""
        return tuple(worker.id for worker in self.costs.cluster.workers)

    def step_s(self, fleet: Fleet, speeds: Mapping[int, float]) -> float | None:
        """Seconds of a step; None if it cannot be run."""
        step = fleet_step(fleet, self.times, speeds)
        return None if step is None else step.step_s

    def phases(self, outlook: Outlook) -> StallModel:
        """Those of a stall now."""
        return self.parameters.after_loss if outlook.lost else self.parameters.after_change

    def option(self, kind: str, fleet: Fleet, current: Fleet, outlook: Outlook) -> Option | None:
        """The way to another fleet; None if it cannot be run or reached.

        A fleet that stays as it is, and has lost nobody, goes on without a stall.
        """
        step_s = self.step_s(fleet, outlook.speeds)
        if step_s is None:
            return None
        if fleet == current and not outlook.lost:
            return Option(kind=kind, plan=fleet, step_s=step_s, stall_s=0.0)
        move = move_to(fleet, current, self.pipelines)
        if move is None:
            return None
        return Option(
            kind=kind,
            plan=fleet,
            step_s=step_s,
            stall_s=self.phases(outlook).total_s + move.transfer_s,
            again_s=outlook.repeat_s,
            moved_bytes=move.num_bytes,
        )

    def from_checkpoint(self, kind: str, fleet: Fleet, step_s: float, outlook: Outlook) -> Option:
        """All begin anew: after a loss from the last checkpoint, else from one that is written first."""
        saved_s = 0.0 if outlook.lost else self.parameters.checkpoint_write_s
        return Option(
            kind=kind,
            plan=fleet,
            step_s=step_s,
            stall_s=self.parameters.restart_s + saved_s,
            again_s=outlook.rollback_s if outlook.lost else 0.0,
            from_checkpoint=True,
            saves_first=not outlook.lost,
        )

    def fastest_fleet(self, current: Fleet, speeds: Mapping[int, float]) -> Fleet | None:
        """The fastest pipelines of all live workers; slow ones in pipelines of their own speed, cut like most others.

        None where nothing fits.
        """
        return _fleet_of(self.mixes.fastest, current, speeds)

    def equal_fleet(self, current: Fleet, speeds: Mapping[int, float]) -> Fleet | None:
        """The fastest pipelines of one depth."""
        return _fleet_of(self.mixes.equal_pipelines, current, speeds)


def _fleet_of(mix_of: Callable[[int], Mix | None], current: Fleet, speeds: Mapping[int, float]) -> Fleet | None:
    by_speed: dict[float, list[int]] = defaultdict(list)
    if set(speeds.values()) == {1.0}:
        by_speed[1.0] = list(speeds)
    else:
        for worker, speed in speeds.items():
            by_speed[speed].append(worker)
    mix = mix_of(len(by_speed[1.0]))
    if mix is None:
        # All are slow: as many of them together are as good as any.
        mix = mix_of(len(speeds))
        return None if mix is None else arranged(_cuts(mix), sorted(speeds), current)
    pipelines = list(arranged(_cuts(mix), by_speed.pop(1.0), current).pipelines)
    main = max(_cuts(mix).items(), key=lambda item: item[1])[0]
    for speed in sorted(by_speed, reverse=True):
        slow = by_speed[speed]
        pipelines += arranged({main: len(slow) // main.depth}, slow, current).pipelines
    return Fleet(tuple(pipelines))


def _cuts(mix: Mix) -> dict[Cut, int]:
    return {own.cut: count for own, count in mix.counts.items()}


def world_of(costs: CostModel, parameters: Parameters, start: Plan | None = None) -> World:
    """The world of a workload and a cluster.

    Backward is split or fused as in `start`; without one, whichever lets all workers be faster.

    Raises PlanError where no pipelines fit the memory, or `start` has detours.
    """
    if start is not None:
        times = StepTimes(Pipelines(costs, split_backward=start.split_backward))
        return World(costs, parameters, times, Mixes(times), start=fleet_of_plan(start))
    workers = len(costs.cluster.workers)
    best: tuple[float, StepTimes, Mixes] | None = None
    for split_backward in (True, False):
        times = StepTimes(Pipelines(costs, split_backward=split_backward))
        mixes = Mixes(times)
        mix = mixes.fastest(workers, below_s=math.inf if best is None else best[0])
        if mix is not None and (best is None or mix.step_s < best[0]):
            best = mix.step_s, times, mixes
    if best is None:
        raise PlanError(f"no pipelines of {workers} workers fit the memory; take more workers, or larger ones")
    return World(costs, parameters, best[1], best[2])
