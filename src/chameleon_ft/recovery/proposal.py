"""What a policy hands in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import InFlightLimit, PipelineSchedule

__all__ = ["Proposal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan to go on with, or why there is none of its kind.

    Attributes:
        name: what kind of plan it is; different for every proposal of a policy.
        plan: the plan, on live workers; None where there is none.
        in_flight_limits: what its workers can keep at most; those that are left out are not bounded.
        from_checkpoint: whether the state comes from a checkpoint, and not from other workers.
        reason: why there is no plan; None where there is one.
        schedules: of pipelines, as far as they are known already, for `best_parts`.

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
