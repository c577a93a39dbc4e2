"""Peak memory of each worker.

A worker holds:

- throughout a step, for its layers: parameters, gradients, optimizer state, and cached samples; of the optimizer
  state of a layer with n holders r/n, if holders share it with r owners of each part (`Workload.owners`), except that
  of tied parameters;
- from the F of a hop to its B or I: the activations of the hop's layers, and the hop's output. The output shares its
  tensor with the sent message, which is held until its gradient arrives; or, if the next hop is on the same worker,
  with that hop's input, until that hop's I;
- from I to W: tensors that the layers keep for their weight gradients, including the incoming gradient; at the first
  hop of a route, whose I computes nothing, the activations and the incoming gradient;
- messages: posted receives that are not yet used; the latest few gradients sent to each worker; and gradients passed
  between two of its own hops, until the lower hop has used them.

An operation runs its layers one by one, and the running layer needs `working_bytes` in addition, or in I and W
`halves_working_bytes`:

- F, upwards: activations of the layers so far, and the output of the running layer;
- B, downwards: activations of the remaining layers, the hop's output if it is kept, the incoming gradient until the
  end, and the gradients of the input and output of the running layer;
- I, downwards: all activations, the tensors that the layers so far leave for W, and the gradient that the running
  layer computes. A layer that leaves at least as many bytes as its activations leaves these too, as in this package's
  runtime; if it leaves fewer, both are counted, although they may share tensors: an upper bound;
- W: the tensors that the layers have kept.

A layer recomputed in full keeps only its input; if it is the last layer of a hop, the arrival of the gradient frees the
hop's output. The rest exists while the layer's own F runs, and again, with the output, while its B or I runs; an I that
leaves the activations for W creates them there. A layer recomputed selectively keeps `selective_bytes` and its output;
F and B need `selective_working_bytes`, and I leaves `selective_weight_grad_bytes` for W.

Vote and update are left out, because no activations are held then. The logits are activations and working bytes of the
last layer. With tensor parallelism all bytes are those of one rank.

The memory of hosts that snapshots take, and whether they are taken for that; see `plan.snapshots`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import Final

import numpy as np

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.shards import UNITS, Sharding, owned_share, shard_optimizer
from chameleon_ft.plan.snapshots import Part, SnapshotLayout, lay_out_snapshot
from chameleon_ft.quantities import data_size
from chameleon_ft.schedule import Operation, Program
from chameleon_ft.schedule.program import KINDS, operations_from
from chameleon_ft.schedule.records import Integers, Records
from chameleon_ft.workload import LayerCost, Workload

_FORWARD, _BACKWARD, _INPUT_GRAD, _WEIGHT_GRAD = range(len(KINDS))
# Bytes of an operation while one of its layers runs, with the activations of its hop.
_MOMENT: Final = ("activation_bytes", "weight_grad_bytes", "message_bytes", "working_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a worker holds at one moment, by purpose; the module docstring defines the categories."""

    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    sample_bytes: int = 0
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all fields."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class MessageBuffers:
    """Numbers of messages that a runtime holds; the defaults are those of this package's runtime.

    A sent activation is held until its gradient arrives.

    Attributes:
        receives_ahead: most receives posted at a time, including the one that the next operation needs.
        sends_kept: most gradients held after they are sent to one worker.

    Raises:
        ConfigError: `receives_ahead` is below one, or `sends_kept` is not above it.
    """

    receives_ahead: int = 3
    sends_kept: int = 6

    def __post_init__(self) -> None:
        if self.receives_ahead < 1:
            raise ConfigError(f"receives_ahead must be at least 1; got {self.receives_ahead}")
        if self.sends_kept <= self.receives_ahead:
            raise ConfigError(
                f"sends_kept must be above receives_ahead, {self.receives_ahead}, for a gradient that its receiver may "
                f"not have used yet is held; got {self.sends_kept}"
            )

    @property
    def sends_in_flight(self) -> int:
        """How many gradients to one worker may be on their way: before the next is sent, the earliest has arrived.

        A gradient is released only when its receiver has certainly used it, so that it can be sent again after a
        failure. Suppose that gradient n is to be sent, and n - `sends_in_flight` has arrived. Then the receiver has
        posted the receive of that one, in the order of its program. At most `receives_ahead` of its receives are posted
        and unused, so it has used all up to n - `sends_in_flight` - `receives_ahead`, which is n - `sends_kept`.
        """
        return self.sends_kept - self.receives_ahead


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Peak memory of a worker, and the operation that it runs then (None if it runs none)."""

    peak: MemoryUse
    during: Operation | None

    @property
    def peak_bytes(self) -> int:
        """Bytes held at the peak."""
        return self.peak.total_bytes


def program_memory(
    program: Program,
    placement: Placement,
    workload: Workload,
    buffers: MessageBuffers = MessageBuffers(),
) -> Mapping[int, WorkerMemory]:
    """Return the peak memory of every worker of `placement`, ascending.

    Exact for this module's model with any routes: only the order of a worker's own operations matters.

    Raises:
        PlanError: the workload and the placement differ in their number of layers.
    """
    if placement.num_layers != len(workload.layers):
        raise PlanError(
            f"{placement.num_layers} layers are placed, but the workload has {len(workload.layers)}; "
            "use the workload of the model that is planned"
        )
    of = workload_memory(workload)
    memory = {worker: WorkerMemory(of.state_of(held, placement), None) for worker, held in placement.ranges.items()}
    places, amounts = of.worst(program.records, program.starts, buffers)
    for worker, place, own in zip(program.workers, places.tolist(), amounts.tolist(), strict=True):
        if place >= 0 and worker in memory:
            peak = replace(memory[worker].peak, **dict(zip(_MOMENT, own, strict=True)))
            memory[worker] = WorkerMemory(peak, *operations_from(program.records[place : place + 1]))
    return memory


@lru_cache(maxsize=4)
def workload_memory(workload: Workload) -> WorkloadMemory:
    """Return the memory of a workload; all callers share it because it caches figures of its layers."""
    return WorkloadMemory(workload)


class WorkloadMemory:
    """Bytes that workers hold for the layers of a workload, throughout a step and at its peak."""

    def __init__(self, workload: Workload) -> None:
        layers = self._layers = workload.layers
        # Bytes of each layer: kept, left for W and of work space; those if it is recomputed selectively.
        self._kept = _bytes_of(layers)
        self._selective = _bytes_of(workload.recomputed_selectively().layers)
        # Bytes of each layer's input: none for the first. The output of the last layer is a loss.
        self._inputs = np.array([0, *(layer.output_bytes for layer in layers[:-1]), 0], np.int64)
        self._owners = workload.owners
        self._replicated = workload.replicated_bytes
        self._state_bytes = cache(lambda ranges, holders: self._state_of(ranges, holders).total_bytes)
        self._figures = cache(self._new_figures)

    def state_of(self, ranges: Iterable[Iterable[int]], *placements: Placement) -> MemoryUse:
        """Return the bytes that a worker with these layers holds throughout a step.

        Args:
            placements: whose holders share the optimizer's state. Of several, each layer has the fewest holders that
                it has in any; without one, the worker keeps all of the state.
        """
        own = tuple(tuple(layers) for layers in ranges)
        return self._state_of(own, self._holders(own, placements))

    def _holders(self, ranges: Iterable[Iterable[int]], placements: Sequence[Placement]) -> tuple[int, ...]:
        """Return the numbers of holders of layers, one after the other, if they share the optimizer's state."""
        if self._owners is None or not placements:
            return ()
        layers = (layer for layers in ranges for layer in layers)
        numbers = ([len(placement.holders(layer)) for placement in placements] for layer in layers)
        return tuple(min(filter(None, each), default=1) for each in numbers)

    def _state_of(self, ranges: Iterable[Iterable[int]], holders: tuple[int, ...]) -> MemoryUse:
        numbers = [layer for layers in ranges for layer in layers]
        held = [self._layers[layer] for layer in numbers]
        shared = sum(
            layer.optimizer_bytes
            if not holders
            else self._replicated[number]
            + owned_share(layer.optimizer_bytes - self._replicated[number], holders[index], self._owners)
            for index, (number, layer) in enumerate(zip(numbers, held, strict=True))
        )
        return MemoryUse(
            param_bytes=sum(layer.param_bytes for layer in held),
            gradient_bytes=sum(layer.gradient_bytes for layer in held),
            optimizer_bytes=shared,
            # A worker keeps inputs and targets together if it needs either.
            sample_bytes=max((layer.sample_bytes for layer in held), default=0),
        )

    def state_bytes(self, placement: Placement, *others: Placement) -> dict[int, int]:
        """Return the bytes that each worker holds throughout a step; for `others` see `state_of`."""
        return {
            worker: self._state_bytes(held, self._holders(held, (placement, *others)))
            for worker, held in placement.ranges.items()
        }

    def moving_bytes(self, records: Records, starts: Sequence[int] | Integers) -> list[int]:
        """Return each worker's peak bytes beside its state, with default buffers; arguments as in `worst`."""
        found: list[int] = self.worst(records, starts, MessageBuffers())[1].sum(axis=1).tolist()
        return found

    def worst(
        self, records: Records, starts: Sequence[int] | Integers, buffers: MessageBuffers
    ) -> tuple[Integers, Integers]:
        """Find the memory peak of each worker.

        Args:
            records: operations, worker by worker, `PROGRAM_RECORD`.
            starts: index of each worker's first operation, then the number of operations.
            buffers: message buffers of the runtime.

        Returns:
            Index of the operation at each worker's peak, -1 for a worker without operations; and the bytes that it
            holds beside its state, by `_MOMENT`; int64 [workers] and [workers, 4].
        """
        fields = ["start", "stop", "recompute_start", "recompute_stop", "recompute_selective"]
        width = 1 + int(records["stop"].max(initial=0))
        # Each row becomes one number, because sorting rows is many times slower.
        keys = np.zeros(len(records), np.int64)
        for name in fields:
            keys = keys * width + records[name]
        _, first, row_of = np.unique(keys, return_index=True, return_inverse=True)
        rows = [self._figures(*own) for own in records[fields][first].tolist()]
        stages = np.array([stage for stage, _ in rows]).reshape(-1, 5)[row_of]
        moments = np.array([own for _, own in rows]).reshape(-1, len(KINDS), 4)
        return _worst_moments(records, np.array(starts), stages, moments, row_of, buffers)

    def _new_figures(
        self, start: int, stop: int, again_start: int, again_stop: int, num_selective: int
    ) -> tuple[tuple[int, ...], Integers]:
        """Return `stages` and `moments`, as in `_worst_moments`, of layers start to stop, some recomputed."""
        layer, own = np.arange(start, stop), slice(start, stop)
        is_inner = (layer > 0) & (layer < len(self._layers) - 1)
        is_again = is_inner & (again_start <= layer) & (layer < again_stop)
        in_full = is_again & (layer < again_stop - num_selective)
        in_part = is_again & ~in_full
        activations = self._kept[0, own]
        inputs, outputs = self._inputs[own], self._inputs[start + 1 : stop + 1]
        # Bytes kept from F to B or I, left for W, and of work space: of F and B, and of I and W.
        kept, weight_grads, working, in_halves = np.where(in_part, self._selective[:, own], self._kept[:, own])
        kept = np.where(in_full, inputs, kept)
        left = np.where(weight_grads >= kept, kept, 0)
        kept_output = 0 if in_full[-1] else int(outputs[-1])
        # While the backward of a layer runs: recomputed tensors, and the gradient of its input.
        rest = np.maximum(0, activations - kept)
        working = working + np.where(in_full, rest, 0)
        again = np.where(in_full, outputs, 0)
        sent = np.where(layer == start, inputs, 0)
        from_above = np.append(outputs[:-1], 0)

        # `_MOMENT` by kind while each layer runs; sums over layers below or above include that layer.
        moments = np.zeros((len(KINDS), 4, len(layer)), np.int64)
        moments[_FORWARD] = kept.cumsum() + outputs, 0 * rest, 0 * rest, working
        received = from_above + inputs - sent
        moments[_BACKWARD] = kept.cumsum() + kept_output, 0 * rest, sent, working + again + received
        moments[_INPUT_GRAD] = (
            kept.sum() - left[::-1].cumsum()[::-1] + kept_output,
            weight_grads[::-1].cumsum()[::-1],
            sent,
            in_halves + again + np.where(weight_grads >= activations, 0, rest) + inputs - sent,
        )
        moments[_WEIGHT_GRAD, 1], moments[_WEIGHT_GRAD, 3] = weight_grads.sum(), in_halves
        worst = moments.sum(axis=1).argmax(axis=1)
        stage = int(inputs[0]), int(outputs[-1]), int(kept.sum()), int(weight_grads.sum()), kept_output
        return stage, moments[np.arange(len(KINDS)), :, worst]


