"""The operations of the rest of a step, and the messages that are sent again, as arrays."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.schedule.program import KINDS, OperationKind
from chameleon_ft.schedule.records import PROGRAM_RECORD, Booleans, Integers, Records


class Resend(NamedTuple):
    """A message of the interrupted step that a worker sends again.

    Attributes:
        micro_batch: its number in the global batch.
        layer: of the output that is sent, or of the input gradient.
        forward: whether it is an output rather than a gradient.
        receiver: the worker that needs it, which may be the sender itself.
    """

    micro_batch: int
    layer: int
    forward: bool
    receiver: int


RESEND: Final = np.dtype(
    [("micro_batch", "i8"), ("layer", "i8"), ("forward", "?"), ("receiver", "i8"), ("sender", "i8"), ("taker", "i8")]
)
"""A `Resend`, the worker that sends it, and the code of the operation that takes it."""


class RestOperations(NamedTuple):
    """The remaining operations of a step, by slot and by code as in a network with split backward.

    A fused B has the code of I. Codes of operations that do not remain have records too, which mean nothing.

    Attributes:
        worker, start, stop: id of the worker and layers of each slot; int64 [slots].
        first, last: whether the slot is the first, and the last, of its route; bool [slots].
        remains: bool [3, slots], by phase: F; B or I; W.
        records: by code; `PROGRAM_RECORD` [3 * slots].
        resends: by taker; `RESEND` [resends].
    """

    worker: Integers
    start: Integers
    stop: Integers
    first: Booleans
    last: Booleans
    remains: Booleans
    records: Records
    resends: Records


_FIELDS: Final = ("worker", "layers.start", "layers.stop", "forward", "backward", "weight_grad")
_FORWARD, _BACKWARD, _INPUT_GRAD, _WEIGHT_GRAD = (
    KINDS.index(kind)
    for kind in (OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD)
)


def rest_operations(rest: RestOfStep) -> RestOperations:
    """Return the operations of a rest and its messages that are sent again.

    An input that an operation of the rest makes is not sent again, even if its worker could.
    """
    rows = list(map(attrgetter(*_FIELDS), chain.from_iterable(route.hops for route in rest.routes)))
    worker, start, stop, *flags = np.array(rows, np.int64).reshape(len(rows), len(_FIELDS)).T
    forward, backward, weight_grad = np.array(flags, np.bool_)
    lengths = [len(route.hops) for route in rest.routes]
    micro_batch = np.repeat(np.array([route.micro_batch for route in rest.routes], np.int64), lengths)
    hop = np.arange(len(worker)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first, last = hop == 0, hop == np.repeat(lengths, lengths) - 1
    splits = np.isin(worker, [own for own in rest.plan.workers if rest.plan.splits(own)])
    remains = np.stack([forward, backward, weight_grad & splits])

    # The slots before and after, if there are any on the route: their workers, and whether they take a result.
    before, after = np.where(first, worker, np.roll(worker, 1)), np.where(last, worker, np.roll(worker, -1))
    takes_forward, takes_backward = ~last & np.roll(forward, -1), ~first & np.roll(backward, 1)
    records = np.zeros((3, len(worker)), PROGRAM_RECORD)
    records["kind"][0], records["kind"][2] = _FORWARD, _WEIGHT_GRAD
    records["kind"][1] = np.where(weight_grad & ~splits, _BACKWARD, _INPUT_GRAD)
    for name, own in {
        "micro_batch": micro_batch,
        "hop": hop,
        "start": start,
        "stop": stop,
        "first": first,
        "last": last,
    }.items():
        records[name] = own
    records["receive_from"] = records["send_to"] = -1
    records["receive_from"][0] = np.where(before != worker, before, -1)
    records["receive_from"][1] = np.where(after != worker, after, -1)
    records["send_to"][0] = np.where(takes_forward & (after != worker), after, -1)
    records["send_to"][1] = np.where(takes_backward & (before != worker), before, -1)
    _add_recompute(records, rest.plan, worker, start, stop)

    resends = np.concatenate(
        [
            _resends(takes_forward & ~forward, True, micro_batch, stop - 1, after, worker, 1),
            _resends(takes_backward & ~backward, False, micro_batch, start, before, worker, len(worker) - 1),
        ]
    )
    return RestOperations(worker, start, stop, first, last, remains, records.ravel(), resends)


def _resends(
    is_sent: Booleans,
    forward: bool,
    micro_batch: Integers,
    layer: Integers,
    receiver: Integers,
    sender: Integers,
    to_taker: int,
) -> Records:
    """The messages that these slots send again, `RESEND`; a taker's code is `to_taker` more than the sending slot."""
    slots = np.flatnonzero(is_sent)
    found = np.empty(len(slots), RESEND)
    found["forward"], found["taker"] = forward, slots + to_taker
    for name, own in (("micro_batch", micro_batch), ("layer", layer), ("receiver", receiver), ("sender", sender)):
        found[name] = own[slots]
    return found


def _add_recompute(records: Records, plan: Plan, worker: Integers, start: Integers, stop: Integers) -> None:
    """Fill in what each hop recomputes; `records` is `PROGRAM_RECORD` [3, slots]."""
    for own, again in plan.recompute.items():
        for layers in {*zip(start[worker == own].tolist(), stop[worker == own].tolist(), strict=True)}:
            if part := again.intersection(LayerRange(*layers)):
                slots = (worker == own) & (start == layers[0]) & (stop == layers[1])
                for name, value in (
                    ("recompute_start", part.start),
                    ("recompute_stop", part.stop),
                    ("recompute_selective", part.num_selective),
                ):
                    records[name][:, slots] = value
