"""The messages between coordinator, agents and ranks: one JSON object each.

A rank is one process of the run. `generation` is the number of a membership with its plan; receivers drop messages of a
generation that is over.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from chameleon_ft.config import FailurePhase
from chameleon_ft.errors import ControlError
from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.rest import GradientKey, StepProgress
from chameleon_ft.schedule import Operation
from chameleon_ft.schedule.program import operations_from
from chameleon_ft.schedule.records import PROGRAM_RECORD, Records
from chameleon_ft.sync import Segment

__all__ = [
    "BoundaryMessage",
    "CheckpointSaved",
    "Committed",
    "Crashed",
    "Departure",
    "Exit",
    "Finish",
    "Finished",
    "Hello",
    "HostHello",
    "Inject",
    "Kill",
    "Message",
    "OperationTimes",
    "Pause",
    "PeerFailed",
    "Position",
    "Preallocate",
    "Preallocated",
    "Probe",
    "ProcessState",
    "Progress",
    "Quiesced",
    "Ready",
    "Refused",
    "Rest",
    "SlowIO",
    "Spawn",
    "StartGeneration",
    "Started",
    "Stop",
    "Switched",
    "Transition",
    "Vote",
    "Welcome",
    "WorkerExited",
    "decode",
    "encode",
]


class MessagePart(BaseModel):
    """Base of messages and their parts: frozen, and no other fields are accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(MessagePart):
    """Base of all messages; `type` tells them apart."""

    type: str


class Vote(MessagePart):
    """The sums of a step's vote, with which any rank can apply that step."""

    grad_square_sum: float  # squared L2 norm of the summed, not yet averaged, gradient of the whole model
    loss_sum: float
    terms: int  # loss terms of the global batch; the gradient and the loss are divided by it
    samples: int
    finish: bool  # whether some rank was told to end the run after this step
    pause: bool = False  # whether some rank was told to pause after this step


class OperationTimes(MessagePart):
    """Median seconds of a worker's operations in a step; 0 for a kind that it did not run."""

    forward_s: float
    backward_s: float
    longest_s: float


class BoundaryMessage(MessagePart):
    """Shape and torch dtype name of a layer's output for one micro-batch."""

    shape: tuple[int, ...]
    dtype: str


class Transition(MessagePart):
    """A worker's part in the change to another placement, before a generation trains; see docs/transition.md."""

    participants: tuple[int, ...]  # ascending: workers of the placement in force and of the new one
    keep: tuple[int, ...]  # layers that this worker does not give up before the switch; if none, it begins anew
    moves: tuple[tuple[int, int, int, int, int], ...]
    """(round, source, destination, layer, bytes) of all that it sends and receives, by rounds; the plan's bytes."""


_Hops = tuple[tuple[int, int, tuple[int, ...]], ...]
"""(first layer, layer after the last, micro-batches) of hops"""


class Progress(MessagePart):
    """A `StepProgress`, in numbers; its attributes are described there."""

    contributed: _Hops
    saved: _Hops
    deferred: _Hops
    counted: tuple[int, ...]
    totals: tuple[GradientKey, ...]
    activations: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, progress: StepProgress) -> Progress:
        """Pack what a rank holds of a step."""
        return cls(
            contributed=_packed(progress.contributed),
            saved=_packed(progress.saved),
            deferred=_packed(progress.deferred),
            counted=tuple(sorted(progress.counted)),
            totals=tuple(sorted(progress.totals)),
            activations=tuple(sorted(progress.activations)),
            gradients=tuple(sorted(progress.gradients)),
        )

    def unpack(self) -> StepProgress:
        """Return what the rank holds of the step."""
        return StepProgress(
            contributed=_unpacked(self.contributed),
            saved=_unpacked(self.saved),
            deferred=_unpacked(self.deferred),
            counted=frozenset(self.counted),
            totals=frozenset(self.totals),
            activations=frozenset(self.activations),
            gradients=frozenset(self.gradients),
        )


def _packed(hops: Iterable[tuple[int, LayerRange]]) -> _Hops:
    by_layers: dict[LayerRange, list[int]] = defaultdict(list)
    for micro_batch, layers in sorted(hops):
        by_layers[layers].append(micro_batch)
    return tuple((layers.start, layers.stop, tuple(own)) for layers, own in by_layers.items())


def _unpacked(hops: _Hops) -> frozenset[tuple[int, LayerRange]]:
    ranges = ((LayerRange(start, stop), micro_batches) for start, stop, micro_batches in hops)
    return frozenset((micro_batch, layers) for layers, micro_batches in ranges for micro_batch in micro_batches)


