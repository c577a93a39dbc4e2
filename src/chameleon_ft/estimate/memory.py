"""How much memory each worker needs at its worst moment, by going through its operations one by one.

What a worker holds:

- all the time, for the layers that it holds: parameters, gradients, optimizer state, and the samples kept at hand;
- from the F of a hop to its B or I: the activations of the hop's layers, and the hop's output. The output is one tensor
  with the message that is sent, which is held until the gradient that answers it has come; or with the input of the
  next hop if that is on the same worker, up to that one's I;
- from I to W: what the layers keep for their weight gradients, the gradient that came in among it; at the first hop of
  a route, whose I computes nothing, the activations and the gradient that has come in;
- messages: those it has asked for and not yet used; of the gradients it has sent, the latest few to each worker; and
  gradients handed over between two hops of its own, until the lower has used them.

While an operation runs, it goes through its layers one by one, and each works with `working_bytes` on top:

- F upwards: activations of the layers so far, and the output of the one that runs;
- B downwards: activations of the layers that are left, the hop's output if it is kept, the gradient that came in until
  the end, and the gradients between which the layer that runs stands;
- I downwards: all activations, what the layers so far leave for W, and the gradient that the one that runs makes. A
  layer that leaves at least as much as its activations leaves these too, as in this package's runtime; where it leaves
  less, both are counted, although they may share tensors: an upper bound;
- W: what the layers have kept.

Of the activations of a layer that is recomputed in full only its input is kept, and the output of a hop whose last
layer is one is not kept beyond the arrival of its gradient; one that is recomputed selectively keeps `selective_bytes`
and its output. The rest is there while the layer's own F runs, and again, in full with the output, while its B or I
does; an I that leaves the activations for W makes them there.

Vote and update come when there are no activations any more, and are not looked at. The logits are activations and
working bytes of the last layer. With tensor parallelism all bytes are those of one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
from chameleon_ft.estimate.layer_memory import LayerMemory, MemoryUse
from chameleon_ft.plan import LayerRange, Placement, RecomputedLayers
from chameleon_ft.schedule import Operation, OperationKind, Program
from chameleon_ft.schedule._records import Integers, Records
from chameleon_ft.schedule.list_scheduler import Schedule
from chameleon_ft.workload import Workload

__all__ = ["MessageBuffers", "Stages", "WorkerMemory", "program_memory", "schedule_bytes", "stages_of"]

_KINDS: Final = {
    OperationKind.FORWARD: FORWARD,
    OperationKind.BACKWARD: BACKWARD,
    OperationKind.INPUT_GRAD: INPUT_GRAD,
    OperationKind.WEIGHT_GRAD: WEIGHT_GRAD,
}


@dataclass(frozen=True, slots=True)
class MessageBuffers:
    """How many messages a runtime holds; this package's own runtime goes by the defaults.

    An activation that was sent is held until the gradient that answers it has come.

    Attributes:
        receives_ahead: receives that are posted, at most, counting the one that the next operation needs.
        sends_kept: gradients sent to a worker that are held, the latest ones, at most; before the next is sent, the
            earliest of so many must have arrived.

    Raises:
        ConfigError: one of them is below one.
    """

    receives_ahead: int = 4
    sends_kept: int = 4

    def __post_init__(self) -> None:
        for name in ("receives_ahead", "sends_kept"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")


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
        records += _records(operations, stages, len(records))
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


def schedule_bytes(schedule: Schedule, stages: Stages, *, recompute: Mapping[int, RecomputedLayers]) -> list[int]:
    """Bytes that each worker, by index, holds at its worst moment beside its state; `recompute` is that of the plan.

    As `program_memory` has it of a program: a schedule is not one yet, and to make one takes longer than this.
    """
    network = schedule.network
    slots, count = network.slots, len(network.slots)
    again = {layers: number for number, layers in enumerate(dict.fromkeys(map(recompute.get, network.workers)))}
    again_of = np.array([again[recompute.get(worker)] for worker in network.workers])
    # One number for each of start, stop and what the worker recomputes: to sort rows takes many times as long.
    width = int(slots["stop"].max()) + 1
    keys = (again_of[slots["worker"]] * width + slots["start"]) * width + slots["stop"]
    ranges, stage_of = np.unique(keys, return_inverse=True)
    recomputed = list(again)
    numbers: list[int] = []
    for key in ranges.tolist():
        others, stop = divmod(key, width)
        which, start = divmod(others, width)
        numbers.append(stages.number(LayerRange(start, stop), recompute=recomputed[which]))
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
    neighbour = np.where(kind == 0, np.minimum(slot + 1, count - 1), np.maximum(slot - 1, 0))
    sends = np.where(kind == 0, after[slot], (kind == 1) & before[slot])
    records["sends_to"] = np.where(sends, slots["worker"][neighbour], -1)
    return stages.worst_bytes(records, network.first)


def _records(operations: Sequence[Operation], stages: Stages, num_hops: int) -> Iterator[tuple[int, ...]]:
    """`OPERATION` of those of a worker, where so many hops of others have got a number."""
    hops = dict.fromkeys((operation.micro_batch, operation.hop) for operation in operations)
    numbers = {hop: num_hops + number for number, hop in enumerate(hops)}
    for operation in operations:
        yield (
            _KINDS[operation.kind],
            numbers[operation.micro_batch, operation.hop],
            numbers.get((operation.micro_batch, operation.hop + 1), -1),
            stages.number(operation.layers, recompute=operation.recompute),
            operation.first,
            operation.receive_from is not None,
            -1 if operation.send_to is None else operation.send_to,
        )


@lru_cache(maxsize=4)
def stages_of(workload: Workload) -> Stages:
    """Those of a workload, which are shared by all who ask for a while."""
    return Stages(workload)


class Stages:
    """The ranges of layers that operations are on, by number."""

    def __init__(self, workload: Workload) -> None:
        self._layers = LayerMemory(workload)
        self._numbers: dict[tuple[LayerRange, RecomputedLayers | None], int] = {}
        self._state_bytes: dict[tuple[object, ...], int] = {}
        self._stages = np.empty(0, STAGE)
        self._moments = np.empty((0, len(_KINDS)), MOMENT)

    def number(self, layers: LayerRange, *, recompute: RecomputedLayers | None) -> int:
        """The number of these layers on a worker that recomputes those in `recompute`."""
        again = None if recompute is None else recompute.intersection(layers)
        return self._numbers.setdefault((layers, again), len(self._numbers))

    def state_of(self, placement: Placement, worker: int) -> MemoryUse:
        """What a worker holds all the time."""
        return self._layers.state_of(placement, worker)

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

    def worst(self, operations: Records, first: Integers, buffers: MessageBuffers) -> Records:
        """`WORST` of each worker; `first` are the places of their first operations, and in the end their number."""
        # Here, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.estimate._memory_kernel import worst_moments

        fresh = [self._row(*key) for key in list(self._numbers)[len(self._stages) :]]
        if fresh:
            self._stages = np.concatenate((self._stages, np.array([stage for stage, _ in fresh], STAGE)))
            self._moments = np.concatenate((self._moments, np.array([moments for _, moments in fresh], MOMENT)))
        worst = np.zeros(len(first) - 1, WORST)
        worst_moments(
            operations,
            first,
            self._stages,
            self._moments,
            ahead=buffers.receives_ahead,
            kept=buffers.sends_kept,
            worst=worst,
        )
        return worst

    def worst_bytes(self, operations: Records, first: Integers) -> list[int]:
        """All that each worker holds then beside what it holds all the time, with the runtime's own buffers."""
        worst = self.worst(operations, first, MessageBuffers())
        found: list[int] = np.sum([worst[name] for name in MOMENT.names or ()], axis=0).tolist()
        return found

    def _row(
        self, layers: LayerRange, again: RecomputedLayers | None
    ) -> tuple[tuple[int, int, int, int, int], list[tuple[int, int, int, int]]]:
        """`STAGE`, and by kind `MOMENT`."""
        of = self._layers
        worst = (of.worst(kind, layers, again) for kind in _KINDS)
        return (
            (
                of.output(layers.start - 1),
                of.output(layers.stop - 1),
                of.activations(layers, again),
                of.weight_grads(layers),
                of.kept_output(layers, again),
            ),
            [(own.activation_bytes, own.weight_grad_bytes, own.message_bytes, own.working_bytes) for own in worst],
        )