def _worst_moments(
    records: Records, starts: Integers, stages: Integers, moments: Integers, row_of: Integers, buffers: MessageBuffers
) -> tuple[Integers, Integers]:
    """Return `WorkloadMemory.worst` from the bytes that single operations need.

    Each operation changes the bytes held by an amount that depends on it alone, so arrays have one element per
    operation.

    Args:
        stages: bytes of each operation's layers: input from below, output to above, kept activations, tensors kept for
            the weight gradients, and the output if the layers keep it themselves; int64 [operations, 5].
        moments: peak bytes of an operation, by row, kind and `_MOMENT`; int64 [rows, 4, 4].
        row_of: the row in `moments` of each operation; int64 [operations].
    """
    below, above, activations, weight_grads, output = stages.T
    kind, first = records["kind"], records["first"]
    receives, is_sent = records["receive_from"] >= 0, records["send_to"] >= 0
    forward = kind == _FORWARD
    # The I of a first hop computes nothing: the hop keeps its tensors until its W, which is the whole backward.
    idle, late = (kind == _INPUT_GRAD) & first, (kind == _WEIGHT_GRAD) & first
    backward = (kind == _BACKWARD) | late
    input_grad, weight_grad = (kind == _INPUT_GRAD) & ~first, (kind == _WEIGHT_GRAD) & ~first

    # From F to the backward; an input from the same worker is counted as the output of the previous hop.
    shared = np.where(np.where(forward, receives, is_sent), 0, below)
    # The arrival of the gradient frees the output, unless the hop keeps it itself.
    answered = np.where(idle | late, above - output, 0)
    released = np.where(backward | input_grad, activations + above - shared - answered, 0)
    kept = np.where(forward, activations + above - shared, -np.where(idle, answered, 0))
    held_activations = _sum_before(kept - released, starts)

    # From I to W; at a first hop, the incoming gradient.
    used = np.where(weight_grad, weight_grads, np.where(late, above, 0))
    held_weight_grads = _sum_before(np.where(input_grad, weight_grads, np.where(idle, above, 0)) - used, starts)

    # Gradients that go down, to another worker or to another hop of this worker, which consumes them.
    gradient = np.where((backward | input_grad) & ~first, below, 0)
    is_used_up = ((kind == _BACKWARD) | (kind == _INPUT_GRAD)) & ~receives
    handed_over = np.where(is_sent, 0, gradient) - np.where(is_used_up, above, 0)
    sent = _sent(records, starts, gradient, buffers.sends_kept)
    held_messages = _sum_before(handed_over + sent, starts)

    # Receives are posted when an operation begins to wait, a few ahead.
    arrived = np.concatenate(([0], np.cumsum(receives)))
    asked_for = np.minimum(arrived[:-1] + buffers.receives_ahead, np.repeat(arrived[starts[1:]], np.diff(starts)))
    bytes_until = np.concatenate(([0], np.cumsum(np.where(forward, below, above)[receives])))
    waiting = np.stack([held_activations, held_weight_grads, held_messages, np.zeros_like(sent)], axis=1)
    waiting[:, 2] += bytes_until[asked_for] - bytes_until[arrived[:-1]]

    running = moments[row_of, np.where(late, _BACKWARD, kind)]
    running[:, 0] += held_activations - released - np.where(forward | backward, shared, 0)
    running[:, 1] += held_weight_grads - used
    running[:, 2] += held_messages + bytes_until[asked_for] - bytes_until[arrived[1:]]
    running[:, 2] += np.where(backward & (late | receives), above, 0)
    running[idle] = 0
    return _worst(np.stack([waiting, running], axis=1), starts)


