"""The messages between coordinators, agents and ranks, as `codec` writes them.

A rank is one process of the run. `generation` is the number of a membership with its plan; receivers drop messages of a
generation that is over. First come the messages of the coordinator, and requests to it; then those of ranks, agents
and standbys to the coordinator.
"""

from __future__ import annotations

import os
import re
from typing import Final, Literal, Self

from chameleon_ft.config import BackendName, DeviceName, FailureKind, FailurePhase
from chameleon_ft.events.records import RunStatus
from chameleon_ft.plan.rest import StepProgress
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.parts import HostReport, InspectedLayers, Member, MessagePart, OperationTimes, RankProcess
from chameleon_ft.recovery.generation import GenerationSpec, WorkerOrders
from chameleon_ft.recovery.transition import LayerMove


class Message(MessagePart):
    """Base of all messages; `type` tells them apart: of `StartGeneration` it is "start_generation"."""

    type: str = ""

    def __init_subclass__(cls) -> None:
        # Before pydantic finds the fields.
        cls.type = re.sub(r"(?<!^)[A-Z]+", lambda capitals: f"_{capitals[0]}", cls.__name__).lower()
        cls.__annotations__["type"] = Literal[cls.type]


class Acknowledged(Message):
    """The coordinator leads in `term`, and some messages need not be sent again.

    First message on a connection of a rank, an agent or a coordinator that stands by: nothing else that is sent there
    counts before it, and none of it counts if the peer has obeyed a higher term. Sent again from time to time.
    """

    connection: int  # its number
    received: int  # messages that the coordinator has handled, on this connection and on those that it resumes
    # Of these, those that its journal has, which the peer need not keep for another coordinator; None: all.
    written: int | None = None
    term: int
    lease_s: float  # seconds without an answer after which the peer is to look for another coordinator
    reconnect_s: float  # seconds for which to look for one
    standbys: tuple[str, ...] = ()  # host:port of each coordinator that may take over


class Published(Message):
    """Values of the rendezvous store of a generation: those of a group, or the one looked up and others beside it."""

    generation: int
    values: tuple[tuple[str, bytes], ...]  # (key, value)


class Inject(Message):
    """Inject a failure into `worker`: at once, or in `phase` of step `step` or the first one after it."""

    worker: int
    kind: FailureKind
    phase: FailurePhase | None = None
    step: int | None = None
    factor: float | None = None  # of kind "slow" or "slow-link": its speed, or bandwidth, as a share of the usual one


class Welcome(Message):
    """All that a rank needs to load the job."""

    config: str  # the run's resolved configuration as TOML
    run: str  # the run directory
    layers: InspectedLayers
    samples: str = "{}"  # facts of the job's record as JSON: the number of samples, and the first
    incarnation: int = 1  # number of the worker's incarnation, from 1


class StartGeneration(Message):
    """Form a generation and train it."""

    orders: WorkerOrders


class Stop(Message):
    """The generation before `generation` is over: leave every operation and answer with `Quiesced`."""

    generation: int


class Finish(Message):
    """End the run after the current step, with a checkpoint.

    A command sends it to the coordinator, and gets it back as the answer; the coordinator sends it to ranks.
    """

    at_once: bool = False  # from a command: without a checkpoint


class SaveCheckpoint(Message):
    """Write a checkpoint as soon as possible, whatever the configured interval.

    A command asks for it. The answer is this message with `committed`, or `Refused`.
    """

    committed: int | None = None  # steps that are committed: the checkpoint resumes after them


class CheckpointState(Message):
    """Ask about checkpoints of `committed` steps or more; the answer is this message with the other fields.

    A command that waits for one asks, because the files of the run do not tell while its disk is full.
    """

    committed: int
    failed: tuple[int, str] | None = None  # (step, why) of the first one that could not be written
    late: str = ""  # why the files of the run lack its newest records; empty if they do not


class BeginCheckpoint(Message):
    """Write a checkpoint after the first step at whose vote all ranks know this request and have written the last one.

    Requests are numbered from 1; a rank answers only the newest.
    """

    request: int


class Evaluate(Message):
    """Evaluate after the current step, or the next one, whatever the configured interval.

    A command asks for it. The answer is this message with `committed`, or `Refused`.
    """

    committed: int | None = None  # steps that are committed: these or more are trained when it is evaluated


class BeginEvaluation(Message):
    """Evaluate after the first step at whose vote all ranks know this request; see `BeginCheckpoint`."""

    request: int


