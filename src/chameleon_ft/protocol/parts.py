"""Parts of messages: hosts, processes, times and outputs of layers."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict


class Member(NamedTuple):
    """Who a member of a run is: a worker, in one of its incarnations, counted from 1.

    The coordinator counts the incarnations; 0 means that only it knows which one this is.
    """

    worker: int
    incarnation: int

    def __str__(self) -> str:
        return f"worker {self.worker}"


class MessagePart(BaseModel):
    """Base of messages and their parts: frozen, and no other fields are accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class HostReport(MessagePart):
    """Devices, versions and speeds of a host; speeds are those of the slowest device, 0 if they were not measured."""

    problem: str = ""  # why no worker can run here
    devices: tuple[str, ...] = ()  # their names
    free_memory: float = 1.0  # the least free share of the memory of one of them
    matmul_flops: float = 0.0  # floating-point operations of a matrix product in a second
    copy_bytes_per_s: float = 0.0  # bytes that are copied within the device's memory in a second
    links: int = 0  # ports of InfiniBand that are active
    versions: tuple[tuple[str, str], ...] = ()  # (package, version)
    clock_s: float  # Unix seconds of its clock


class RankProcess(MessagePart):
    """The process of a rank, as other processes of its host find it."""

    pid: int
    started: int  # when it began, in clock ticks since the boot: another process with its number began later
    local_index: int  # number of the rank on its host, which picks its accelerator


class ChannelTimes(MessagePart):
    """When a worker sent and received its first messages to and from a peer in a step, in one direction, in order.

    By its own clock, in seconds; 0 for a message that was there before the worker waited for it.
    """

    peer: int
    forward: bool  # activations; otherwise gradients
    sent_s: tuple[float, ...] = ()
    arrived_s: tuple[float, ...] = ()


def folder_of(key: str) -> str:
    """Return the folder of a key of the rendezvous store, which is the name of a group."""
    return key.rpartition("/")[0]


class OperationTimes(MessagePart):
    """Median seconds of a worker's operations in a step; 0 for a kind that it did not run."""

    forward_s: float
    backward_s: float
    longest_s: float
    channels: tuple[ChannelTimes, ...] = ()


class LeafMessage(MessagePart):
    """Shape and torch dtype name of a tensor of a layer's output for one micro-batch."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool | None = None  # None: by its type
    shapes: tuple[tuple[int, ...], ...] = ()  # its shape in each bucket of the job, if it has any


class BoundaryMessage(MessagePart):
    """A layer's output for one micro-batch: one tensor, or the leaves of a tree of tensors."""

    leaves: tuple[LeafMessage, ...]
    structure: str = ""  # that of the tree, as JSON; empty of a tensor


class InspectedLayers(MessagePart):
    """The facts about a job's layers that its inspection finds, and ranks have to know.

    Attributes:
        boundaries: the output of each layer for one micro-batch.
        fields: of a micro-batch, that each layer gets, as `Job.fields`.
        side_outputs: names of what each layer gives beside its output.
        built_in_full: layers that are initialised even if a state is loaded into them.
        micro_batch: inputs and targets, if layers are compiled.
    """

    boundaries: tuple[BoundaryMessage, ...]
    fields: tuple[tuple[str, ...], ...] = ()
    side_outputs: tuple[tuple[str, ...], ...] = ()
    built_in_full: tuple[int, ...] = ()
    micro_batch: BoundaryMessage | None = None
