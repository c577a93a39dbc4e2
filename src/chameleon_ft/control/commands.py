"""The commands that a change of state leads to: what is to be done outside, in the order in which they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from chameleon_ft.control.decisions.recovery_plan import ClusterState, RecoveryPlan
from chameleon_ft.control.decisions.request import DecisionRequest, LossRequest
from chameleon_ft.control.wire.messages import Message, OperationTimes
from chameleon_ft.observe import FailureRecord, JoinRecord, OutcomeRecord, RunStatus, StepRecord

__all__ = [
    "Command",
    "CompleteCheckpoint",
    "ConsiderScaleUp",
    "Decide",
    "DecideStart",
    "Drop",
    "Finish",
    "ForgetDecisions",
    "Launch",
    "LogFault",
    "MeasureOperations",
    "MeasureStep",
    "MeasureTransfer",
    "OtherRecord",
    "PrepareDecisions",
    "Record",
    "RecordScaleUp",
    "Send",
    "Welcome",
]


# --- connections -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, if the connection is still there."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer a rank that has joined with all that it needs to load what it trains."""

    connection: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a connection without waiting for the other end, which may not answer."""

    connection: int


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OtherRecord:
    """An event that has no record type of its own; the fields are JSON values."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """Write down what happened, and show it."""

    record: StepRecord | FailureRecord | JoinRecord | OutcomeRecord | OtherRecord


@dataclass(frozen=True, slots=True)
class LogFault:
    """Note that a worker is about to be killed on purpose, so that its detection can be timed."""

    worker: int


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """Mark the checkpoint that resumes at `step` as complete, and remove those that are not needed any more."""

    step: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; nothing follows."""

    status: RunStatus
    reason: str


# --- decisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecideStart:
    """Choose the first plan, with the newest checkpoint if the run is resumed. Answered by `Decided`."""

    question: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decide:
    """Choose how to continue; every survivor waits. Answered by `Decided` or `DecisionFailed`."""

    question: int
    request: LossRequest
    cluster: ClusterState


@dataclass(frozen=True, slots=True)
class Launch:
    """Work out a generation's orders and hand them out. Answered by `Launched` or `DecisionFailed`.

    Attributes:
        question: that led to it.
        hosts: worker -> its host.
        connections: of the workers that get orders.
        is_first: whether the run begins with it.
    """

    question: int
    generation: int
    plan: RecoveryPlan
    hosts: Mapping[int, str]
    connections: Mapping[int, int]
    is_first: bool


@dataclass(frozen=True, slots=True)
class ConsiderScaleUp:
    """Decide beside training whether to stop for the newcomers. Answered by `Considered`."""

    question: int
    request: DecisionRequest


@dataclass(frozen=True, slots=True)
class RecordScaleUp:
    """Record that what was considered is to continue as before."""

    question: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class PrepareDecisions:
    """Prepare decisions on the next loss beside training; what fits already, stays."""

    request: DecisionRequest


@dataclass(frozen=True, slots=True)
class ForgetDecisions:
    """Discard the prepared decisions."""


# --- calibration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasureOperations:
    """Take in how long the operations of a worker took in a step."""

    worker: int
    times: OperationTimes


@dataclass(frozen=True, slots=True)
class MeasureStep:
    """Take in how long a step took."""

    step_s: float


@dataclass(frozen=True, slots=True)
class MeasureTransfer:
    """Take in how long the transfer of the generation took that was launched last."""

    transfer_s: float
    hosts: Mapping[int, str]


Command: TypeAlias = (
    Send
    | Welcome
    | Drop
    | Record
    | LogFault
    | CompleteCheckpoint
    | Finish
    | DecideStart
    | Decide
    | Launch
    | ConsiderScaleUp
    | RecordScaleUp
    | PrepareDecisions
    | ForgetDecisions
    | MeasureOperations
    | MeasureStep
    | MeasureTransfer
)
