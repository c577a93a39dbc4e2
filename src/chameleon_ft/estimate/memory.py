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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.estimate._worst_moments import worst_moments
from chameleon_ft.estimate.layer_memory import LayerMemory, MemoryUse
from chameleon_ft.plan import LayerRange, Placement, RecomputedLayers
from chameleon_ft.schedule import Operation, Program
from chameleon_ft.schedule._records import Integers, Records
from chameleon_ft.schedule.program import KINDS, operations_from
from chameleon_ft.workload import Workload

__all__ = ["MessageBuffers", "WorkerMemory", "WorkloadMemory", "program_memory", "workload_memory"]

# Columns of the tables below.
_AMOUNTS: Final = ("activation_bytes", "weight_grad_bytes", "message_bytes", "working_bytes")


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
    of = workload_memory(workload)
    memory = {worker: WorkerMemory(of.state_of(placement, worker), None) for worker in placement.workers}
    places, amounts = of.worst(program.records, program.starts, buffers)
    for worker, place, own in zip(program.workers, places.tolist(), amounts.tolist(), strict=True):
        if place >= 0 and worker in memory:
            peak = dataclasses.replace(memory[worker].peak, **dict(zip(_AMOUNTS, own, strict=True)))
            memory[worker] = WorkerMemory(peak, *operations_from(program.records[place : place + 1]))
    return memory


@lru_cache(maxsize=4)
def workload_memory(workload: Workload) -> WorkloadMemory:
    """The memory of a workload, shared by all callers: it remembers what it has worked out of its layers."""
    return WorkloadMemory(workload)


class WorkloadMemory:
    """Bytes that workers hold for the layers of a workload, throughout a step and at its worst moment."""

    def __init__(self, workload: Workload) -> None:
        self._layers = LayerMemory(workload)
        self._state_bytes: dict[tuple[object, ...], int] = {}
        # By range of layers and what of it is recomputed, the row of the tables, which `worst_moments` describes.
        self._rows: dict[tuple[int, ...], int] = {}
        self._stages: list[tuple[int, ...]] = []
        self._moments: list[list[tuple[int, ...]]] = []

    def state_of(self, placement: Placement, worker: int) -> MemoryUse:
        """Bytes that a worker holds throughout a step."""
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

    def moving_bytes(self, records: Records, starts: Sequence[int] | Integers) -> list[int]:
        """The most that each worker holds beside its state, with the runtime's own buffers; arguments as of `worst`."""
        found: list[int] = self.worst(records, starts, MessageBuffers())[1].sum(axis=1).tolist()
        return found

    def worst(
        self, records: Records, starts: Sequence[int] | Integers, buffers: MessageBuffers
    ) -> tuple[Integers, Integers]:
        """The worst moment of each worker.

        Args:
            records: operations of one worker after the other, `PROGRAM_RECORD`.
            starts: the place of each worker's first operation, and in the end their number.
            buffers: those of the runtime.

        Returns:
            The places of the operations that the workers are in then, -1 for a worker that has none; and what they hold
            beside their state by `_AMOUNTS`, int64 [workers, 4].
        """
        stages, row_of = self._rows_of(records)
        return worst_moments(
            records,
            np.array(starts),
            np.array([self._stages[row] for row in stages]).reshape(-1, 5)[row_of],
            np.array([self._moments[row] for row in stages]).reshape(-1, len(KINDS), len(_AMOUNTS)),
            row_of,
            receives_ahead=buffers.receives_ahead,
            sends_kept=buffers.sends_kept,
        )

    def _rows_of(self, records: Records) -> tuple[list[int], Integers]:
        """The rows of the tables that are needed, and for each operation the index among these."""
        fields = ["start", "stop", "recompute_start", "recompute_stop", "recompute_selective"]
        width = 1 + int(records["stop"].max(initial=0))
        # As one number: sorting rows takes many times as long.
        keys = np.zeros(len(records), np.int64)
        for name in fields:
            keys = keys * width + records[name]
        _, first, index = np.unique(keys, return_index=True, return_inverse=True)
        rows = [self._row(*own) for own in records[fields][first].tolist()]
        return rows, index

    def _row(self, start: int, stop: int, again_start: int, again_stop: int, num_selective: int) -> int:
        key = start, stop, again_start, again_stop, num_selective
        if key not in self._rows:
            self._rows[key] = len(self._stages)
            of, layers = self._layers, LayerRange(start, stop)
            again = RecomputedLayers(again_start, again_stop, num_selective) if again_stop else None
            below, above = of.output(start - 1), of.output(stop - 1)
            self._stages.append(
                (below, above, of.activations(layers, again), of.weight_grads(layers), of.kept_output(layers, again))
            )
            self._moments.append([dataclasses.astuple(of.worst(kind, layers, again)) for kind in KINDS])
        return self._rows[key]
