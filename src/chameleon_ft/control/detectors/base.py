"""The interface of failure detectors: the signals that they are given and the findings that they return."""

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
    """A worker's control connection is gone."""

    worker: int
    how: Departure


@dataclass(frozen=True, slots=True)
class ErrorReported(Signal):
    """A rank ends itself because of an error in its own code."""

    worker: int
    error: str
    step: int  # the step that is being run
    since_step: int | None  # steps that had been committed when the worker could take part; None if it does not yet
    log: str  # the worker's log file


@dataclass(frozen=True, slots=True)
class ProbeAnswered(Signal):
    """A worker, or its agent, answered a probe."""

    worker: int
    answer: Position | ProcessState


@dataclass(frozen=True, slots=True)
class OperationsTimed(Signal):
    """A worker's longest operation of a step took this long."""

    longest_s: float


@dataclass(frozen=True, slots=True)
class StepCommitted(Signal):
    """A step was committed."""

    at_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Progressed(Signal):
    """Orders were given, or a worker began to carry them out."""

    at_s: float


@dataclass(frozen=True, slots=True)
class StopRequested(Signal):
    """Every live worker was told to quiesce."""

    at_s: float


@dataclass(frozen=True, slots=True)
class MessageFailed(Signal):
    """A message between `reporter` and `peer` failed; None if the operation does not tell the peer."""

    reporter: int
    peer: int | None
    error: str


@dataclass(frozen=True, slots=True)
class AllQuiesced(Signal):
    """All survivors of `generation` have quiesced; `is_explained` tells whether a loss explains failed messages."""

    generation: int
    is_explained: bool


@dataclass(frozen=True, slots=True)
class Ticked(Signal):
    """Time went on. For `held_up_s` seconds the coordinator itself did not run, for which no worker is to blame."""

    at_s: float
    held_up_s: float
    unquiesced: tuple[int, ...]  # live workers that were told to quiesce and have not


class Finding:
    """Base of all findings."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Lost(Finding):
    """A worker has to be given up."""

    worker: int
    noticed_by: NoticedBy
    cause: str


@dataclass(frozen=True, slots=True)
class Fatal(Finding):
    """The run cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class SendProbe(Finding):
    """All workers and agents have to be probed."""

    probe: int


@dataclass(frozen=True, slots=True)
class Note(Finding):
    """An event to be recorded."""

    event: str
    fields: Mapping[str, Any]


class Detector(Protocol):
    """One way to notice a failure: a frozen value that turns signals into findings. Reads no clock."""

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """Return the detector after a signal, and its findings; it ignores signals that it does not use."""
