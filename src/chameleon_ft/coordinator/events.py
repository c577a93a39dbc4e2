"""The events that change the state of a run: what happens outside the state machine, each with its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BeforeValidator

from chameleon_ft.coordinator.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.coordinator.state.active_plan import ActivePlan
from chameleon_ft.coordinator.state.incidents import Fault
from chameleon_ft.events.records import RunStatus
from chameleon_ft.protocol.codec import message_of
from chameleon_ft.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Moment:
    """A time by both clocks: Unix seconds for records, monotonic seconds for deadlines."""

    unix_s: float
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    at: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Event):
    """A message has come on a connection."""

    connection: int
    message: Annotated[Message, BeforeValidator(message_of)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected(Event):
    """A connection has ended; `will_return`: its peer has said that it makes another one."""

    connection: int
    will_return: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent(Event):
    """A peer has not answered a ping for `since_s` seconds; repeated until it does."""

    connection: int
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(Event):
    """The clock advanced; comes about every `TICK_S` seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TookOver(Event):
    """This coordinator continues the run of one that is lost, in a higher term; all connections are lost.

    `address`: where this one stood by.
    """

    term: int
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermClaimed(Event):
    """This coordinator, whose term had run out, has claimed the next one; no other has led meanwhile.

    `reason`: why it had run out; empty if this process did not run.
    """

    term: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsInjected(Event):
    """Failures were injected: all that this run has seen, oldest first."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice between candidates: the fields of its record, and the seconds predicted for the chosen one."""

    record: Mapping[str, object]
    step_s: float | None
    stall_s: float | None

    @classmethod
    def of(cls, plan: RecoveryPlan) -> Self | None:
        """Return the choice that led to a plan; None if there was nothing to choose."""
        if plan.decision is None:
            return None
        chosen = plan.decision.chosen
        step_s, stall_s = (None, None) if chosen is None else (chosen.step_s, chosen.stall_s)
        return cls(record=plan.to_json(), step_s=step_s, stall_s=stall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Event):
    """The answer to `Task.DECIDE`; `chosen_at` is the Unix time at which the choice was known."""

    question: int
    plan: RecoveryPlan
    choice: Choice | None = None
    chosen_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFailed(Event):
    """There is no feasible plan, or the chosen one cannot be carried out."""

    question: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Event):
    """The orders of a generation have been sent."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered(Event):
    """The answer to `Task.CONSIDER_SCALE_UP`."""

    question: int
    # The live workers that the decision was made for, without those that are to leave.
    staying: tuple[int, ...] = ()
    # The run switches to these plans, one after the other; without any it continues as before.
    plans: tuple[ActivePlan, ...] = ()
    # Why there is no plan without the workers that are to leave.
    reason: str = ""
    # Why the decision failed.
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkFailed(Event):
    """A checkpoint whose parts are all stored could not be marked as complete; may follow `CompleteCheckpoint`."""

    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFailed(Event):
    """The orders of a generation cannot be worked out; answers `Task.PREPARE_GENERATION`."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsMeasured(Event):
    """The answer to `MeasureOperations`, unless the step is no measure; see the signal of this name for the fields.

    `links`: (worker, worker, ratio, kind) of each link, as in the signal `LinksMeasured`.
    """

    worker: int
    generation: int
    step: int
    ratio: float
    group: int | None
    links: tuple[tuple[int, int, float, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted(Event):
    """A request to end the run: of the user, or with a `signal` (SIGTERM or SIGHUP) of the cluster."""

    signal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequested(Event):
    """The run has to end for a reason outside the state machine."""

    status: RunStatus
    reason: str
