"""The events that change the state of a run: what happens outside the state machine, each with its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from chameleon_ft.coordinator.state.incidents import Fault
from chameleon_ft.events.records import RunStatus
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.protocol.codec import message_of
from chameleon_ft.protocol.messages import Message
from chameleon_ft.recovery.generation import GenerationSpec


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
    """A choice between candidates.

    Attributes:
        record: the fields of its record, except generation and duration.
        step_s, stall_s: the seconds predicted for the chosen candidate.
        is_prepared: It was made before the workers were lost.
        chosen_at: the Unix time at which it was known.
    """

    record: Mapping[str, object]
    step_s: float | None
    stall_s: float | None
    is_prepared: bool
    chosen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Event):
    """The answer to `Task.DECIDE`.

    Attributes:
        spec: the next generation, still without its number.
        choice: the choice that led to it; None if there was nothing to choose.
        repeated_s: seconds of a step whose work is repeated.
        is_provisional: A better plan may be found later.
    """

    question: int
    spec: GenerationSpec
    choice: Choice | None = None
    repeated_s: float = 0.0
    is_provisional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFailed(Event):
    """There is no feasible plan."""

    question: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered(Event):
    """The answer to `Task.CONSIDER_SCALE_UP`.

    Attributes:
        staying: live workers that the decision was made for, without those that are to leave.
        plans: the generations to switch to, one after the other; if there are none, training continues as before.
        record: the fields of the record of the decision, except for the generation.
        reason: why there is no plan without the workers that are to leave.
        error: why the decision failed, if it did.
    """

    question: int
    staying: tuple[int, ...] = ()
    plans: tuple[GenerationSpec, ...] = ()
    record: Mapping[str, object] = FrozenMap({})
    reason: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkFailed(Event):
    """A checkpoint whose parts are all stored could not be marked as complete; may follow `CompleteCheckpoint`."""

    step: int
    error: str


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
