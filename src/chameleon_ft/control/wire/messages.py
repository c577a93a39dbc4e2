"""The messages between coordinator, agents and ranks; `codec` writes each as one JSON object.

A rank is one process of the run. `generation` is the number of a membership with its plan; receivers drop messages of a
generation that is over.
"""

from __future__ import annotations

import os
from typing import Literal

from chameleon_ft.config import FailureKind, FailurePhase
from chameleon_ft.control.wire.parts import (
    BoundaryMessage,
    MessagePart,
    OperationTimes,
    Progress,
    Rest,
    Transition,
    Vote,
    unpack_operations,
)
from chameleon_ft.observe import RunStatus
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment

__all__ = [
    "Acknowledged",
    "BadStep",
    "Begin",
    "BeginCheckpoint",
    "CheckpointSaved",
    "CheckpointUnreadable",
    "Committed",
    "Crashed",
    "Discard",
    "Drain",
    "Exit",
    "Finish",
    "Finished",
    "HangEvidence",
    "Hello",
    "HostHello",
    "Inject",
    "Kill",
    "LookUp",
    "Message",
    "Migrate",
    "PeerFailed",
    "Position",
    "Prepare",
    "Prepared",
    "Probe",
    "ProcessState",
    "Publish",
    "Published",
    "Quiesced",
    "Ready",
    "Refused",
    "SlowIO",
    "Spawn",
    "StartGeneration",
    "Started",
    "StateDiffers",
    "Stop",
    "Switch",
    "Switched",
    "Welcome",
    "WorkerExited",
]


class Message(MessagePart):
    """Base of all messages; `type` tells them apart."""

    type: str


class Hello(Message):
    """First message of a rank."""

    type: Literal["hello"] = "hello"
    worker: int
    host: str
    incarnation: int = 0  # the incarnation that `Spawn` told its agent; 0 if a cluster's launcher started it
    resumes: int | None = None  # number of the connection that it has lost, as `Acknowledged` gave it
    known: int = 0  # if it resumes: the newest generation of which it has an order


class Acknowledged(Message):
    """Answer to the first message on a connection, and sent from time to time: messages that need not be sent again."""

    type: Literal["acknowledged"] = "acknowledged"
    connection: int  # its number
    received: int  # messages that the coordinator has handled, on this connection and on those that it resumes
    reconnect_s: float  # seconds for which to look for a coordinator if the connection is lost


class Ready(Message):
    """A rank has loaded the job, and can take part."""

    type: Literal["ready"] = "ready"


class HostHello(Message):
    """First message of an agent."""

    type: Literal["host_hello"] = "host_hello"
    host: str
    slots: int  # workers it can run
    resumes: int | None = None  # number of the connection that it has lost, as `Acknowledged` gave it
    ranks: tuple[tuple[int, int], ...] = ()  # if it resumes: (worker, incarnation) of the ranks that it runs


class WorkerExited(Message):
    """An agent reaped a rank. `exit_code` is negative for a signal, as in `subprocess`."""

    type: Literal["worker_exited"] = "worker_exited"
    worker: int
    incarnation: int = 1
    exit_code: int


class ProcessState(Message):
    """An agent's answer to a probe: a worker's process lives, and whether it is stopped, so that it cannot answer."""

    type: Literal["process_state"] = "process_state"
    probe: int
    worker: int
    incarnation: int = 1
    stopped: bool


class HangEvidence(Message):
    """An agent's last look at a worker that is given up though its process runs."""

    type: Literal["hang_evidence"] = "hang_evidence"
    worker: int
    incarnation: int = 1
    process: str  # state and processor time of the process
    activity: str  # its activity file, with the stacks of its threads; empty if it could not be read


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


class Publish(Message):
    """A rank publishes a value in the rendezvous store of a generation; `value` is in base 64.

    With `members`, so many ranks publish one value each in the folder of the key, and all are sent `Published` with all
    of these values as soon as they are there.
    """

    type: Literal["publish"] = "publish"
    generation: int
    key: str
    value: str
    members: int | None = None


class LookUp(Message):
    """A rank needs the value of a key of the rendezvous store, and is sent `Published` as soon as there is one."""

    type: Literal["look_up"] = "look_up"
    generation: int
    key: str


