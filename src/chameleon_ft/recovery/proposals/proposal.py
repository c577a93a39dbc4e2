"""A proposal of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import InFlightLimit, PipelineSchedule
from chameleon_ft.search import FoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan to continue with, or why there is none of its kind.

    Attributes:
        name: the kind of plan; different for every proposal of a policy.
        plan: the plan, on live workers; None if there is none.
        in_flight_limits: the most that its workers can keep; workers that are left out are not bounded.
        from_checkpoint: whether the state comes from a checkpoint, and not from other workers.
        reason: why there is no plan; None if there is one.
        schedules: of its pipelines, if a search has found them already, for `best_parts`.

    Raises:
        PlanError: both a plan and a reason, or neither.
    """

    name: str
    plan: Plan | None = None
    in_flight_limits: Mapping[int, InFlightLimit] = field(default_factory=lambda: FrozenMap({}))
    from_checkpoint: bool = False
    reason: str | None = None
    schedules: tuple[PipelineSchedule, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))
        if (self.plan is None) == (self.reason is None):
            raise PlanError(f"proposal {self.name!r} needs either a plan or a reason why there is none")

    @classmethod
    def of(cls, name: str, found: FoundPlan, *, from_checkpoint: bool = False) -> Proposal:
        """Propose a plan of a search."""
        return cls(
            name=name,
            plan=found.plan,
            in_flight_limits=found.in_flight_limits,
            from_checkpoint=from_checkpoint,
            schedules=found.schedules,
        )
