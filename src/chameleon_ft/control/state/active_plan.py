"""The plan of a generation, as stored in the state of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter
from pydantic_core import to_json

from chameleon_ft.control.decisions.transition import PlannedTransition
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.plan.shards import Sharding, SliceMove
from chameleon_ft.plan.snapshots import SnapshotLayout
from chameleon_ft.schedule import InFlightLimit
from chameleon_ft.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePlan:
    """A plan in force. `policy` and `action` describe it in records and output."""

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit] = FrozenMap({})  # worker -> its limit
    first_step: int  # first step trained under the plan
    policy: str
    action: str
    transition: PlannedTransition | None = None  # change of placement; None if the placement stays
    lost_layers: tuple[int, ...] = ()  # layers that no live worker held after the loss
    rest: RestOfStep | None = None  # of step `first_step`, if it was interrupted and is completed
    migration: Transfer | None = None  # layers that move while the plan trains; their receivers are in its placement
    hold_s: float = 0.0  # with `migration`: seconds that a vote may wait for the layers and the switch that follows
    migration_s: float = 0.0  # with `migration`: predicted seconds until all layers have arrived
    predicted_step_s: float | None = None  # seconds of a step; None if the decision is recorded by itself
    predicted_stall_s: float | None = None  # seconds without progress before the first step; likewise
    sharding: Sharding | None = None  # the owners of slices of the optimizer's state; None: each holder has all
    next_sharding: Sharding | None = None  # with `migration`: the owners once all has arrived, if they differ
    snapshots: SnapshotLayout | None = None  # where snapshots are kept; None: none are taken
    no_snapshots: str = ""  # why none are taken, if the run would take some by itself

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))

    def pack(self) -> str:
        """Write the plan as one line of JSON; `unpack` reads it back to an equal plan."""
        return to_json(self, fallback=dict, inf_nan_mode="constants").decode()

    @staticmethod
    def unpack(text: str) -> ActivePlan:
        """Read the output of `pack`. Raises ValidationError for any other text."""
        return TypeAdapter(ActivePlan).validate_json(text)

    @property
    def witnesses(self) -> Placement | None:
        """The placement, if holders update their layers independently; None if owners of slices send them updates."""
        return self.plan.placement if self.sharding is None else None

    @property
    def owners(self) -> int | None:
        """The owners of a slice of the optimizer's state, before any loss; None if every holder keeps all of it."""
        if self.sharding is None:
            return None
        return max(len(each.owners) for own in self.sharding.layers for each in own.slices)

    @property
    def migrating_slices(self) -> tuple[SliceMove, ...]:
        """The slices of the optimizer's state that move while the plan trains."""
        if self.sharding is None or self.next_sharding is None:
            return ()
        return self.next_sharding.moves_from(self.sharding)

    @property
    def participants(self) -> tuple[int, ...]:
        """Workers with orders, in ascending order: the workers of the plan, and any that only send layers."""
        return self.plan.workers if self.transition is None else self.transition.participants

    @property
    def transfer(self) -> Transfer | None:
        """The layers that move before the plan trains; None if there are none."""
        return None if self.transition is None else self.transition.transfer
