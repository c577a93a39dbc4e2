"""The interface of failure detectors: the signals they receive and the findings they return."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from chameleon_ft.events.base import Event
from chameleon_ft.events.records import NoticedBy
from chameleon_ft.protocol.messages import Position, ProcessState

StartStage = Literal["connecting", "loading", "vacant"]
"""Of a worker that does not take part yet. Vacant: it was lost before the run began, and no process has its place."""


class Signal:
    """Base of all signals. Their times are monotonic seconds."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ProcessExited(Signal):
    """An agent reaped a worker's process."""

    worker: int
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class ConnectionEnded(Signal):
    """A worker's control connection ended."""

    worker: int


@dataclass(frozen=True, slots=True)
class Silent(Signal):
    """A worker has not answered a ping for `since_s` seconds; repeated until it does."""

    worker: int
    since_s: float
    has_agent: bool
    in_first_step: bool


@dataclass(frozen=True, slots=True)
class ErrorReported(Signal):
    """A rank has met an error in its own code."""

    worker: int
    error: str
    # The step that was running.
    step: int
    # The committed steps when the worker began to take part; None if it has not begun.
    since_step: int | None
    log: str
    # Whether it still holds the state before the step.
    is_alive: bool = False
    # Whether other workers hold all that it holds.
    is_replaceable: bool = True


@dataclass(frozen=True, slots=True)
class ProbeAnswered(Signal):
    """A worker, or its agent, answered a probe."""

    worker: int
    answer: Position | ProcessState
    at_s: float
    in_first_step: bool


@dataclass(frozen=True, slots=True)
class OperationsTimed(Signal):
    """A worker reported the duration of its longest operation in a step."""

    longest_s: float
    in_first_step: bool


@dataclass(frozen=True, slots=True)
class OperationsMeasured(Signal):
    """The operations of a worker in a step took `ratio` times as long as expected.

    A worker compares with those of its `group`, of all workers that run the same layers; with any other if it is None.
    """

    worker: int
    generation: int
    step: int
    ratio: float
    group: int | None


@dataclass(frozen=True, slots=True)
class LinksMeasured(Signal):
    """Messages on links took so many times as long in a step as expected; links of a kind compare with each other."""

    generation: int
    step: int
    # The workers of a link, ascending -> (ratio, kind).
    links: Mapping[tuple[int, int], tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Fenced(Signal):
    """A worker is no longer part of the run."""

    worker: int


@dataclass(frozen=True, slots=True)
class StepCommitted(Signal):
    """A step was committed."""

    at_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Progressed(Signal):
    """The coordinator sent orders, or a worker began to carry them out."""

    at_s: float


@dataclass(frozen=True, slots=True)
class StopRequested(Signal):
    """`Stop` was sent to every live worker."""

    at_s: float


@dataclass(frozen=True, slots=True)
class MessageFailed(Signal):
    """A message between `reporter` and `peer` failed; `peer` is None if the operation does not identify it."""

    reporter: int
    peer: int | None
    error: str


@dataclass(frozen=True, slots=True)
class AllQuiesced(Signal):
    """All survivors of `generation` have quiesced; `is_explained`: whether a loss explains the failed messages."""

    generation: int
    is_explained: bool


@dataclass(frozen=True, slots=True)
class Ticked(Signal):
    """The clock advanced. For `held_up_s` seconds the coordinator did not run, so no worker is to blame for them."""

    at_s: float
    held_up_s: float
    # Live workers that have not quiesced since `StopRequested`.
    unquiesced: tuple[int, ...]
    # Live workers that the generation needs.
    participants: tuple[int, ...]
    # Live workers to which that applies; see `Worker.has_stepped`.
    in_first_step: Collection[int]


@dataclass(frozen=True, slots=True)
class Starting(Signal):
    """The clock advanced while workers were starting, or just after; `held_up_s` is as for `Ticked`."""

    at_s: float
    held_up_s: float
    # By worker.
    stages: Mapping[int, StartStage]


class Finding:
    """Base of all findings."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Lost(Finding):
    """A worker must be given up."""

    worker: int
    noticed_by: NoticedBy
    cause: str


@dataclass(frozen=True, slots=True)
class Fatal(Finding):
    """The run cannot continue, and `explained` is a worker whose loss had the same cause and counts as none."""

    reason: str
    explained: int | None = None
    # Whether the state before the step is intact, and is to be in a checkpoint.
    is_saved: bool = False


@dataclass(frozen=True, slots=True)
class Reading(Finding):
    """A worker has been reading a sample for `since_s` seconds, and may go on for `limit_s` seconds in all."""

    worker: int
    doing: str
    since_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Slow(Finding):
    """Since a step, a worker computes at this speed relative to the others."""

    worker: int
    speed: float
    since_step: int


@dataclass(frozen=True, slots=True)
class Recovered(Finding):
    """A worker is as fast as the others again; or counts as such, to be tried, after it was not in the plan."""

    worker: int
    is_trial: bool


@dataclass(frozen=True, slots=True)
class SlowLink(Finding):
    """Since a step, micro-batches take 1 / `speed` times as long between two workers as on other links."""

    workers: tuple[int, int]
    speed: float
    since_step: int


@dataclass(frozen=True, slots=True)
class RecoveredLink(Finding):
    """Messages between two workers take as long as on other links again; `is_trial` is as for `Recovered`."""

    workers: tuple[int, int]
    is_trial: bool


@dataclass(frozen=True, slots=True)
class SendProbe(Finding):
    """The coordinator must probe all workers and agents."""

    probe: int


@dataclass(frozen=True, slots=True)
class AskAgent(Finding):
    """The coordinator must ask the agent of a worker whether its process is stopped."""

    worker: int


@dataclass(frozen=True, slots=True)
class MessagesOverdue(Finding):
    """All workers wait for messages that do not come: the generation must end."""

    reports: tuple[MessageFailed, ...]


@dataclass(frozen=True, slots=True)
class LinksCut(Finding):
    """Nothing passes between the two workers of each report, at least in one direction."""

    reports: tuple[MessageFailed, ...]


@dataclass(frozen=True, slots=True)
class Note(Finding):
    """An event to record."""

    event: Event


class Detector(Protocol):
    """One way to detect a failure: a frozen dataclass that turns signals into findings and never reads the clock.

    All of its fields have defaults, but for `timeouts`, the configured ones, if it has that. It is stored as JSON with
    the state of the run, so the types of its fields are those that pydantic reads back.
    """

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """Return the detector's next value and its findings; signals that it does not use change nothing."""