class Rest(MessagePart):
    """A worker's part in the rest of an interrupted step; see `plan.rest`."""

    operations: str  # its program for the rest, as in `StartGeneration`
    resends: tuple[tuple[int, int, bool, int], ...]
    """(micro-batch, layer, forward, receiver) of what it sends again before its first operation, in this order: the
    output of the layer, or the gradient of its input. The receiver may be the worker itself."""
    counted: tuple[int, ...]  # micro-batches whose loss some surviving worker has counted
    sources: tuple[tuple[GradientKey, int], ...]  # gradients whose sum is known: the worker that gives it to the others

    def unpack_operations(self) -> tuple[Operation, ...]:
        """Return this worker's program for the rest."""
        return _unpacked_operations(self.operations)


def _unpacked_operations(packed: str) -> tuple[Operation, ...]:
    return operations_from(np.frombuffer(base64.b64decode(packed), PROGRAM_RECORD))


class Hello(Message):
    """First message of a rank."""

    type: Literal["hello"] = "hello"
    worker: int
    host: str
    incarnation: int = 0  # the incarnation that `Spawn` told its agent; 0 if a cluster's launcher started it


class Ready(Message):
    """A rank has loaded the job, and can take part."""

    type: Literal["ready"] = "ready"


class HostHello(Message):
    """First message of an agent."""

    type: Literal["host_hello"] = "host_hello"
    host: str
    slots: int  # workers it can run


class WorkerExited(Message):
    """An agent reaped a rank. `exit_code` is negative for a signal, as in `subprocess`."""

    type: Literal["worker_exited"] = "worker_exited"
    worker: int
    incarnation: int = 1
    exit_code: int


class ProcessState(Message):
    """An agent's answer to a probe: whether a worker's process is stopped, so that it cannot answer itself."""

    type: Literal["process_state"] = "process_state"
    probe: int
    worker: int
    incarnation: int = 1
    stopped: bool


class Quiesced(Message):
    """A rank has left its operations and waits for `generation`."""

    type: Literal["quiesced"] = "quiesced"
    generation: int
    committed: int  # steps whose update it has applied: the next one is step `committed`
    reduced: bool  # whether it holds the fully reduced gradient of step `committed`
    last_vote: Vote | None  # the vote of the last step it applied
    placed: int  # the generation whose placement it has switched to; 0 before the first
    layers: tuple[int, ...]  # layers whose state after `committed` steps it holds, ascending
    progress: Progress | None = None  # what it holds of step `committed`; None if it has not begun it


class Switched(Message):
    """A rank has seen that all hold their part of the new placement, and gives up the old one."""

    type: Literal["switched"] = "switched"
    generation: int
    moved_bytes: int  # state that all workers together have received, in bytes
    transfer_s: float  # seconds from the time its communicators stood


class Started(Message):
    """A rank starts its first operation of the generation."""

    type: Literal["started"] = "started"
    generation: int


class Committed(Message):
    """A rank has applied the update of `step`."""

    type: Literal["committed"] = "committed"
    generation: int
    step: int
    vote: Vote
    grad_norm: float
    lr: float
    step_s: float
    times: OperationTimes


class PeerFailed(Message):
    """A message failed; `peer` is the other end, or None if a collective does not tell."""

    type: Literal["peer_failed"] = "peer_failed"
    generation: int
    peer: int | None
    error: str


class Position(Message):
    """Answer to a probe: the rank's operation and its duration so far."""

    type: Literal["position"] = "position"
    probe: int
    doing: str
    waiting: bool  # whether it waits, for another rank or for memory or disk; otherwise it computes
    since_s: float  # seconds it has been doing so


class CheckpointSaved(Message):
    """A rank has written `layers` of the checkpoint that resumes at `step`, or could not, because of `error`."""

    type: Literal["checkpoint_saved"] = "checkpoint_saved"
    generation: int  # of the state; state from before a return to a checkpoint is void
    step: int
    layers: tuple[int, ...]
    copy_s: float = 0.0  # seconds for which the rank's training stood still during the copy
    write_s: float = 0.0  # seconds in which the copy was written to disk, beside training
    error: str | None = None


class SlowIO(Message):
    """A rank has been reading or writing for `since_s` seconds, longer than it should take, and is not done."""

    type: Literal["slow_io"] = "slow_io"
    generation: int
    doing: str
    since_s: float


class Preallocated(Message):
    """A rank has preallocated memory for incoming layers."""

    type: Literal["preallocated"] = "preallocated"
    layers: tuple[tuple[int, int], ...]  # as in its `Preallocate`, which may be outdated by now


class Finished(Message):
    """A rank has reached the end of its training, with its checkpoint written."""

    type: Literal["finished"] = "finished"
    generation: int


