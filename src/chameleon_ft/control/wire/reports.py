"""The messages of ranks, agents and standbys to the coordinator; see `messages`."""

from __future__ import annotations

from typing import Final, Literal

from chameleon_ft.control.wire.parts import HostReport, Message, OperationTimes, Progress, RankProcess, Vote


class Hello(Message):
    """First message of a rank."""

    type: Literal["hello"] = "hello"
    worker: int
    host: str
    incarnation: int = 0  # the incarnation that `Spawn` told its agent; 0 if a cluster's launcher started it
    resumes: int | None = None  # number of the connection that it has lost, as `Acknowledged` gave it
    known: int = 0  # if it resumes: the newest generation of which it has an order
    switch_to: int = 0  # if it resumes: the generation of the newest `Switch` that it has received
    process: RankProcess | None = None  # by which another agent of its host finds it, should its own end
    memory_bytes: int | None = None  # available on its host when it started; None if it is not known
    term: int = 0  # the highest term of a coordinator that it has obeyed


class HostHello(Message):
    """First message of an agent."""

    type: Literal["host_hello"] = "host_hello"
    host: str
    slots: int  # workers it can run
    id: str = ""  # drawn by this agent, so that it is recognised though nothing was acknowledged to it
    resumes: int | None = None  # number of the connection that it has lost, as `Acknowledged` gave it
    ranks: tuple[tuple[int, int], ...] = ()  # (worker, incarnation) of the ranks that it runs
    examines: bool = False  # whether it can examine its host; see `Examine`
    term: int = 0  # the highest term of a coordinator that it has obeyed


class HostExamined(Message):
    """Answer of an agent to `Examine`."""

    type: Literal["host_examined"] = "host_examined"
    report: HostReport
    request: int = 0  # that of `Examine`


class StandbyHello(Message):
    """First message of a coordinator that stands by, and will listen at `address` once it leads."""

    type: Literal["standby_hello"] = "standby_hello"
    address: str
    term: int = 0  # the highest term of a coordinator that it knows


class Ready(Message):
    """A rank has loaded the job, and can take part."""

    type: Literal["ready"] = "ready"


class WorkerExited(Message):
    """A rank has ended. `exit_code` is negative for a signal, as in `subprocess`; None if its agent has adopted it."""

    type: Literal["worker_exited"] = "worker_exited"
    worker: int
    incarnation: int = 1
    exit_code: int | None


class ProcessState(Message):
    """An agent's answer to a probe: a worker's process lives, and whether it is stopped, so that it cannot answer.

    A read of a sample may keep a process from answering, too: `doing` names it.
    """

    type: Literal["process_state"] = "process_state"
    probe: int
    worker: int
    incarnation: int = 1
    stopped: bool
    doing: str = ""

    @property
    def is_reading(self) -> bool:
        """Whether the worker reads a sample."""
        return self.doing != ""


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
    gathered: bool = True  # whether it has received the parameters that other owners updated in the last step
    plan: str = ""  # of generation `placed`, as in its orders, for a coordinator whose journal lacks it


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
    has_changed: bool  # whether its own contribution differed
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
    is_reading: bool = False  # whether it reads a sample; `doing` names it
    unreached: tuple[tuple[int, int, float], ...] = ()
    """(generation, rank, seconds) of connections on which that rank has acknowledged nothing for so long."""


LEFT_OUT: Final = "left out, for the one before it is still being written; raise checkpoint.every, or set it to auto"
"""Error of a checkpoint that is not begun."""


class CheckpointSaved(Message):
    """A rank has written `layers` of the checkpoint that resumes at `step`, or could not, because of `error`."""

    type: Literal["checkpoint_saved"] = "checkpoint_saved"
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

    type: Literal["checkpoint_unreadable"] = "checkpoint_unreadable"
    generation: int
    step: int
    error: str
    is_damaged: bool  # whether its files are not as they were written; otherwise this rank cannot read them
    is_snapshot: bool = False  # whether it is a snapshot in memory


class SnapshotTaken(Message):
    """A rank has its part of the snapshot of `step`: copies of its own state, and backups of others'."""

    type: Literal["snapshot_taken"] = "snapshot_taken"
    generation: int
    step: int
    held_up_s: float = 0.0  # seconds for which its training has waited for that


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
    """A rank has met an error in the job's code."""

    type: Literal["crashed"] = "crashed"
    error: str
    is_alive: bool = False  # whether it still holds the state before the step, and waits for orders; or else it ends
