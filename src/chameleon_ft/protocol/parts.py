"""Parts of messages: votes, times, layers that move, what a rank holds of an interrupted step and has to do of it."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.rest import GradientKey, RestOfStep, StepProgress
from chameleon_ft.plan.shards import LayerShards, Sharding, Slice
from chameleon_ft.schedule import Operation, ScheduledRest
from chameleon_ft.schedule.program import operations_from
from chameleon_ft.schedule.records import PROGRAM_RECORD, Records


class MessagePart(BaseModel):
    """Base of messages and their parts: frozen, and no other fields are accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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


Shards = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int, tuple[int, ...]], ...]], ...]
"""(layers, holders, slices as (first unit, unit after the last, owners)) of layers sliced alike; see `plan.shards`."""


def pack_shards(sharding: Sharding) -> Shards:
    """Write the owners of slices in numbers."""
    alike: dict[LayerShards, list[int]] = {}
    for layer, own in enumerate(sharding.layers):
        alike.setdefault(own, []).append(layer)
    return tuple(
        (tuple(layers), own.holders, tuple((each.start, each.stop, each.owners) for each in own.slices))
        for own, layers in alike.items()
    )


def unpack_shards(shards: Shards) -> Sharding:
    """Read the output of `pack_shards`."""
    found: dict[int, LayerShards] = {}
    for layers, holders, slices in shards:
        found |= dict.fromkeys(layers, LayerShards(holders, tuple(Slice(*each) for each in slices)))
    return Sharding(tuple(found[layer] for layer in sorted(found)))


class RankProcess(MessagePart):
    """The process of a rank, as other processes of its host find it."""

    pid: int
    started: int  # when it began, in clock ticks since the boot: another process with its number began later
    local_index: int  # number of the rank on its host, which picks its accelerator


class Transition(MessagePart):
    """A worker's part in the change to another placement, before a generation trains; see docs/transition.md."""

    participants: tuple[int, ...]  # ascending: workers of the placement in force and of the new one
    keep: tuple[int, ...]  # layers that this worker does not give up before the switch; if none, it begins anew
    moves: tuple[tuple[int, int, int, int, int], ...]
    """(round, source, destination, layer, bytes) of all that it sends and receives, by rounds; the plan's bytes."""
    shards: Shards | None = None  # the owners of slices before it; see `StartGeneration.shards`

    def unpack_shards(self) -> Sharding | None:
        """Return the owners of slices before the transition."""
        return None if self.shards is None else unpack_shards(self.shards)


def pack_operations(records: Records) -> str:
    """Write an array of `PROGRAM_RECORD`, of a program that may have many thousands, in base 64."""
    return base64.b64encode(records.tobytes()).decode("ascii")


def unpack_operations(packed: str) -> tuple[Operation, ...]:
    """Read the output of `pack_operations`."""
    return operations_from(np.frombuffer(base64.b64decode(packed), PROGRAM_RECORD))


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
    rest_s: float  # predicted seconds of the rest
    resends: tuple[tuple[int, int, bool, int], ...]
    """(micro-batch, layer, forward, receiver) of what it sends again before its first operation, in this order: the
    output of the layer, or the gradient of its input. The receiver may be the worker itself."""
    resent_gradients: tuple[tuple[int, int], ...] = ()
    """(micro-batch, layer) of the gradients of inputs that this worker is sent again. Such a gradient may come before
    the output of the layer below, which this worker sends, has been used."""
    counted: tuple[int, ...]  # micro-batches whose loss some surviving worker has counted
    sources: tuple[tuple[GradientKey, int], ...]  # gradients whose sum is known: the worker that gives it to the others

    @classmethod
    def of(
        cls, rest: RestOfStep, scheduled: ScheduledRest, workers: Iterable[int], *, rest_s: float
    ) -> dict[int, Self]:
        """Return the parts of workers; `rest_s` as the attribute."""
        resent: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for each in chain.from_iterable(scheduled.resends.values()):
            if not each.forward:
                resent[each.receiver].append((each.micro_batch, each.layer))
        counted = tuple(route.micro_batch for route in rest.routes if route.is_counted)
        return {
            worker: cls(
                operations=pack_operations(scheduled.program.records_of(worker)),
                rest_s=rest_s,
                resends=scheduled.resends.get(worker, ()),
                resent_gradients=tuple(resent[worker]),
                counted=counted,
                sources=rest.sources,
            )
            for worker in workers
        }

    def unpack_operations(self) -> tuple[Operation, ...]:
        """Return this worker's program for the rest."""
        return unpack_operations(self.operations)


class Vote(MessagePart):
    """The sums of a step's vote, with which any rank can apply that step."""

    grad_square_sum: float  # squared L2 norm of the summed, not yet averaged, gradient of the whole model
    loss_sum: float
    terms: float  # loss terms of the global batch; the gradient and the loss are divided by it
    samples: int
    finish: bool  # whether some rank has received `Finish`: the run ends after this step
    switch: bool = False  # whether some rank has received `Switch`: the next generation follows
    checkpoint: bool = False  # whether all ranks write a checkpoint after this step
    skipped: bool = False  # whether the step is bad or empty, and no rank changes anything; then the sums are 0
    empty: bool = False  # whether the step is skipped because it has no loss terms
    snapshot: bool = False  # whether all ranks take a snapshot after this step
    data_wait_s: float = 0.0  # seconds in which the slowest of the ranks read samples
    checked: bool = False  # whether the state before the step was compared between the holders of each layer: it agreed

    @property
    def takes_snapshot(self) -> bool:
        """Whether ranks begin a snapshot: not if another generation follows, or the end."""
        return self.snapshot and not self.switch and not self.finish


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


class BoundaryMessage(MessagePart):
    """Shape and torch dtype name of a layer's output for one micro-batch."""

    shape: tuple[int, ...]
    dtype: str