class Crashed(Message):
    """A rank ends itself because of an error in the job's code."""

    type: Literal["crashed"] = "crashed"
    error: str


class Inject(Message):
    """Make `worker` fail: at once, or in `phase` of step `step` or the first one after it."""

    type: Literal["inject"] = "inject"
    worker: int
    kind: Literal["kill", "hang", "disconnect"]
    phase: FailurePhase | None = None
    step: int | None = None


class Welcome(Message):
    """All that a rank needs to load the job."""

    type: Literal["welcome"] = "welcome"
    config: str  # the run's resolved configuration as TOML
    run: str  # the run directory
    boundaries: tuple[BoundaryMessage, ...]  # output of each layer
    incarnation: int = 1  # number of the worker's incarnation, from 1


class StartGeneration(Message):
    """Form `generation` and train from `first_step` with this program."""

    type: Literal["start_generation"] = "start_generation"
    generation: int
    members: tuple[int, ...]  # workers that train, ascending; any other only takes part in the transition
    store_port: int  # port of the rendezvous store, on the coordinator's host
    first_step: int
    operations: str  # this worker's program: its records, in base 64; see `pack_operations`
    segments: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]
    """(first layer, layer after the last, holders, layers that share it if it is tied) of every gradient segment, in
    the order all workers issue them; those with one holder, which need no message, come last."""
    roll_forward: Vote | None = None  # of step ``first_step - 1``, for a rank that has to apply that step first
    load: Literal["initial", "keep"] | int = "keep"  # fresh weights, the state it holds, or this step's checkpoint
    transition: Transition | None = None  # with "keep", if the placement changes
    rest: Rest | None = None  # with "keep", if step `first_step` was interrupted: what remains of it

    @property
    def participants(self) -> tuple[int, ...]:
        """Workers of the generation, ascending; a worker's rank in the world communicator is its index."""
        return self.members if self.transition is None else self.transition.participants

    @staticmethod
    def pack_operations(records: Records) -> str:
        """Write an array of `PROGRAM_RECORD`, of a program that may have many thousands; see `unpack_operations`."""
        return base64.b64encode(records.tobytes()).decode("ascii")

    def unpack_operations(self) -> tuple[Operation, ...]:
        """Return this worker's program."""
        return _unpacked_operations(self.operations)

    def unpack_segments(self) -> tuple[Segment, ...]:
        """Return the gradient segments of the whole model."""
        return tuple(Segment(LayerRange(start, stop), holders, tied) for start, stop, holders, tied in self.segments)


class Stop(Message):
    """The generation before `generation` is over: leave every operation and answer with `Quiesced`."""

    type: Literal["stop"] = "stop"
    generation: int


class Finish(Message):
    """End the run after the current step, with a checkpoint."""

    type: Literal["finish"] = "finish"


class Pause(Message):
    """Pause `generation` once the current step is applied, and wait for orders."""

    type: Literal["pause"] = "pause"
    generation: int


class Preallocate(Message):
    """Preallocate memory for these incoming layers, free that for others, and answer with `Preallocated`."""

    type: Literal["preallocate"] = "preallocate"
    layers: tuple[tuple[int, int], ...]  # (layer, bytes of its state), in order of arrival; none to cancel


class Probe(Message):
    """A rank is to answer with its `Position`, an agent with a `ProcessState` for each of its ranks, at once."""

    type: Literal["probe"] = "probe"
    probe: int


class Exit(Message):
    """End the process: the run is over, or this rank is no longer part of it."""

    type: Literal["exit"] = "exit"
    reason: str


class Spawn(Message):
    """An agent is to start these workers."""

    type: Literal["spawn"] = "spawn"
    workers: tuple[int, ...]
    incarnations: tuple[int, ...]  # number of each worker's incarnation, from 1


class Kill(Message):
    """An agent is to end `worker` with SIGKILL."""

    type: Literal["kill"] = "kill"
    worker: int


class Refused(Message):
    """Answer to a request that is refused."""

    type: Literal["refused"] = "refused"
    reason: str


Departure: TypeAlias = Literal["connection", "heartbeat"]
"""How a peer was lost: its connection closed, or it stopped answering pings."""

_LONGEST_REASON = 200  # characters

_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[reduce(or_, Message.__subclasses__()), Field(discriminator="type")]  # type: ignore[arg-type]
)


def encode(message: Message) -> str:
    """Write a message as one JSON object."""
    return message.model_dump_json()


def decode(text: str | bytes) -> Message:
    """Read a message. Raises ControlError if it is not one."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}..."  # it may quote what was sent, which may be anything
        raise ControlError(f"not a message of this protocol: {reason}") from None