class BeginSnapshot(Message):
    """Take a snapshot after the first step at whose vote all ranks know this request; see `BeginCheckpoint`."""

    request: int


class SnapshotResolved(Message):
    """The snapshot of `step` is complete, and those before it are not needed any more; or it is given up."""

    step: int
    is_complete: bool


class Prepare(Message):
    """Prepare a generation during training, and answer with `Prepared`; begin it at a switch.

    The `first_step` of the orders is a lower bound: the step of the switch is not known yet.
    """

    orders: WorkerOrders


class Migrate(Message):
    """Begin to move layers while `generation` trains; see docs/transition.md.

    Each destination is a shadow holder. Once it has received a layer, it also receives the sum of the layer's gradients
    before each vote, and applies the same updates as its holders. If slices have owners, it does so for those that move
    to it, and receives the other parameters once they are updated.
    """

    generation: int
    moves: tuple[LayerMove, ...]  # of all workers, in the order of arrival at each destination
    slices: tuple[tuple[int, int, int, int, int, int], ...] = ()
    """(source, destination, layer, first unit, unit after the last, bytes) of slices of the optimizer's state, which
    follow the layers."""
    step_s: float | None = None
    """Predicted seconds of a step, for workers that have not run one."""
    hold_s: float = 0.0
    """Seconds for which a destination may delay a vote, once, until all its layers have arrived and the switch is
    ordered."""

    @classmethod
    def of(cls, spec: GenerationSpec) -> Self:
        """Return the order to move the layers and slices of a generation, the same for all its workers."""
        divided = spec.costs.workload.divided_bytes
        slices = tuple(
            (move.source, move.destination, move.layer, move.start, move.stop, divided[move.layer] * len(move) // UNITS)
            for move in spec.migrating_slices
        )
        return cls(
            generation=spec.generation,
            moves=spec.migrating_layers,
            slices=slices,
            step_s=spec.predicted_step_s,
            hold_s=spec.hold_s,
        )


class Switch(Message):
    """All ranks have prepared `generation`: begin it once the current step is applied."""

    generation: int


class Begin(Message):
    """The others have switched to `generation`: a prepared rank that did not train begins it with `first_step`."""

    generation: int
    first_step: int
    evaluate: bool = False  # whether it begins with an evaluation


class Discard(Message):
    """Give up `generation`, which was being prepared."""

    generation: int


class Probe(Message):
    """A rank is to answer with its `Position`, an agent with a `ProcessState` for each of its ranks, at once."""

    probe: int  # counted from 1; 0 if an agent is asked because a rank's heartbeats are missing
    worker: int | None = None  # with 0: the rank; it is the only one to answer for


class Exit(Message):
    """End the process: the run is over, or this rank is no longer part of it."""

    reason: str
    status: RunStatus | None = None  # how the run has ended; None if it continues without this process
    is_drained: bool = False  # whether it may still write its part of a checkpoint

    @property
    def exit_code(self) -> int:
        """The exit code of an agent or a rank: EX_TEMPFAIL of sysexits.h if the run is to be resumed, else 0."""
        return os.EX_TEMPFAIL if self.status == "terminated" else 0


class Drain(Message):
    """Take workers out of the run before they leave it: those given, and all of a host.

    An agent names none and means all of its workers; a rank, likewise, means itself. The answer is this message with
    all workers that it concerns, or `Refused`, which may follow later: there is no plan without them, and they stay.

    `signal`: which one the agent or the rank has received.
    """

    workers: tuple[int, ...] = ()
    host: str | None = None
    signal: Literal["SIGTERM", "SIGHUP"] = "SIGTERM"


class Examine(Message):
    """An agent is to answer with `HostExamined` before it may start workers."""

    device: DeviceName
    backend: BackendName
    workers: int  # that it may have to start
    share_devices: bool
    measures: bool  # whether to measure speeds; not beside workers that train on the host
    request: int = 0  # the connection over which it was asked


class Spawn(Message):
    """An agent is to start these workers."""

    members: tuple[Member, ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers, in their order."""
        return tuple(member.worker for member in self.members)


class Adopt(Message):
    """An agent is to look after ranks of its host that have lost their agent, and to end those that are given up."""

    ranks: tuple[tuple[Member, RankProcess], ...] = ()
    given_up: tuple[RankProcess, ...] = ()  # they may have ended long ago; no rank is started beside them


class Kill(Message):
    """An agent is to end `worker` with SIGKILL, or a worker without an agent itself."""

    worker: int
    is_hung: bool = False  # if so, send `HangEvidence` first


class Refused(Message):
    """Answer to a request that is refused."""

    reason: str


class ReadRunFile(Message):
    """Send a file of the run from this byte on. The answer is `RunFilePart`, or `Refused`.

    A command may read the configuration, the metrics, the events and the plans.
    """

    name: str  # relative to the run directory
    offset: int = 0


class RunFilePart(Message):
    """Answer to `ReadRunFile`: whole lines, or what there is of the last one."""

    content: str
    size: int  # bytes of the whole file, 0 if there is none


class Hello(Message):
    """First message of a rank."""

    member: Member  # as `Spawn` told its agent; of incarnation 0 if a cluster's launcher started it
    host: str
    resumes: int | None = None  # number of the connection that it has lost, as `Acknowledged` gave it
    known: int = 0  # if it resumes: the newest generation of which it has an order
    switch_to: int = 0  # if it resumes: the generation of the newest `Switch` that it has received
    process: RankProcess | None = None  # by which another agent of its host finds it, should its own end
    memory_bytes: int | None = None  # available on its host when it started; None if it is not known
    term: int = 0  # the highest term of a coordinator that it has obeyed


class HostHello(Message):
    """First message of an agent."""

    host: str
    slots: int  # workers it can run
    id: str = ""  # drawn by this agent, so that it is recognised though nothing was acknowledged to it
    resumes: int | None = None  # number of the connection that it has lost, as `Acknowledged` gave it
    ranks: tuple[Member, ...] = ()  # those that it runs
    examines: bool = False  # whether it can examine its host; see `Examine`
    term: int = 0  # the highest term of a coordinator that it has obeyed


class HostExamined(Message):
    """Answer of an agent to `Examine`."""

    report: HostReport
    request: int = 0  # that of `Examine`


class StandbyHello(Message):
    """First message of a coordinator that stands by, and will listen at `address` once it leads."""

    address: str
    term: int = 0  # the highest term of a coordinator that it knows


class Ready(Message):
    """A rank has loaded the job, and can take part."""


class WorkerExited(Message):
    """A rank has ended. `exit_code` is negative for a signal, as in `subprocess`; None if its agent has adopted it."""

    member: Member
    exit_code: int | None


class ProcessState(Message):
    """An agent's answer to a probe: a worker's process lives, and whether it is stopped, so that it cannot answer.

    A read of a sample may keep a process from answering, too: `doing` names it.
    """

    probe: int
    member: Member
    stopped: bool
    doing: str = ""

    @property
    def is_reading(self) -> bool:
        """Whether the worker reads a sample."""
        return self.doing != ""


class HangEvidence(Message):
    """An agent's last look at a worker that is given up though its process runs."""

    member: Member
    process: str  # state and processor time of the process
    activity: str  # its activity file, with the stacks of its threads; empty if it could not be read


class Quiesced(Message):
    """A rank has left its operations and waits for `generation`."""

    generation: int
    committed: int  # steps whose update it has applied: the next one is step `committed`
    reduced: bool  # whether it holds the fully reduced gradient of step `committed`
    last_vote: Vote | None  # the vote of the last step it applied
    placed: int  # the generation whose placement it has switched to; 0 before the first
    layers: tuple[int, ...]  # layers whose state after `committed` steps it holds, ascending
    progress: StepProgress | None = None  # what it holds of step `committed`; None if it has not begun it
    gathered: bool = True  # whether it has received the parameters that other owners updated in the last step
    spec: str = ""  # of generation `placed`, as in its orders, for a coordinator whose journal lacks it


class Switched(Message):
    """A rank has seen that all hold their part of the new placement, and gives up the old one."""

    generation: int
    moved_bytes: int  # state that all workers together have received, in bytes
    transfer_s: float  # seconds from the time its communicators stood


class Started(Message):
    """A rank starts its first operation of the generation."""

    generation: int


class Committed(Message):
    """A rank has applied the update of `step`."""

    generation: int
    step: int
    vote: Vote
    grad_norm: float
    lr: float
    step_s: float
    times: OperationTimes


class Evaluated(Message):
    """The ranks have evaluated the state after `step`; the sums are those over all samples, the same of every rank."""

    generation: int
    step: int
    loss: float
    terms: float
    samples: int
    labels: float  # terms whose targets are whole numbers
    metrics: tuple[tuple[str, float], ...]  # by the names of the job
    seconds: float
    longest_s: float  # the longest operation of this rank


class Publish(Message):
    """A rank publishes a value in the rendezvous store of a generation.

    With `members`, so many ranks publish one value each in the folder of the key, and all are sent `Published` with all
    of these values as soon as they are there.
    """

    generation: int
    key: str
    value: bytes
    members: int | None = None


class LookUp(Message):
    """A rank needs the value of a key of the rendezvous store, and is sent `Published` as soon as there is one."""

    generation: int
    key: str


class PeerFailed(Message):
    """A message failed; `peer` is the other end, or None if a collective does not tell."""

    generation: int
    peer: int | None
    error: str


class StateDiffers(Message):
    """Holders of layers had different states after `step` updates: no rank has applied that step."""

    generation: int
    step: int
    checksums: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """(layer, ((worker, checksum), ...)) of each layer whose holders differ."""


class BadStep(Message):
    """A rank has computed a step again whose loss or gradient was bad."""

    generation: int
    step: int
    why: str
    is_bad_again: bool
    has_changed: bool  # whether its own contribution differed
    origins: tuple[tuple[int, int, int, str], ...]
    """(micro-batch, first layer, layer after the last, where) of its operations in which the first values appeared that
    are not finite, when it computed the step again: in its data, its forward or its backward."""


class SampleUnread(Message):
    """A rank cannot read a sample, which is left out."""

    step: int
    epoch: int  # with `sample`: which draw it is
    sample: int  # its id, or in a stream its number in the epoch
    error: str
    is_replaced: bool = False  # whether the next one is in its place, as in a stream


class DevicesConnected(Message):
    """A rank's communicators between devices are formed: `kept` are of the generation before, and `formed` are new."""

    generation: int
    kept: int
    formed: int
    seconds: float


class LoaderEnded(Message):
    """A process that reads samples for a rank has ended by itself, and is replaced."""

    loader: str
    doing: str  # empty if nothing was being read


class Position(Message):
    """Answer to a probe: the rank's operation and its duration so far."""

    probe: int
    doing: str
    waiting: bool  # whether it waits, for another rank or for memory or disk; otherwise it computes
    since_s: float  # seconds it has been doing so
    for_message: bool = False  # whether it waits for another rank
    peer: int | None = None  # that rank; None if a collective does not tell
    is_reading: bool = False  # whether it reads a sample; `doing` names it
    unreached: tuple[tuple[int, int, float], ...] = ()
    """(generation, rank, seconds) of connections on which that rank has acknowledged nothing for so long."""


LEFT_OUT: Final = "left out, for the one before it is still being written; raise checkpoint.every, or set it to auto"
"""Error of a checkpoint that is not begun."""


class CheckpointSaved(Message):
    """A rank has written `layers` of the checkpoint that resumes at `step`, or could not, because of `error`."""

    generation: int  # of the state; state from before a return to a checkpoint is void
    step: int
    layers: tuple[int, ...]
    slices: tuple[tuple[int, int, int], ...] = ()  # (layer, first unit, unit after the last) of optimizer state
    seals: tuple[tuple[str, str], ...] = ()  # (name of a layer's or slice's folder, digest of what it has)
    copy_s: float = 0.0  # seconds for which the rank's training stood still during the copy
    write_s: float = 0.0  # seconds in which the copy was written to disk, during training
    error: str | None = None


class CheckpointUnreadable(Message):
    """A rank cannot read its layers of the checkpoint that `generation` begins with, and waits for another one."""

    generation: int
    step: int
    error: str
    is_damaged: bool  # whether its files are not as they were written; otherwise this rank cannot read them
    is_snapshot: bool = False  # whether it is a snapshot in memory


class SnapshotTaken(Message):
    """A rank has its part of the snapshot of `step`: copies of its own state, and backups of others'."""

    generation: int
    step: int
    held_up_s: float = 0.0  # seconds for which its training has waited for that


class SlowIO(Message):
    """A rank has been reading or writing for `since_s` seconds, longer than it should take, and is not done."""

    generation: int
    doing: str
    since_s: float


class Prepared(Message):
    """A rank has prepared `generation`, and holds all layers that migrated to it; or could not, because of `error`."""

    generation: int
    error: str | None = None
    cannot_migrate: bool = False  # whether that is because layers of the migration before it cannot be received


class Finished(Message):
    """A rank has reached the end of its training, with its checkpoint written."""

    generation: int


class Crashed(Message):
    """A rank has met an error in the job's code."""

    error: str
    is_alive: bool = False  # whether it still holds the state before the step, and waits for orders; or else it ends
