"""Programs of the rest of an interrupted step, by list scheduling of its operations and resent messages as arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule.list_scheduler import InFlightLimit, Rules, Schedule, default_limits, limits_array, schedule
from chameleon_ft.schedule.network import (
    CostModel,
    Network,
    TimedOperation,
    Timeline,
    operations_of_slots,
    places_at_home,
)
from chameleon_ft.schedule.program import KINDS, OperationKind, Program, operations_from
from chameleon_ft.schedule.records import CHANNEL, PROGRAM_RECORD, SLOT, Booleans, Floats, Integers, Records


class Resend(NamedTuple):
    """A message of the interrupted step that a worker sends again.

    Attributes:
        micro_batch: its number in the global batch.
        layer: layer of the output that is sent, or of the input gradient.
        forward: it is an output rather than a gradient.
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
            _resent_operations(takes_forward & ~forward, True, micro_batch, stop - 1, after, worker, 1),
            _resent_operations(takes_backward & ~backward, False, micro_batch, start, before, worker, len(worker) - 1),
        ]
    )
    return RestOperations(worker, start, stop, first, last, remains, records.ravel(), resends)


def _resent_operations(
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


# By how many micro-batches the limits exceed the default ones, and whether forwards go first. Each gained most over the
# ones before it, on losses at random times with fused and split backward.
_RULES: Final = ((4, True), (2, False), (2, True), (0, True), (8, True), (1, False))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduledRest:
    """The rest of a step as a program, with the times of its replay.

    Attributes:
        program: the operations that remain; each surviving worker of the plan is in it.
        resends: worker -> what it sends again before its first operation, in this order.
        starts_s, ends_s: of each operation, in the order of `program.records`; float64 [operations].
    """

    program: Program
    resends: Mapping[int, tuple[Resend, ...]]
    starts_s: Floats
    ends_s: Floats

    @property
    def program_s(self) -> float:
        """Seconds from the start of the rest to the end of its last operation."""
        return float(self.ends_s.max(initial=0.0))

    @property
    def busy_s(self) -> float:
        """Seconds that all workers together compute."""
        return float((self.ends_s - self.starts_s).sum())

    @property
    def timeline(self) -> Timeline:
        """The operations with their times, in seconds since the start of the rest."""
        workers = np.repeat(self.program.workers, np.diff(self.program.starts)).tolist()
        operations = operations_from(self.program.records)
        return Timeline(tuple(map(TimedOperation, workers, operations, self.starts_s.tolist(), self.ends_s.tolist())))


def rest_schedules(
    rest: RestOfStep, costs: CostModel, *, in_flight_limits: Mapping[int, InFlightLimit]
) -> Iterator[ScheduledRest]:
    """Yield a few list schedules of the rest of a step, about the fastest first; `check_rest` may refuse some of them.

    A worker that is not in the cluster is lost, and not in the program. Limits are as in `best_program`, and bound what
    a worker keeps from before the interruption as well. A schedule takes some milliseconds.

    Raises:
        PlanError: the workload has fewer layers than the plan.
        ConfigError: a lost worker has operations left to run.
    """
    operations = rest_operations(rest)
    live = tuple(worker.id for worker in costs.cluster.workers)
    workers = tuple(sorted(set(rest.plan.workers).intersection(live)))
    if not operations.remains.any():
        none = np.empty(0)
        yield ScheduledRest(program=Program(dict.fromkeys(workers, ())), resends={}, starts_s=none, ends_s=none)
        return
    network = _network(rest, operations, workers, costs)
    most = limits_array(workers, in_flight_limits)
    default = limits_array(workers, default_limits(rest.plan))
    enough_s = _work_s(network).max() * (1 + ROUNDING)
    slower: list[Schedule] = []
    for rules in _rules(default, most):
        found = schedule(network, rules)
        if found.step_s <= enough_s:
            yield _scheduled(network, operations, found.codes)
        else:
            slower.append(found)
    for found in sorted(slower, key=lambda each: each.step_s):
        yield _scheduled(network, operations, found.codes)


def _rules(default: Integers, most: Integers) -> Iterator[Rules]:
    """The rules to try under the limits `most`; `default` has `default_limits`, both int64 [3, workers]."""
    tried: set[tuple[bool, bytes]] = set()
    for extra, forward_first in _RULES:
        limits = np.minimum(default + extra, most)
        if (forward_first, limits.tobytes()) not in tried:
            tried.add((forward_first, limits.tobytes()))
            yield Rules(limits=limits, forward_first=forward_first, patience=0.0)


def _network(rest: RestOfStep, operations: RestOperations, workers: tuple[int, ...], costs: CostModel) -> Network:
    """The network of all hops of the partial routes, also of those of which nothing remains."""
    slots = np.zeros(len(operations.worker), SLOT)
    # Nothing remains on a lost worker, so the index of another does no harm.
    slots["worker"] = np.searchsorted(workers, operations.worker) % len(workers)
    slots["start"], slots["stop"], slots["last"] = operations.start, operations.stop, operations.last
    slots["runs_forward"], slots["runs_backward"], slots["runs_weight_grad"] = operations.remains
    slots["forward_s"], slots["backward_s"], slots["weight_s"] = _durations(rest, operations, costs)
    message_s = _message_times(operations, costs)
    slots["down_s"], slots["up_s"] = message_s, np.where(operations.first, 0.0, np.roll(message_s, 1))
    begins = np.flatnonzero(operations.first)
    counts = np.bincount(slots["worker"], weights=operations.remains.sum(0), minlength=len(workers))
    return Network(
        workers=workers,
        channels=_add_channels(slots, operations, len(workers)),
        split_backward=True,
        slots=slots,
        operations=_remaining_operations(slots, operations),
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        by_priority=begins[_route_order(slots, operations, begins, len(workers))],
    )


def _remaining_operations(slots: Records, operations: RestOperations) -> Records:
    """`OPERATION` by code. One whose input was made before has no predecessor; its delay is that of the resend."""
    found = operations_of_slots(slots, split_backward=True)
    needs = found["needs"]
    needs[(needs >= 0) & ~operations.remains.ravel()[needs]] = -1
    return found


def _durations(rest: RestOfStep, operations: RestOperations, costs: CostModel) -> Floats:
    """Seconds of each operation that remains; float64 [3, slots]."""
    codes = np.flatnonzero(operations.remains)
    kind = operations.records["kind"][codes]
    slot = codes % len(operations.worker)
    rows = operations.worker[slot], kind, operations.start[slot], operations.stop[slot]
    found = np.zeros(operations.remains.size)
    found[codes] = _of_distinct(
        rows,
        lambda worker, kind, start, stop: costs.compute_s(
            worker, KINDS[kind], LayerRange(start, stop), recompute=rest.plan.recompute.get(worker)
        ),
    )
    return found.reshape(operations.remains.shape)


def _message_times(operations: RestOperations, costs: CostModel) -> Floats:
    """Seconds of a message between each slot and the next, in either direction, if there is any; float64 [slots]."""
    forward, backward, _ = operations.remains
    slot = np.flatnonzero(~operations.last & (np.roll(forward, -1) | backward))
    found = np.zeros(len(forward))
    found[slot] = _of_distinct(
        (operations.worker[slot], operations.worker[slot + 1], operations.stop[slot] - 1),
        lambda one, other, layer: costs.message_s(one, other, costs.message_bytes(layer)),
    )
    return found


def _of_distinct(rows: tuple[Integers, ...], value: Callable[..., float]) -> Floats:
    """Return `value` of each column of these rows of small numbers, called once for equal columns."""
    _, index, inverse = np.unique(
        np.ravel_multi_index(rows, [1 + row.max(initial=0) for row in rows]), return_index=True, return_inverse=True
    )
    return np.array([value(*column) for column in zip(*(row[index].tolist() for row in rows), strict=True)])[inverse]


def _add_channels(slots: Records, operations: RestOperations, num_workers: int) -> Records:
    """Number the channels of the slots; return them by number, `CHANNEL`.

    Messages that are sent again have channels of their own, so that they need not be taken before all others.
    """
    forward, backward, _ = operations.remains
    own, last = slots["worker"], operations.last
    # Activations to the next slot, or from F to the backward at the last; then gradients to the slot before.
    down, up = np.flatnonzero(last | np.roll(forward, -1)), np.flatnonzero(~operations.first & np.roll(backward, 1))
    sender = np.concatenate([own[down], own[up]])
    receiver = np.concatenate([np.where(last, own, np.roll(own, -1))[down], own[up - 1]])
    gradient = np.concatenate([last[down], np.ones(len(up), np.bool_)])
    resent = np.concatenate([~last[down] & ~forward[down], ~backward[up]])
    shape = num_workers, num_workers, 2, 2
    every, number = np.unique(np.ravel_multi_index((sender, receiver, gradient, resent), shape), return_inverse=True)
    slots["down"][down], slots["up"][up] = number[: len(down)], number[len(down) :]
    slots["up"][operations.first] = -1
    channels = np.empty(len(every), CHANNEL)
    channels["sender"], channels["receiver"], channels["gradient"], _ = np.unravel_index(every, shape)
    return channels


def _route_order(slots: Records, operations: RestOperations, begins: Integers, num_workers: int) -> Integers:
    """The numbers of the routes, the highest priority first.

    First come micro-batches in flight, those with the fewest operations left at their head; then those that have not
    begun, and in the end those that only some hops repeat, which fill gaps. Of equals the place in the own pipeline
    decides.
    """
    forward, backward, _ = operations.remains
    in_flight = np.add.reduceat(~forward, begins, dtype=np.int64) > 0
    is_repeated = ~in_flight & (np.add.reduceat(~backward, begins, dtype=np.int64) > 0)
    left = np.add.reduceat(operations.remains[:2].sum(0), begins)
    place = places_at_home(slots["worker"], begins, num_workers)
    found: Integers = np.lexsort((place, left, np.where(in_flight, 0, np.where(is_repeated, 2, 1))))
    return found


def _work_s(network: Network) -> Floats:
    """Seconds that each worker computes; float64 [workers]."""
    slots = network.slots
    every_s = slots["forward_s"] + slots["backward_s"] + slots["weight_s"]
    work_s = np.zeros(len(network.workers))
    np.add.at(work_s, slots["worker"], every_s)
    return work_s


def _scheduled(network: Network, operations: RestOperations, codes: Integers) -> ScheduledRest:
    # Imported here, as everywhere: importing a kernel loads numba, and most users of this module run none.
    from chameleon_ft.schedule._kernels.replay import longest_path

    starts_s, ends_s = longest_path(network.operations, codes, network.first)
    # As bytes: numpy indexes records field by field, which takes many times as long.
    records = operations.records.view(f"V{PROGRAM_RECORD.itemsize}")[codes].view(PROGRAM_RECORD)
    own = (records[start:stop] for start, stop in pairwise(network.first.tolist()))
    return ScheduledRest(
        program=Program.of_records(dict(zip(network.workers, own, strict=True))),
        resends=FrozenMap(_resends(operations, codes)),
        starts_s=starts_s[codes],
        ends_s=ends_s[codes],
    )


def _resends(operations: RestOperations, codes: Integers) -> dict[int, tuple[Resend, ...]]:
    """By worker what it sends again, in the order in which receivers take it."""
    place = np.zeros(len(operations.records), np.int64)
    place[codes] = np.arange(len(codes))
    resends = operations.resends[np.argsort(place[operations.resends["taker"]])]
    found: dict[int, list[Resend]] = defaultdict(list)
    for micro_batch, layer, forward, receiver, sender, _ in resends.tolist():
        found[sender].append(Resend(micro_batch, layer, forward, receiver))
    return {sender: tuple(own) for sender, own in sorted(found.items())}