class Published(Message):
    """Values of the rendezvous store of a generation: those of a group, or the one looked up and others beside it."""

    type: Literal["published"] = "published"
    generation: int
    values: tuple[tuple[str, str], ...]  # (key, value)


class PeerFailed(Message):
    """A message failed; `peer` is the other end, or None if a collective does not tell."""

    type: Literal["peer_failed"] = "peer_failed"
    generation: int
    peer: int | None
    error: str


class StateDiffers(Message):
    """Holders of layers had different states after `step` updates: no rank has applied that step."""

    type: Literal["state_differs"] = "state_differs"
    generation: int
    step: int
    checksums: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """(layer, ((worker, checksum), ...)) of each layer whose holders differ."""


class BadStep(Message):
    """A rank has computed a step again whose loss or gradient was bad."""

    type: Literal["bad_step"] = "bad_step"
    generation: int
    step: int
    why: str
    is_bad_again: bool
    has_changed: bool  # whether its own contribution was another one
    origins: tuple[tuple[int, int, int, str], ...]
    """(micro-batch, first layer, layer after the last, where) of its operations in which the first values appeared that
    are not finite, when it computed the step again: in its data, its forward or its backward."""


class Position(Message):
    """Answer to a probe: the rank's operation and its duration so far."""

    type: Literal["position"] = "position"
    probe: int
    doing: str
    waiting: bool  # whether it waits, for another rank or for memory or disk; otherwise it computes
    since_s: float  # seconds it has been doing so
    for_message: bool = False  # whether it waits for another rank
    peer: int | None = None  # that rank; None if a collective does not tell


class CheckpointSaved(Message):
    """A rank has written `layers` of the checkpoint that resumes at `step`, or could not, because of `error`."""

    type: Literal["checkpoint_saved"] = "checkpoint_saved"
    generation: int  # of the state; state from before a return to a checkpoint is void
    step: int
    layers: tuple[int, ...]
    copy_s: float = 0.0  # seconds for which the rank's training stood still during the copy
    write_s: float = 0.0  # seconds in which the copy was written to disk, beside training
    error: str | None = None


class CheckpointUnreadable(Message):
    """A rank cannot read its layers of the checkpoint that `generation` begins with, and waits for another one."""

    type: Literal["checkpoint_unreadable"] = "checkpoint_unreadable"
    generation: int
    step: int
    error: str
    is_damaged: bool  # whether its files are not as they were written; otherwise this rank cannot read them


class SlowIO(Message):
    """A rank has been reading or writing for `since_s` seconds, longer than it should take, and is not done."""

    type: Literal["slow_io"] = "slow_io"
    generation: int
    doing: str
    since_s: float


class Prepared(Message):
    """A rank has prepared `generation`, and holds all layers that migrated to it; or could not, because of `error`."""

    type: Literal["prepared"] = "prepared"
    generation: int
    error: str | None = None
    cannot_migrate: bool = False  # whether that is because layers of the migration before it cannot be received


class Finished(Message):
    """A rank has reached the end of its training, with its checkpoint written."""

    type: Literal["finished"] = "finished"
    generation: int


class Crashed(Message):
    """A rank ends itself because of an error in the job's code."""

    type: Literal["crashed"] = "crashed"
    error: str


class Inject(Message):
    """Make `worker` fail, or slow, or wrong: at once, or in `phase` of step `step` or the first one after it."""

    type: Literal["inject"] = "inject"
    worker: int
    kind: FailureKind
    phase: FailurePhase | None = None
    step: int | None = None
    factor: float | None = None  # of kind "slow" or "slow-link": its speed, or bandwidth, as a share of the usual one


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
    first_step: int
    operations: str  # this worker's program: its records, in base 64; see `parts.pack_operations`
    segments: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]
    """(first layer, layer after the last, holders, layers that share it if it is tied) of every gradient segment, in
    the order all workers issue them; those with one holder, which need no message, come last."""
    roll_forward: Vote | None = None  # of step ``first_step - 1``, for a rank that has to apply that step first
    load: Literal["initial", "keep"] | int = "keep"  # fresh weights, the state it holds, or this step's checkpoint
    transition: Transition | None = None  # with "keep", if the placement changes before the generation trains
    skipped: tuple[int, ...] = ()  # steps that are known to be bad: nothing is computed of them
    rest: Rest | None = None  # with "keep", if step `first_step` was interrupted: what remains of it

    @property
    def participants(self) -> tuple[int, ...]:
        """Workers of the generation, ascending; a worker's rank in the world communicator is its index."""
        return self.members if self.transition is None else self.transition.participants

    def unpack_operations(self) -> tuple[Operation, ...]:
        """Return this worker's program."""
        return unpack_operations(self.operations)

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


