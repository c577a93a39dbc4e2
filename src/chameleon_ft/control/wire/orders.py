"""The messages of the coordinator, and requests to it; see `messages`."""

from __future__ import annotations

import os
from typing import Literal

from chameleon_ft.config import BackendName, DeviceName, FailureKind, FailurePhase
from chameleon_ft.control.wire.parts import (
    BoundaryMessage,
    Message,
    RankProcess,
    Rest,
    Shards,
    Transition,
    Vote,
    unpack_operations,
    unpack_shards,
)
from chameleon_ft.observe import RunStatus
from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.plan.snapshots import Rebuilding, SnapshotShare
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment


class Acknowledged(Message):
    """The coordinator leads in `term`, and some messages need not be sent again.

    First message on a connection of a rank, an agent or a coordinator that stands by: nothing else that is sent there
    counts before it, and none of it counts if the peer has obeyed a higher term. Sent again from time to time.
    """

    type: Literal["acknowledged"] = "acknowledged"
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

    type: Literal["published"] = "published"
    generation: int
    values: tuple[tuple[str, str], ...]  # (key, value)


class Inject(Message):
    """Inject a failure into `worker`: at once, or in `phase` of step `step` or the first one after it."""

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
    built_in_full: tuple[int, ...] = ()  # layers that are initialised even if a state is loaded into them
    samples: str = "{}"  # facts of the job's record as JSON: the number of samples, and the first
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
    load: Literal["initial", "keep", "snapshot"] | int = "keep"
    """Fresh weights, the state it holds, the snapshot of step `first_step`, or this step's checkpoint."""
    transition: Transition | None = None  # if the placement changes before the generation trains
    finish: bool = False  # whether no step is trained, and the state is written as the last checkpoint
    skipped: tuple[int, ...] = ()  # steps that are known to be bad: nothing is computed of them
    rest: Rest | None = None  # with "keep", if step `first_step` was interrupted: what remains of it
    shards: Shards | None = None  # the owners of slices of the optimizer's state; None: each holder of a layer has all
    gather: bool = False  # with "keep": whether owners first send the parameters that they have updated, once more

    snapshots: SnapshotShare | None = None  # this worker's, in those of this generation; None: none are taken
    snapshot: int | None = None  # the step of the complete snapshot, beside which no other is to be kept
    rebuilt: tuple[Rebuilding, ...] = ()  # with "snapshot": the parts that are made first
    plan: str = ""  # the whole plan, as `ActivePlan.pack` writes it, while the journal may lack it: see `Quiesced.plan`

    @property
    def participants(self) -> tuple[int, ...]:
        """Workers of the generation, ascending; a worker's rank in the world communicator is its index."""
        return self.members if self.transition is None else self.transition.participants

    def unpack_shards(self) -> Sharding | None:
        """Return the owners of slices while the generation trains."""
        return None if self.shards is None else unpack_shards(self.shards)

    def unpack_former_shards(self) -> Sharding | None:
        """Return the owners of slices when the generation begins, if it does with the state of its workers."""
        return self.unpack_shards() if (moved := self.transition) is None else moved.unpack_shards()

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
    """End the run after the current step, with a checkpoint.

    A command sends it to the coordinator, and gets it back as the answer; the coordinator sends it to ranks.
    """

    type: Literal["finish"] = "finish"
    at_once: bool = False  # from a command: without a checkpoint


class SaveCheckpoint(Message):
    """Write a checkpoint as soon as possible, whatever the configured interval.

    A command asks for it. The answer is this message with `committed`, or `Refused`.
    """

    type: Literal["save_checkpoint"] = "save_checkpoint"
    committed: int | None = None  # steps that are committed: the checkpoint resumes after them


class CheckpointState(Message):
    """Ask about checkpoints of `committed` steps or more; the answer is this message with the other fields.

    A command that waits for one asks, because the files of the run do not tell while its disk is full.
    """

    type: Literal["checkpoint_state"] = "checkpoint_state"
    committed: int
    failed: tuple[int, str] | None = None  # (step, why) of the first one that could not be written
    late: str = ""  # why the files of the run lack its newest records; empty if they do not