def _sum_before(changes: Integers, starts: Integers) -> Integers:
    """Return, for each operation, the sum of changes by earlier operations of the same worker."""
    until = np.concatenate(([0], np.cumsum(changes)))
    found: Integers = until[:-1] - np.repeat(until[starts[:-1]], np.diff(starts))
    return found


def _sent(records: Records, starts: Integers, gradient: Integers, sends_kept: int) -> Integers:
    """Return the changes in held bytes of sent gradients: only the latest few to each receiver are held."""
    worker = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    receiver = np.where((records["kind"] != _FORWARD) & (records["send_to"] >= 0), records["send_to"], -1)
    sends = np.flatnonzero(receiver >= 0)
    # The sort is stable, so sends from one worker to another keep their order.
    order = sends[np.lexsort((receiver[sends], worker[sends]))]
    later, earlier = order[sends_kept:], order[:-sends_kept]
    alike = (worker[later] == worker[earlier]) & (receiver[later] == receiver[earlier])
    changes = np.zeros_like(gradient)
    changes[order] = gradient[order]
    changes[later] -= np.where(alike, gradient[earlier], 0)
    return changes


def _bytes_of(layers: Sequence[LayerCost]) -> Integers:
    """Return bytes kept from F, left for W, and of work space of F and B, and of I and W; int64 [4, layers]."""
    own = [
        (layer.activation_bytes, layer.weight_grad_bytes, layer.working_bytes, layer.working_in_halves)
        for layer in layers
    ]
    return np.array(own, np.int64).T


