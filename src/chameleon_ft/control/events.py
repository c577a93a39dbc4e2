"""The events that change the state of a run: what happens outside, each with its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.state.incident import Fault
from chameleon_ft.control.state.scale_up import LayerBytes
from chameleon_ft.control.wire.messages import Departure, Message
from chameleon_ft.observe import RunStatus

__all__ = [
    "Considered",
    "Decided",
    "DecisionFailed",
    "DecisionsPrepared",
    "Disconnected",
    "EndRequested",
    "Event",
    "FaultsInjected",
    "Interrupted",
    "Launched",
    "Moment",
    "Received",
    "Rejected",
    "Ticked",
]


@dataclass(frozen=True, slots=True)
class Moment:
    """A time by both clocks: Unix seconds for records, monotonic seconds for what is waited for."""

    unix_s: float
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    at: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(_Event):
    """A message has come on a connection."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected(_Event):
    """A connection has ended."""

    connection: int
    how: Departure


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected(_Event):
    """A connection was turned away."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(_Event):
    """Time went on; comes about every `TICK_S` seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsInjected(_Event):
    """Failures that were injected: all that this run has seen, oldest first."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(_Event):
    """The answer to `Decide` or `DecideStart`.

    Attributes:
        weighed_at: when it was known what is chosen, in Unix seconds.
        looked_up: whether that had been prepared.
    """

    question: int
    plan: RecoveryPlan
    weighed_at: float = 0.0
    looked_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFailed(_Event):
    """Nothing can be done about `question`, or the plan that was decided on cannot be carried out."""

    question: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(_Event):
    """The orders of a generation have been handed out."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered(_Event):
    """The answer to `ConsiderScaleUp`.

    Attributes:
        live: workers that it was made for.
        is_change: whether it is better to stop for the newcomers than to continue as before.
        incoming: worker -> layers that come to it in that case.
        error: why there is no answer; None if there is one.
    """

    question: int
    live: tuple[int, ...] = ()
    is_change: bool = False
    incoming: Mapping[int, LayerBytes]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsPrepared(_Event):
    """Decisions on the loss of each of `losses` single workers are prepared; or none will be, because of an error."""

    losses: int
    prepare_s: float
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted(_Event):
    """The user wants the run to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequested(_Event):
    """The run has to end for a reason outside the state machine."""

    status: RunStatus
    reason: str


Event: TypeAlias = (
    Received
    | Disconnected
    | Rejected
    | Ticked
    | FaultsInjected
    | Decided
    | DecisionFailed
    | Launched
    | Considered
    | DecisionsPrepared
    | Interrupted
    | EndRequested
)
