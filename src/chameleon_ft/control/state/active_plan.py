"""The plan of a generation, as the state of the run keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import PlainValidator

from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import InFlightLimit

__all__ = ["ActivePlan", "MovedLayers"]


def _read_plan(value: Plan | str) -> Plan:
    return Plan.from_json(value) if isinstance(value, str) else value


_StoredPlan = Annotated[Plan, PlainValidator(_read_plan)]


@dataclass(frozen=True, slots=True)
class MovedLayers:
    """The size of a change of placement: layers and messages that move, rounds that they take, and their bytes."""

    layers: int
    messages: int
    rounds: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePlan:
    """What a generation was begun with: the part of a `RecoveryPlan` that is still of interest then.

    Attributes:
        plan: what is trained.
        ceiling: what its workers can keep at most.
        first_step: the step that it begins with.
        policy: the name of what was chosen, and
        action: its description.
        everyone: workers that have orders, ascending: those that train, and those that only send what they hold.
        moved: how the placement changes; None if it does not.
        lost_layers: layers that no worker held any more.
    """

    plan: _StoredPlan
    ceiling: Mapping[int, InFlightLimit] = field(default_factory=lambda: FrozenMap({}))
    first_step: int
    policy: str
    action: str
    everyone: tuple[int, ...]
    moved: MovedLayers | None = None
    lost_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ceiling", FrozenMap(self.ceiling))

    @property
    def rounds(self) -> int:
        """Rounds in which layers move."""
        return 0 if self.moved is None else self.moved.rounds
