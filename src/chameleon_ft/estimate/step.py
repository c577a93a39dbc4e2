"""Everything that is predicted of a step before it is run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from chameleon_ft.estimate.bounds import plan_bound_s
from chameleon_ft.estimate.gradient_sync import SyncEstimate, estimate_sync
from chameleon_ft.estimate.memory import MessageBuffers, WorkerMemory, program_memory
from chameleon_ft.estimate.parts import bytes_over_capacity
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, Program, Timeline, replay

__all__ = ["StepEstimate", "estimate_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Time, gradient sync and memory of a step.

    Attributes:
        timeline: when each operation starts and ends.
        bound_s: seconds below which no program of this plan can end.
        sync: when gradients are reduced.
        memory: worst moment of each worker.
        busy_s: seconds that each worker computes.
    """

    timeline: Timeline
    bound_s: float
    sync: SyncEstimate
    memory: Mapping[int, WorkerMemory]
    busy_s: Mapping[int, float]

    @property
    def program_s(self) -> float:
        """Seconds until the last operation has ended."""
        return self.sync.program_s

    @property
    def step_s(self) -> float:
        """Seconds until all operations have ended and all gradients are reduced; vote and update come on top."""
        return self.program_s + self.sync.exposed_s

    @property
    def gap(self) -> float:
        """By which share of the bound the program is slower than it: 0 is proven optimal for the plan."""
        return self.program_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def bubble(self) -> float:
        """Share of the program's time in which workers are idle, over all workers of the placement."""
        available_s = len(self.busy_s) * self.program_s
        return 1 - sum(self.busy_s.values()) / available_s if available_s else 0.0

    def over_capacity(self, costs: CostModel) -> dict[int, int]:
        """Bytes that are missing, by worker, where the peak passes the capacity; unknown capacities are not checked."""
        return bytes_over_capacity({worker: memory.peak_bytes for worker, memory in self.memory.items()}, costs)


def estimate_step(
    plan: Plan,
    program: Program,
    costs: CostModel,
    *,
    buffers: MessageBuffers = MessageBuffers(),  # noqa: B008 - frozen
) -> StepEstimate:
    """The prediction for one step of `program`, which is one of `plan`.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        NoHolderError: a layer has no holder.
        ProgramError: operations wait for each other for ever.
        ConfigError: the plan has a worker that the cluster does not.
    """
    timeline = replay(program, costs)
    busy_s: dict[int, float] = defaultdict(float, dict.fromkeys(plan.workers, 0.0))
    for timed in timeline.operations:
        busy_s[timed.worker] += timed.end_s - timed.start_s
    return StepEstimate(
        timeline=timeline,
        bound_s=plan_bound_s(plan, costs),
        sync=estimate_sync(plan.placement, timeline, costs),
        memory=FrozenMap(program_memory(program, plan.placement, costs.workload, buffers)),
        busy_s=FrozenMap(busy_s),
    )