def _worst(amounts: Integers, starts: Integers) -> tuple[Integers, Integers]:
    """Return place and amounts of each worker's first maximum, from amounts [operations, moments, 4]."""
    totals = amounts.sum(axis=2)
    places = np.full(len(starts) - 1, -1)
    found = np.zeros((len(starts) - 1, amounts.shape[2]), np.int64)
    for worker, (start, stop) in enumerate(pairwise(starts.tolist())):
        if stop > start:
            place, moment = divmod(int(totals[start:stop].argmax()), totals.shape[1])
            places[worker], found[worker] = start + place, amounts[start + place, moment]
    return places, found


SNAPSHOT_SHARE: Final = 0.5
"""Share of a host's available memory that snapshots take at most, unless their interval is configured."""
MIN_SNAPSHOT_COST: Final = 0.1
"""Part of the seconds in which a snapshot is taken that steps are taken to be longer by, at least.

Steps vary too much to show what it costs them.
"""


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    """Bytes that a worker keeps in the memory of its host for one snapshot: of its own parts, and of backups.

    It keeps two snapshots while one is being taken, and memory that was in use stays for the next one.
    """

    own_bytes: int
    backup_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of two snapshots."""
        return 2 * (self.own_bytes + self.backup_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRule:
    """How it is decided whether snapshots are taken under a plan.

    Attributes:
        group: most parts of a backup; 1 for copies.
        at_any_size: whether they are taken under every plan. Otherwise there are none under plans that leave nothing to
            back up, and none that take more than `SNAPSHOT_SHARE` of the memory of a host.
        host_memory: host -> bytes available for its workers, as far as known.
    """

    group: int = 1
    at_any_size: bool = False
    host_memory: Mapping[str, int] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_memory", FrozenMap(self.host_memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChoice:
    """Where the snapshots of a plan are kept.

    Attributes:
        layout: None if none are taken.
        memory: worker -> the memory that they take, or would take.
        refusal: why none are taken though there is something to back up.
    """

    layout: SnapshotLayout | None
    memory: Mapping[int, SnapshotMemory]
    refusal: str = ""


def choose_snapshots(
    placement: Placement,
    workload: Workload,
    hosts: Mapping[int, str],
    rule: SnapshotRule,
    sharding: Sharding | None = None,
) -> SnapshotChoice:
    """Decide whether snapshots are taken under a plan, and where they are kept.

    Args:
        placement: every layer has a holder.
        hosts: worker -> host, of all holders.
        sharding: the owners of slices; if None, those of a new layout with the owners of the workload.
    """
    if sharding is None and workload.owners is not None:
        sharding = shard_optimizer(placement, hosts, workload.owners)
    layout = lay_out_snapshot(placement, hosts, sharding, group=rule.group, weight=part_bytes(workload))
    memory = snapshot_memory(layout, workload)
    if rule.at_any_size:
        return SnapshotChoice(layout=layout, memory=memory)
    if not layout.backups:
        return SnapshotChoice(layout=None, memory={})
    needed = host_bytes(memory, hosts)
    lacking = [host for host, size in needed.items() if size > _room_bytes(host, rule)]
    if not lacking:
        return SnapshotChoice(layout=layout, memory=memory)
    host = max(lacking, key=lambda host: needed[host] / max(1, rule.host_memory[host]))
    refusal = (
        f"those of the workers on {host} would take {data_size(needed[host])}, more than {SNAPSHOT_SHARE:.0%} of the "
        f"{data_size(rule.host_memory[host])} that were available there"
    )
    return SnapshotChoice(layout=None, memory=memory, refusal=refusal)


def snapshots_fit(placement: Placement, workload: Workload, hosts: Mapping[int, str], rule: SnapshotRule) -> bool:
    """Return whether no memory keeps a plan from having snapshots, as `choose_snapshots` decides.

    That is quick where hosts have room for all state of their workers, and for that of all layers beside it.
    """
    if rule.at_any_size or not rule.host_memory:
        return True
    pairs = zip(workload.moving_layers, workload.divided_bytes, strict=True)
    whole = [state_bytes(layer) + divided for layer, divided in pairs]
    most = dict.fromkeys(set(hosts.values()), sum(whole))
    for worker in placement.workers:
        most[hosts[worker]] += sum(whole[layer] for layer in placement.layers_of(worker))
    if all(2 * size <= _room_bytes(host, rule) for host, size in most.items()):
        return True
    return not choose_snapshots(placement, workload, hosts, rule).refusal


def _room_bytes(host: str, rule: SnapshotRule) -> float:
    return SNAPSHOT_SHARE * rule.host_memory.get(host, math.inf)


def expected_snapshot_s(workload: Workload, cluster: Cluster) -> float:
    """Return the seconds in which copies of all state reach other workers, to each as many bytes."""
    total = sum(map(state_bytes, workload.moving_layers)) + sum(workload.divided_bytes)
    link = cluster.inter_host if len(cluster.host_sizes) > 1 else cluster.intra_host
    return link.message_s(total / len(cluster.workers))


def part_bytes(workload: Workload) -> Callable[[Part], int]:
    """Return a function that gives the bytes of a part."""
    whole, divided = [state_bytes(layer) for layer in workload.moving_layers], workload.divided_bytes

    def bytes_of(part: Part) -> int:
        return divided[part.layer] * (part.stop - part.start) // UNITS if part.stop else whole[part.layer]

    return bytes_of


def host_bytes(memory: Mapping[int, SnapshotMemory], hosts: Mapping[int, str]) -> dict[str, int]:
    """Return the bytes of two snapshots on each host, whose workers keep them."""
    found: dict[str, int] = {}
    for worker, each in memory.items():
        found[hosts[worker]] = found.get(hosts[worker], 0) + each.total_bytes
    return found


def snapshot_memory(layout: SnapshotLayout, workload: Workload) -> dict[int, SnapshotMemory]:
    """Return the memory of each worker that keeps something."""
    bytes_of = part_bytes(workload)
    own: dict[int, int] = {}
    backups: dict[int, int] = {}
    for part, keepers in layout.keepers:
        for keeper in keepers:
            own[keeper] = own.get(keeper, 0) + bytes_of(part)
    for backup in layout.backups:
        backups[backup.worker] = backups.get(backup.worker, 0) + max(map(bytes_of, backup.parts))
    return {
        worker: SnapshotMemory(own.get(worker, 0), backups.get(worker, 0)) for worker in sorted(own.keys() | backups)
    }
