"""What the coordinator, the supervisors and the ranks say to each other: one JSON object a message.

A rank is one process of the run. `generation` is the number of a membership with its plan; everything that refers to
a generation which is over is dropped by whoever receives it.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from chameleon_ft.config import FailurePhase
from chameleon_ft.control.disk_messages import AtDisk, CheckpointSaved
from chameleon_ft.control.message_parts import BoundaryMessage, MessagePart, OperationTimes, Transition, Vote
from chameleon_ft.control.room_messages import Expect, RoomMade
from chameleon_ft.errors import ControlError
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import Operation
from chameleon_ft.schedule.program import operations_from
from chameleon_ft.schedule.records import PROGRAM_RECORD, Records
from chameleon_ft.sync import Segment

__all__ = [
    "AtDisk",
    "BoundaryMessage",
    "CheckpointSaved",
    "Committed",
    "Crashed",
    "Exit",
    "Expect",
    "Finish",
    "Finished",
    "Hello",
    "HostHello",
    "Inject",
    "Kill",
    "Message",
    "OperationTimes",
    "Parked",
    "Pause",
    "PeerFailed",
    "Position",
    "Probe",
    "ProcessState",
    "Ready",
    "Refused",
    "RoomMade",
    "Run",
    "Spawn",
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


# --- to the coordinator ----------------------------------------------------------------------------------------------


class Hello(MessagePart):
    """First message of a rank."""

    type: Literal["hello"] = "hello"
    worker: int
    host: str
    pid: int
    life: int = 0
    """Which of the worker's lives this is, as `Spawn` told its supervisor; 0 where a cluster's launcher started it."""


class Ready(MessagePart):
    """A rank has loaded what it trains, and can take part."""

    type: Literal["ready"] = "ready"


class HostHello(MessagePart):
    """First message of a supervisor."""

    type: Literal["host_hello"] = "host_hello"
    host: str
    slots: int
    """Workers it can run."""
    pid: int


class WorkerExited(MessagePart):
    """A supervisor reaped a rank. `exit_code` is negative for a signal, as in `subprocess`."""

    type: Literal["worker_exited"] = "worker_exited"
    worker: int
    life: int = 1
    exit_code: int


class ProcessState(MessagePart):
    """A supervisor's answer to a probe: whether a worker's process is stopped, so that it cannot answer itself."""

    type: Literal["process_state"] = "process_state"
    probe: int
    worker: int
    life: int = 1
    stopped: bool


class Parked(MessagePart):
    """A rank has left its operations and waits for `generation`."""

    type: Literal["parked"] = "parked"
    generation: int
    committed: int
    """Steps whose update it has applied: the next one is step `committed`."""
    reduced: bool
    """Whether it holds the fully reduced gradient of step `committed`."""
    last_vote: Vote | None
    """The vote of the last step it applied."""
    placed: int
    """The generation whose placement it has switched to; 0 before the first."""
    layers: tuple[int, ...]
    """Layers whose state after `committed` steps it holds, ascending."""


class Switched(MessagePart):
    """A rank has seen that all hold their part of the new placement, and gives up the old one."""

    type: Literal["switched"] = "switched"
    generation: int
    moved_bytes: int
    """State that all workers together have received, in bytes."""
    transfer_s: float
    """Seconds from the time its communicators stood."""


class Started(MessagePart):
    """A rank starts its first operation of the generation."""

    type: Literal["started"] = "started"
    generation: int
    step: int


class Committed(MessagePart):
    """A rank has applied the update of `step`."""

    type: Literal["committed"] = "committed"
    generation: int
    step: int
    vote: Vote
    grad_norm: float
    lr: float
    step_s: float
    times: OperationTimes


class PeerFailed(MessagePart):
    """A message failed; `peer` is the other end, or None where a collective does not tell."""

    type: Literal["peer_failed"] = "peer_failed"
    generation: int
    peer: int | None
    error: str


class Position(MessagePart):
    """Answer to a probe: what the rank is doing and since when."""

    type: Literal["position"] = "position"
    probe: int
    generation: int
    doing: str
    waiting: bool
    """Whether it waits, for another rank or for memory or disk; otherwise it computes."""
    since_s: float
    """Seconds it has been doing so."""


class Finished(MessagePart):
    """A rank has reached the end of its training, with `committed` steps applied and its checkpoint written."""

    type: Literal["finished"] = "finished"
    generation: int
    committed: int


class Crashed(MessagePart):
    """A rank ends itself because of an error in what it was given to run."""

    type: Literal["crashed"] = "crashed"
    error: str


class Inject(MessagePart):
    """Make `worker` fail: at once, or in `phase` of step `step` or the first one after it."""

    type: Literal["inject"] = "inject"
    worker: int
    kind: Literal["kill", "hang", "disconnect"]
    phase: FailurePhase | None = None
    step: int | None = None


# --- from the coordinator --------------------------------------------------------------------------------------------


class Welcome(MessagePart):
    """All that a rank needs to load what it trains."""

    type: Literal["welcome"] = "welcome"
    config: str
    """The run's resolved configuration as TOML."""
    run: str
    """The run directory."""
    boundaries: tuple[BoundaryMessage, ...]
    """What leaves each layer."""
    life: int = 1
    """Which of the worker's lives this is, from 1."""


