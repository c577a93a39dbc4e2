"""The plan of a generation, as the state of the run keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chameleon_ft.control.decisions.transition import PlannedTransition
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import InFlightLimit
from chameleon_ft.transfer import Transfer

__all__ = ["ActivePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePlan:
    """A plan in force. `policy` and `action` describe it to people."""

    plan: Plan  # what is trained
    in_flight_limits: Mapping[int, InFlightLimit] = FrozenMap({})  # micro-batches that its workers can keep at most
    first_step: int  # the step that it begins with
    policy: str
    action: str
    transition: PlannedTransition | None = None  # change of the placement; None if it stays
    lost_layers: tuple[int, ...] = ()  # layers that no worker held any more

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))

    @property
    def participants(self) -> tuple[int, ...]:
        """The workers that have orders, ascending: those that train, and those that only send what they hold."""
        return self.plan.workers if self.transition is None else self.transition.participants

    @property
    def transfer(self) -> Transfer | None:
        """The layers that move; None if the placement stays."""
        return None if self.transition is None else self.transition.transfer
