"""The channels on which a worker sends and receives from device to device, in programs and exchanges of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, unique

from chameleon_ft.plan.shards import LayerShards
from chameleon_ft.schedule.program import Operation, OperationKind


@unique
class Kind(IntEnum):
    """The kinds of messages that go from device to device."""

    GRADIENT = 0
    ACTIVATION = 1
    PARAMETERS = 2


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """The messages of one kind from one worker to another, which go from device to device."""

    sender: int
    receiver: int
    kind: Kind


def channels_of(worker: int, operations: Iterable[Operation]) -> set[Channel]:
    """Return the channels on which a worker's program sends and receives."""
    kinds = {o: Kind.ACTIVATION if o.kind is OperationKind.FORWARD else Kind.GRADIENT for o in operations}
    received = {Channel(o.receive_from, worker, kind) for o, kind in kinds.items() if o.receive_from is not None}
    return received | {Channel(worker, o.send_to, kind) for o, kind in kinds.items() if o.send_to is not None}


def channels_of_exchange(worker: int, shards: Iterable[LayerShards]) -> set[Channel]:
    """Return the channels on which a worker exchanges the parameters of layers that have such slices."""
    return {
        Channel(sender, receiver, Kind.PARAMETERS)
        for own in shards
        if worker in own.holders
        for receivers in own.receivers()
        for sender, others in receivers.items()
        for receiver in others
        if worker in (sender, receiver)
    }
