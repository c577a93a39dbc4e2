"""Whether a plan fits into memory, and what would if it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chameleon_ft.cli._plan_case import PlanCase
from chameleon_ft.estimate import StepEstimate, program_memory
from chameleon_ft.schedule import CostModel, list_schedule

__all__ = ["Fit", "Misfit", "find_misfit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The memory of a layout of the same workers: the largest peak, against the capacity of a worker."""

    dp: int
    pp: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A plan that does not fit.

    Attributes:
        missing_bytes: by worker, how much more than its capacity it needs.
        capacity_bytes: of a worker.
        layouts: the depths of pipeline that these workers can have, the least memory first.
    """

    missing_bytes: dict[int, int]
    capacity_bytes: int
    layouts: tuple[Fit, ...]

    @property
    def fitting(self) -> tuple[Fit, ...]:
        """The layouts that would fit, the shallowest first."""
        fits = [fit for fit in self.layouts if fit.peak_bytes <= self.capacity_bytes]
        return tuple(sorted(fits, key=lambda fit: fit.pp))


def find_misfit(estimate: StepEstimate, case: PlanCase, costs: CostModel) -> Misfit | None:
    """Return what is missing and what else there is; None where the plan fits or capacities are not known."""
    missing = estimate.over_capacity(costs)
    capacity = case.profile.memory_bytes
    if not missing or capacity is None:
        return None
    layouts = sorted(_layouts(case, costs), key=lambda fit: fit.peak_bytes)
    return Misfit(missing_bytes=missing, capacity_bytes=capacity, layouts=tuple(layouts))


def _layouts(case: PlanCase, costs: CostModel) -> Iterator[Fit]:
    for parallel in case.depths():
        plan = case.layout(parallel)
        memory = program_memory(list_schedule(plan, costs), plan.placement, costs.workload)
        yield Fit(dp=parallel.dp, pp=parallel.pp, peak_bytes=max(use.peak_bytes for use in memory.values()))
