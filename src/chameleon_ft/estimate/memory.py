"""How much memory each worker needs at its worst moment, by going through its operations one by one.

What a worker holds:

- all the time, for the layers that it holds: parameters, gradients, optimizer state, and the samples kept at hand;
- from the F of a hop to its B or I: the activations of the hop's layers, and the hop's output, which is one tensor with
  the input of the next hop if that is on the same worker, up to that one's I;
- from I to W: what the layers keep for their weight gradients, the gradient that came in among it; at the first hop of
  a route, whose I computes nothing, the activations and the gradient that has come in;
- messages: those it has asked for and not yet used; those it has sent, until it may let go of them; gradients handed
  over between two hops of its own, until the lower has used them and the upper's W is done; and the gradient that came
  in for a B, until the next operation has what it waits for.

While an operation runs, it goes through its layers one by one, and each works with `working_bytes` on top:

- F upwards: activations of the layers so far, and the output of the one that runs;
- B downwards: activations of the layers that are left, the hop's output and the gradient that came in until the
  end, and the gradients between which the layer that runs stands;
- I downwards: all activations, what the layers so far leave for W, and the gradient that the one that runs makes. A
  layer that leaves at least as much as its activations leaves these too, as in this package's runtime; where it leaves
  less, both are counted, although they may share tensors: an upper bound;
- W: what the layers have kept.

A worker that recomputes keeps of the activations of a layer only its input. The rest is there while the layer's own F
runs, and with the output again while its B or I does; an I that leaves the activations for W makes them there.

Vote and update come when there are no activations any more, and are not looked at. The logits are activations and
working bytes of the last layer. With tensor parallelism all bytes are those of one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

import numpy as np

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.estimate._memory_records import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    MOMENT,
    OPERATION,
    STAGE,
    WEIGHT_GRAD,
    WORST,
)
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import Operation, OperationKind, Program
from chameleon_ft.schedule._engine import Schedule
from chameleon_ft.schedule._records import Integers, Records
from chameleon_ft.workload import Workload, is_recomputed

__all__ = ["MemoryUse", "MessageBuffers", "Stages", "WorkerMemory", "program_memory", "schedule_bytes", "stages_of"]

_KINDS: Final = {
    OperationKind.FORWARD: FORWARD,
    OperationKind.BACKWARD: BACKWARD,
    OperationKind.INPUT_GRAD: INPUT_GRAD,
    OperationKind.WEIGHT_GRAD: WEIGHT_GRAD,
}


@dataclass(frozen=True, slots=True)
class MessageBuffers:
    """How long a runtime holds messages; the defaults are those of this package's own.

    Attributes:
        receives_ahead: receives that are posted, at most, counting the one that the next operation needs.
        sends_kept: the latest sends whose tensors are kept; None keeps all until the step has ended.

    Raises:
        ConfigError: `receives_ahead` below one, or negative `sends_kept`.
    """

    receives_ahead: int = 4
    sends_kept: int | None = None

    def __post_init__(self) -> None:
        if self.receives_ahead < 1:
            raise ConfigError(f"receives_ahead must be at least 1; got {self.receives_ahead}")
        if self.sends_kept is not None and self.sends_kept < 0:
            raise ConfigError(f"sends_kept must be zero or more, or None for all of a step; got {self.sends_kept}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a worker holds at one moment, by what they are for; the module's text says what counts as what."""

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
        """All of it."""
        return (
            self.param_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.sample_bytes
            + self.activation_bytes
            + self.weight_grad_bytes
            + self.message_bytes
            + self.working_bytes
        )


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The worst moment of a worker: what it holds then, and the operation it is in (None if it runs none)."""

    peak: MemoryUse
    during: Operation | None

    @property
    def peak_bytes(self) -> int:
        """Bytes held at that moment."""
        return self.peak.total_bytes


def program_memory(
    program: Program,
    placement: Placement,
    workload: Workload,
    buffers: MessageBuffers = MessageBuffers(),
) -> Mapping[int, WorkerMemory]:
    """The worst moment of every worker of `placement`, ascending.

    Exact for what the module's text says, whatever the routes: it follows from the order of a worker's own operations.

    Raises:
        PlanError: the workload has another number of layers than the placement.
    """
    if placement.num_layers != len(workload.layers):
        raise PlanError(
            f"{placement.num_layers} layers are placed, but the workload has {len(workload.layers)}; "
            "use the workload of the model that is planned"
        )
    stages = stages_of(workload)
    first = [0]
    records: list[tuple[int, ...]] = []
    for worker in placement.workers:
        operations = program.of(worker)
        recompute = any(operation.recompute for operation in operations)
        records += _records(operations, stages, len(records), recompute=recompute)
        first.append(len(records))
    worst = stages.worst(np.array(records, OPERATION), np.array(first), buffers)
    memory: dict[int, WorkerMemory] = {}
    for worker, begin, own in zip(placement.workers, first, worst, strict=False):
        state, place = stages.state_of(placement, worker), int(own["place"])
        if place < 0:
            memory[worker] = WorkerMemory(state, None)
        else:
            peak = dataclasses.replace(state, **{name: int(own[name]) for name in MOMENT.names or ()})
            memory[worker] = WorkerMemory(peak, program.of(worker)[place - begin])
    return memory


def schedule_bytes(schedule: Schedule, stages: Stages, *, recompute: Collection[int] = ()) -> list[int]:
    """Bytes that each worker, by index, holds beside those at its worst moment; some workers may recompute.

    As `program_memory` has it of a program: a schedule is not one yet, and to make one takes longer than this.
    """
    network = schedule.network
    slots, count = network.slots, len(network.slots)
    recomputes = [worker in recompute for worker in network.workers]
    # One number for each of start, stop and whether the worker recomputes: to sort rows takes many times as long.
    width = int(slots["stop"].max()) + 1
    keys = (slots["start"] * width + slots["stop"]) * 2 + np.array(recomputes)[slots["worker"]]
    ranges, stage_of = np.unique(keys, return_inverse=True)
    numbers = [stages.number(LayerRange(*divmod(key // 2, width)), recompute=bool(key % 2)) for key in ranges.tolist()]
    # Whether the hop before, and the one after, is on another worker.
    apart = slots["worker"][1:] != slots["worker"][:-1]
    first, last = slots["up"] < 0, slots["last"]
    before, after = ~first, ~last
    before[1:] &= apart
    after[:-1] &= apart
    kind, slot = np.divmod(schedule.codes, count)
    records = np.zeros(len(slot), OPERATION)
    records["kind"] = np.where(network.split_backward & (kind > 0), kind + 1, kind)
    records["hop"] = slot
    records["after"] = np.where(~last & ~after, np.arange(count) + 1, -1)[slot]
    records["stage"] = np.array(numbers)[stage_of][slot]
    records["first"] = first[slot]
    records["receives"] = np.where(kind == 0, before[slot], (kind == 1) & after[slot])
    records["sends"] = np.where(kind == 0, after[slot], (kind == 1) & before[slot])
    return stages.worst_bytes(records, network.first)


def _records(
    operations: Sequence[Operation], stages: Stages, num_hops: int, *, recompute: bool
) -> Iterator[tuple[int, ...]]:
    """`OPERATION` of those of a worker, where so many hops of others have got a number."""
    hops = dict.fromkeys((operation.micro_batch, operation.hop) for operation in operations)
    numbers = {hop: num_hops + number for number, hop in enumerate(hops)}
    for operation in operations:
        yield (
            _KINDS[operation.kind],
            numbers[operation.micro_batch, operation.hop],
            numbers.get((operation.micro_batch, operation.hop + 1), -1),
            stages.number(operation.layers, recompute=recompute),
            operation.first,
            operation.receive_from is not None,
            operation.send_to is not None,
        )


@lru_cache(maxsize=4)
def stages_of(workload: Workload) -> Stages:
    """Those of a workload, which are shared by all who ask for a while."""
    return Stages(workload)


class Stages:
    """The ranges of layers that operations are on, by number."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._layers_if: dict[bool, _Layers] = {}
        self._numbers: dict[tuple[LayerRange, bool], int] = {}
        self._state_bytes: dict[tuple[object, ...], int] = {}
        self._stages = np.empty(0, STAGE)
        self._moments = np.empty((0, len(_KINDS)), MOMENT)

    def number(self, layers: LayerRange, *, recompute: bool) -> int:
        """The number of these layers on a worker that recomputes, or on one that does not."""
        return self._numbers.setdefault((layers, recompute), len(self._numbers))

    def state_of(self, placement: Placement, worker: int) -> MemoryUse:
        """What a worker holds all the time."""
        return self._layers(recompute=False).state_of(placement, worker)

    def state_bytes(self, placement: Placement) -> dict[int, int]:
        """Bytes that each worker holds all the time."""
        found: dict[int, int] = {}
        for worker, held in placement.ranges.items():
            # Most hold one range, and few ranges are held.
            key = (held[0].start, held[0].stop) if len(held) == 1 else held
            if key not in self._state_bytes:
                self._state_bytes[key] = self.state_of(placement, worker).total_bytes
            found[worker] = self._state_bytes[key]
        return found

    def _layers(self, *, recompute: bool) -> _Layers:
        if recompute not in self._layers_if:
            self._layers_if[recompute] = _Layers(self._workload, recompute=recompute)
        return self._layers_if[recompute]

    def worst(self, operations: Records, first: Integers, buffers: MessageBuffers) -> Records:
        """`WORST` of each worker; `first` are the places of their first operations, and in the end their number."""
        # Here, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.estimate._memory_kernel import worst_moments

        fresh = [self._row(*key) for key in list(self._numbers)[len(self._stages) :]]
        if fresh:
            self._stages = np.concatenate((self._stages, np.array([stage for stage, _ in fresh], STAGE)))
            self._moments = np.concatenate((self._moments, np.array([moments for _, moments in fresh], MOMENT)))
        worst = np.zeros(len(first) - 1, WORST)
        kept = -1 if buffers.sends_kept is None else buffers.sends_kept
        worst_moments(
            operations, first, self._stages, self._moments, ahead=buffers.receives_ahead, kept=kept, worst=worst
        )
        return worst

    def worst_bytes(self, operations: Records, first: Integers) -> list[int]:
        """All that each worker holds then beside what it holds all the time, with the runtime's own buffers."""
        worst = self.worst(operations, first, MessageBuffers())
        found: list[int] = np.sum([worst[name] for name in MOMENT.names or ()], axis=0).tolist()
        return found

    def _row(
        self, layers: LayerRange, recompute: bool
    ) -> tuple[tuple[int, int, int, int], list[tuple[int, int, int, int]]]:
        """`STAGE`, and by kind `MOMENT`."""
        of = self._layers(recompute=recompute)
        worst = (of.worst(kind, layers) for kind in _KINDS)
        return (
            (of.output(layers.start - 1), of.output(layers.stop - 1), of.activations(layers), of.weight_grads(layers)),
            [(own.activation_bytes, own.weight_grad_bytes, own.message_bytes, own.working_bytes) for own in worst],
        )