class BeginCheckpoint(Message):
    """Write a checkpoint after the first step at whose vote all ranks know this request and have written the last one.

    Requests are numbered from 1; a rank answers only the newest.
    """

    type: Literal["begin_checkpoint"] = "begin_checkpoint"
    request: int


class Prepare(Message):
    """Prepare the generation of `order` beside training, and answer with `Prepared`; begin it at a switch.

    The order's `first_step` is a lower bound: the step of the switch is not known yet.
    """

    type: Literal["prepare"] = "prepare"
    order: StartGeneration


class Migrate(Message):
    """Begin to move layers while `generation` trains; see docs/transition.md.

    Each destination is a shadow holder. Once it has received a layer, it also receives the sum of the layer's gradients
    before each vote, and applies the same updates as its holders.
    """

    type: Literal["migrate"] = "migrate"
    generation: int
    moves: tuple[tuple[int, int, int, int], ...]
    """(source, destination, layer, bytes) of all workers, in the order of arrival at each destination."""
    step_s: float | None = None
    """Predicted seconds of a step, for workers that have not run one."""
    hold_s: float = 0.0
    """Seconds for which a destination may delay a vote, once, until all its layers have arrived and the switch is
    ordered."""


class Switch(Message):
    """All ranks have prepared `generation`: begin it once the current step is applied."""

    type: Literal["switch"] = "switch"
    generation: int


class Begin(Message):
    """The others have switched to `generation`: a prepared rank that did not train begins it with `first_step`."""

    type: Literal["begin"] = "begin"
    generation: int
    first_step: int


class Discard(Message):
    """Give up `generation`, which was being prepared."""

    type: Literal["discard"] = "discard"
    generation: int


class Probe(Message):
    """A rank is to answer with its `Position`, an agent with a `ProcessState` for each of its ranks, at once."""

    type: Literal["probe"] = "probe"
    probe: int  # counted from 1; 0 if an agent is asked because a rank's heartbeats are missing
    worker: int | None = None  # with 0: the rank; it is the only one to answer for


class Exit(Message):
    """End the process: the run is over, or this rank is no longer part of it."""

    type: Literal["exit"] = "exit"
    reason: str
    status: RunStatus | None = None  # how the run has ended; None if it goes on without this process
    is_drained: bool = False  # whether it may still write its part of a checkpoint

    @property
    def exit_code(self) -> int:
        """The exit code of an agent or a rank: EX_TEMPFAIL of sysexits.h if the run is to be resumed, else 0."""
        return os.EX_TEMPFAIL if self.status == "terminated" else 0


class Drain(Message):
    """Take workers out of the run before they leave it: those given, and all of a host.

    An agent names none and means all of its workers; a rank, likewise, means itself. The answer is this message with
    all workers that it concerns, or `Refused`, which may follow later: there is no plan without them, and they stay.
    """

    type: Literal["drain"] = "drain"
    workers: tuple[int, ...] = ()
    host: str | None = None


class Spawn(Message):
    """An agent is to start these workers."""

    type: Literal["spawn"] = "spawn"
    workers: tuple[int, ...]
    incarnations: tuple[int, ...]  # number of each worker's incarnation, from 1


class Kill(Message):
    """An agent is to end `worker` with SIGKILL."""

    type: Literal["kill"] = "kill"
    worker: int
    is_hung: bool = False  # if so, send `HangEvidence` first


class Refused(Message):
    """Answer to a request that is refused."""

    type: Literal["refused"] = "refused"
    reason: str