class BeginCheckpoint(Message):
    """Write a checkpoint after the first step at whose vote all ranks know this request and have written the last one.

    Requests are numbered from 1; a rank answers only the newest.
    """

    type: Literal["begin_checkpoint"] = "begin_checkpoint"
    request: int


class BeginSnapshot(Message):
    """Take a snapshot after the first step at whose vote all ranks know this request; see `BeginCheckpoint`."""

    type: Literal["begin_snapshot"] = "begin_snapshot"
    request: int


class SnapshotResolved(Message):
    """The snapshot of `step` is complete, and those before it are not needed any more; or it is given up."""

    type: Literal["snapshot_resolved"] = "snapshot_resolved"
    step: int
    is_complete: bool


class Prepare(Message):
    """Prepare the generation of `order` during training, and answer with `Prepared`; begin it at a switch.

    The order's `first_step` is a lower bound: the step of the switch is not known yet.
    """

    type: Literal["prepare"] = "prepare"
    order: StartGeneration


class Migrate(Message):
    """Begin to move layers while `generation` trains; see docs/transition.md.

    Each destination is a shadow holder. Once it has received a layer, it also receives the sum of the layer's gradients
    before each vote, and applies the same updates as its holders. If slices have owners, it does so for those that move
    to it, and receives the other parameters once they are updated.
    """

    type: Literal["migrate"] = "migrate"
    generation: int
    moves: tuple[tuple[int, int, int, int], ...]
    """(source, destination, layer, bytes) of all workers, in the order of arrival at each destination."""
    slices: tuple[tuple[int, int, int, int, int, int], ...] = ()
    """(source, destination, layer, first unit, unit after the last, bytes) of slices of the optimizer's state, which
    follow the layers."""
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

    type: Literal["drain"] = "drain"
    workers: tuple[int, ...] = ()
    host: str | None = None
    signal: Literal["SIGTERM", "SIGHUP"] = "SIGTERM"


class Examine(Message):
    """An agent is to answer with `HostExamined` before it may start workers."""

    type: Literal["examine"] = "examine"
    device: DeviceName
    backend: BackendName
    workers: int  # that it may have to start
    share_devices: bool
    measures: bool  # whether to measure speeds; not beside workers that train on the host
    request: int = 0  # the connection over which it was asked


class Spawn(Message):
    """An agent is to start these workers."""

    type: Literal["spawn"] = "spawn"
    workers: tuple[int, ...]
    incarnations: tuple[int, ...]  # number of each worker's incarnation, from 1


class Adopt(Message):
    """An agent is to look after ranks of its host that have lost their agent, and to end those that are given up."""

    type: Literal["adopt"] = "adopt"
    ranks: tuple[tuple[int, int, RankProcess], ...] = ()  # (worker, incarnation, process)
    given_up: tuple[RankProcess, ...] = ()  # they may have ended long ago; no rank is started beside them


class Kill(Message):
    """An agent is to end `worker` with SIGKILL, or a worker without an agent itself."""

    type: Literal["kill"] = "kill"
    worker: int
    is_hung: bool = False  # if so, send `HangEvidence` first


class Refused(Message):
    """Answer to a request that is refused."""

    type: Literal["refused"] = "refused"
    reason: str


class ReadRunFile(Message):
    """Send a file of the run from this byte on. The answer is `RunFilePart`, or `Refused`.

    A command may read the configuration, the metrics, the events and the plans.
    """

    type: Literal["read_run_file"] = "read_run_file"
    name: str  # relative to the run directory
    offset: int = 0


class RunFilePart(Message):
    """Answer to `ReadRunFile`: whole lines, or what there is of the last one."""

    type: Literal["run_file_part"] = "run_file_part"
    content: str
    size: int  # bytes of the whole file, 0 if there is none
