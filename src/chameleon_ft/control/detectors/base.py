"""The interface of failure detectors: the signals they receive and the findings they return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from chameleon_ft.control.wire.messages import Departure, Position, ProcessState
from chameleon_ft.observe import NoticedBy

__all__ = [
    "AllQuiesced",
    "ConnectionEnded",
    "Detector",
    "ErrorReported",
    "Fatal",
    "Finding",
    "Lost",
    "MessageFailed",
    "Note",
    "OperationsTimed",
    "ProbeAnswered",
    "ProcessExited",
    "Progressed",
    "SendProbe",
    "Signal",
    "StepCommitted",
    "StopRequested",
    "Ticked",
]


class Signal:
    """Base of all signals. Their times are monotonic seconds."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ProcessExited(Signal):
    """An agent reaped a worker's process."""

    worker: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class ConnectionEnded(Signal):
    """A worker's control connection ended."""

    worker: int
    how: Departure


@dataclass(frozen=True, slots=True)
class ErrorReported(Signal):
    """A rank is about to exit because of an error in its own code."""

    worker: int
    error: str
    step: int  # the step that was running
    since_step: int | None  # committed steps when the worker began to take part; None if it has not begun
    log: str  # the worker's log file


@dataclass(frozen=True, slots=True)
class ProbeAnswered(Signal):
    """A worker, or its agent, answered a probe."""

    worker: int
    answer: Position | ProcessState


@dataclass(frozen=True, slots=True)
class OperationsTimed(Signal):
    """A worker reported the duration of its longest operation in a step."""

    longest_s: float


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
    """Every live worker was told to quiesce."""

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
    unquiesced: tuple[int, ...]  # live workers that were told to quiesce but have not yet


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
    """The run cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class SendProbe(Finding):
    """The coordinator must probe all workers and agents."""

    probe: int


@dataclass(frozen=True, slots=True)
class Note(Finding):
    """An event to record."""

    event: str
    fields: Mapping[str, Any]


class Detector(Protocol):
    """One way to detect a failure: a frozen value that turns signals into findings and never reads the clock."""

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """Return the detector's next value and its findings; signals that it does not use change nothing."""
