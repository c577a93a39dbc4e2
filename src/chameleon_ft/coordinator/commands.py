"""The commands that a change of state leads to: work outside the state machine.

They are carried out in their order, with the state that the event led to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from chameleon_ft.events import lines
from chameleon_ft.events.records import RunStatus
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.protocol.messages import Message
from chameleon_ft.protocol.parts import OperationTimes
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.transfer import Transfer


class Command:
    """Base of all commands."""

    __slots__ = ()


class Task(Command, Enum):
    """A command without arguments: it depends on the state alone."""

    DECIDE = "decide"
    """Choose the first plan, or how to continue while every survivor waits. Answer: `Decided` or `DecisionFailed`."""
    CONSIDER_SCALE_UP = "consider scale-up"
    """Decide during training whether another plan is better, or needed for workers to leave. Answer: `Considered`."""
    PREPARE_GENERATION = "prepare generation"
    """Send the orders of the next generation, to be prepared."""
    BEGIN_GENERATION = "begin generation"
    """Record the generation that was prepared, and begin to measure it: it is in force."""
    BEGIN_STAGE = "begin stage"
    """Begin to measure the plan with which the generation in force continues, because the batch has grown."""
    PREPARE_DECISIONS = "prepare decisions"
    """Prepare decisions on the next loss during training, unless the prepared ones still fit."""
    SPECULATE = "speculate"
    """Make the part of the next decision that does not depend on the reports of the survivors, while they stop."""
    FORGET_DECISIONS = "forget decisions"
    """Discard the prepared decisions."""


@dataclass(frozen=True, slots=True)
class Migrate(Command):
    """Send some workers of a generation the order to move layers while it trains."""

    spec: GenerationSpec
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send(Command):
    """Send a message, if the connection is still there."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Acknowledge(Command):
    """Tell a peer the term, which of its messages have been handled, and the coordinators that stand by."""

    connection: int


@dataclass(frozen=True, slots=True)
class Resign(Command):
    """Stop acting as coordinator: a peer has obeyed another one."""


@dataclass(frozen=True, slots=True)
class Welcome(Command):
    """Send a rank that has joined all that it needs to load its job."""

    connection: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drop(Command):
    """Close a connection without waiting for the other end, which may not answer."""

    connection: int


@dataclass(frozen=True, slots=True)
class Record(Command):
    """Write a record and show it."""

    record: lines.Record


@dataclass(frozen=True, slots=True)
class LogFault(Command):
    """Note that a worker is about to be killed on purpose, so that its detection can be timed."""

    worker: int


@dataclass(frozen=True, slots=True)
class SaveEvidence(Command):
    """Write evidence of a worker's hang to a file of `RunDirectory.incidents`."""

    file: str
    text: str


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint(Command):
    """Mark the checkpoint that resumes at `step` as complete, and remove those that are not needed any more.

    The newest one up to step `agreed` is kept, because the holders of all layers agreed until then.
    """

    step: int
    agreed: int
    # As in `CheckpointParts`; so are the seals.
    slices: frozenset[tuple[int, int, int]] = frozenset()
    seals: Mapping[str, str] = field(default_factory=lambda: FrozenMap({}))
    # The results of its state, if it was evaluated before.
    evaluation: Mapping[str, float] = field(default_factory=lambda: FrozenMap({}))


@dataclass(frozen=True, slots=True)
class NoteEvaluation(Command):
    """Keep the results of an evaluation with the checkpoint that resumes at `step`, if that is complete already."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DistrustCheckpoints(Command):
    """Mark the checkpoints that resume after this step as damaged: their state may be wrong, or cannot be read."""

    after: int


@dataclass(frozen=True, slots=True)
class DiscardCheckpoint(Command):
    """Remove an incomplete checkpoint, and checkpoints that are no longer needed.

    `agreed` is as for `CompleteCheckpoint`.
    """

    step: int
    agreed: int


@dataclass(frozen=True, slots=True)
class MarkDamaged(Command):
    """Mark the checkpoint that resumes at `step` as damaged, so that no run reads it."""

    step: int


@dataclass(frozen=True, slots=True)
class Finish(Command):
    """End the run; nothing follows."""

    status: RunStatus
    reason: str


@dataclass(frozen=True, slots=True)
class Launch(Command):
    """Send the orders of a generation, record it, and begin to measure it."""

    spec: GenerationSpec
    is_first: bool


@dataclass(frozen=True, slots=True)
class MeasureOperations(Command):
    """Record the durations of a worker's operations in a step. Answer: `OperationsMeasured`."""

    worker: int
    step: int
    times: OperationTimes


@dataclass(frozen=True, slots=True)
class MeasureStep(Command):
    """Record the duration of a step."""

    step_s: float


@dataclass(frozen=True, slots=True)
class MeasureMigration(Command):
    """Record the duration of a migration that is over."""

    migration: Transfer
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasureTransfer(Command):
    """Record the duration of the newest generation's transfer."""

    transfer_s: float