class Run(MessagePart):
    """Form `generation` and train from `first_step` with this program."""

    type: Literal["run"] = "run"
    generation: int
    members: tuple[int, ...]
    """Workers that train, ascending; one that is not among them only takes part in the transition."""
    store_port: int
    """Port of the rendezvous store, on the coordinator's host."""
    first_step: int
    operations: str
    """This worker's program: its records, in base 64; see `pack_operations`."""
    segments: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]
    """(first layer, layer after the last, holders, layers that share it where it is tied) of every gradient segment, in
    the order all workers issue them; those with one holder, which need no message, come last."""
    roll_forward: Vote | None = None
    """The vote of step ``first_step - 1``: a rank that has not applied that step yet does so first."""
    load: Literal["initial", "keep"] | int = "keep"
    """Where the layers' state comes from: fresh weights, what the rank holds, or the checkpoint of this step."""
    transition: Transition | None = None
    """With "keep", where the placement changes."""

    @property
    def everyone(self) -> tuple[int, ...]:
        """Workers of the generation, ascending; a worker's rank in the world communicator is its index."""
        return self.members if self.transition is None else self.transition.everyone

    @staticmethod
    def pack_operations(records: Records) -> str:
        """Write an array of `PROGRAM_RECORD`, of a program that may have many thousands; see `unpack_operations`."""
        return base64.b64encode(records.tobytes()).decode("ascii")

    def unpack_operations(self) -> tuple[Operation, ...]:
        """Return this worker's program."""
        return operations_from(np.frombuffer(base64.b64decode(self.operations), PROGRAM_RECORD))

    def unpack_segments(self) -> tuple[Segment, ...]:
        """Return the gradient segments of the whole model."""
        return tuple(Segment(LayerRange(start, stop), holders, tied) for start, stop, holders, tied in self.segments)


class Stop(MessagePart):
    """The generation before `generation` is over: leave every operation and answer with `Parked`."""

    type: Literal["stop"] = "stop"
    generation: int


class Finish(MessagePart):
    """End the run after the current step, with a checkpoint."""

    type: Literal["finish"] = "finish"


class Pause(MessagePart):
    """Train no further in `generation` once the current step is applied, and wait for what comes then."""

    type: Literal["pause"] = "pause"
    generation: int


class Probe(MessagePart):
    """A rank is to answer with its `Position`, a supervisor with a `ProcessState` for each of its ranks, at once."""

    type: Literal["probe"] = "probe"
    probe: int


class Exit(MessagePart):
    """End the process: the run is over, or this rank is no longer part of it."""

    type: Literal["exit"] = "exit"
    reason: str


class Spawn(MessagePart):
    """A supervisor is to start these workers."""

    type: Literal["spawn"] = "spawn"
    workers: tuple[int, ...]
    lives: tuple[int, ...]
    """Which of its lives each begins, from 1."""


class Kill(MessagePart):
    """A supervisor is to end `worker` with SIGKILL."""

    type: Literal["kill"] = "kill"
    worker: int


class Refused(MessagePart):
    """Answer to a message that cannot be done."""

    type: Literal["refused"] = "refused"
    reason: str


Message: TypeAlias = (
    Hello
    | HostHello
    | Ready
    | RoomMade
    | WorkerExited
    | ProcessState
    | Parked
    | Started
    | Switched
    | Committed
    | PeerFailed
    | Position
    | CheckpointSaved
    | AtDisk
    | Finished
    | Crashed
    | Inject
    | Welcome
    | Run
    | Stop
    | Finish
    | Pause
    | Expect
    | Probe
    | Exit
    | Spawn
    | Kill
    | Refused
)

_LONGEST_REASON = 200  # characters

_ADAPTER: TypeAdapter[Any] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode(message: Message) -> str:
    """Write a message as one JSON object."""
    return message.model_dump_json()


def decode(text: str | bytes) -> Message:
    """Read a message. Raises ControlError that says what is wrong with it."""
    try:
        message: Message = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}..."  # it may quote what was sent, which may be anything
        raise ControlError(f"not a message of this protocol: {reason}") from None
    return message