@dataclass(frozen=True, slots=True)
class _Moment:
    """What an operation needs while one of its layers runs, the activations of its hop included."""

    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + self.weight_grad_bytes + self.message_bytes + self.working_bytes


class _Layers:
    """What ranges of layers need, on a worker that recomputes or one that does not."""

    def __init__(self, workload: Workload, *, recompute: bool) -> None:
        self._costs = workload.layers
        # Of each layer, the activations that are kept, and those that are there while it runs.
        self._kept = [layer.activation_bytes for layer in (workload.recomputed() if recompute else workload).layers]
        self._rest = [
            max(0, layer.activation_bytes - kept) for layer, kept in zip(self._costs, self._kept, strict=True)
        ]
        self._runs_again = [recompute and is_recomputed(layer, len(self._costs)) for layer in range(len(self._costs))]
        self._moments: dict[tuple[OperationKind, LayerRange], _Moment] = {}
        self.activations = _summed(self._kept)
        self.weight_grads = _summed(layer.weight_grad_bytes for layer in self._costs)
        # Of the activations, what is still there in what I leaves for W.
        self._left = _summed(
            kept if layer.weight_grad_bytes >= kept else 0 for layer, kept in zip(self._costs, self._kept, strict=True)
        )
        self._params = _summed(layer.param_bytes for layer in self._costs)
        self._gradients = _summed(layer.gradient_bytes for layer in self._costs)
        self._optimizer = _summed(layer.optimizer_bytes for layer in self._costs)

    def output(self, layer: int) -> int:
        """Bytes of a layer's output and of its gradient; none before the first, and the last one's is a loss."""
        return self._costs[layer].output_bytes if 0 <= layer < len(self._costs) - 1 else 0

    def worst(self, kind: OperationKind, layers: LayerRange) -> _Moment:
        """The worst moment of an operation, without messages that come in or wait."""
        key = kind, layers
        if key not in self._moments:
            moments = (self._moment(kind, layers, running) for running in layers)
            self._moments[key] = max(moments, key=lambda moment: moment.total_bytes)
        return self._moments[key]

    def state_of(self, placement: Placement, worker: int) -> MemoryUse:
        held = placement.ranges_of(worker)
        return MemoryUse(
            param_bytes=sum(map(self._params, held)),
            gradient_bytes=sum(map(self._gradients, held)),
            optimizer_bytes=sum(map(self._optimizer, held)),
            # Inputs and targets are kept together, by whoever needs one of them.
            sample_bytes=max((self._costs[layer].sample_bytes for layers in held for layer in layers), default=0),
        )

    def _moment(self, kind: OperationKind, layers: LayerRange, running: int) -> _Moment:
        cost = self._costs[running]
        below, through = LayerRange(layers.start, running + 1), LayerRange(running, layers.stop)
        made = self.output(running - 1)  # the gradient of its input
        outgoing = made if running == layers.start else 0
        again = cost.output_bytes if self._runs_again[running] else 0
        match kind:
            case OperationKind.FORWARD:
                activations = self.activations(below) + self.output(running)
                return _Moment(activation_bytes=activations, working_bytes=cost.working_bytes + self._rest[running])
            case OperationKind.BACKWARD:
                from_above = 0 if running + 1 == layers.stop else self.output(running)
                return _Moment(
                    activation_bytes=self.activations(below) + self.output(layers.stop - 1),
                    message_bytes=outgoing,
                    working_bytes=cost.working_bytes + again + self._rest[running] + from_above + made - outgoing,
                )
            case OperationKind.INPUT_GRAD:
                apart = self.activations(layers) - self._left(through)
                rest = 0 if cost.weight_grad_bytes >= cost.activation_bytes else self._rest[running]
                return _Moment(
                    activation_bytes=apart + self.output(layers.stop - 1),
                    weight_grad_bytes=self.weight_grads(through),
                    message_bytes=outgoing,
                    working_bytes=cost.working_bytes + again + rest + made - outgoing,
                )
            case OperationKind.WEIGHT_GRAD:
                return _Moment(weight_grad_bytes=self.weight_grads(layers), working_bytes=cost.working_bytes)


def _summed(amounts: Iterable[int]) -> Callable[[LayerRange], int]:
    """Sums over ranges of layers, of the amounts of each."""
    until = list(accumulate(amounts, initial=0))
    return lambda layers: until[layers.stop] - until[layers.start]
