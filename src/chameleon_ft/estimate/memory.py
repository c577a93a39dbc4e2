"""Memory of each worker at its worst moment.

A worker holds:

- throughout a step, for its layers: parameters, gradients, optimizer state, and cached samples;
- from the F of a hop to its B or I: the activations of the hop's layers, and the hop's output. The output is one tensor
  with the message that is sent, which is held until the gradient that answers it has come; or with the input of the
  next hop if that is on the same worker, up to that one's I;
- from I to W: what the layers keep for their weight gradients, the gradient that came in among it; at the first hop of
  a route, whose I computes nothing, the activations and the gradient that has come in;
- messages: those it has asked for and not yet used; of the gradients it has sent, the latest few to each worker; and
  gradients handed over between two hops of its own, until the lower has used them.

An operation runs its layers one by one; each needs `working_bytes` in addition while it runs:

- F upwards: activations of the layers so far, and the output of the one that runs;
- B downwards: activations of the layers that are left, the hop's output if it is kept, the gradient that came in until
  the end, and the gradients of the input and output of the layer that runs;
- I downwards: all activations, what the layers so far leave for W, and the gradient that the one that runs makes. A
  layer that leaves at least as much as its activations leaves these too, as in this package's runtime; where it leaves
  less, both are counted, although they may share tensors: an upper bound;
- W: what the layers have kept.

Of the activations of a layer that is recomputed in full only its input is kept, and the output of a hop whose last
layer is one is not kept beyond the arrival of its gradient; one that is recomputed selectively keeps `selective_bytes`
and its output. The rest is there while the layer's own F runs, and again, in full with the output, while its B or I
does; an I that leaves the activations for W makes them there.

Vote and update are left out, because no activations are held then. The logits are activations and working bytes of the
last layer. With tensor parallelism all bytes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import Final

import numpy as np

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import Operation, Program
from chameleon_ft.schedule.program import KINDS, operations_from
from chameleon_ft.schedule.records import Integers, Records
from chameleon_ft.workload import Workload

__all__ = ["MemoryUse", "MessageBuffers", "WorkerMemory", "WorkloadMemory", "program_memory", "workload_memory"]


_FORWARD, _BACKWARD, _INPUT_GRAD, _WEIGHT_GRAD = range(len(KINDS))
# Bytes of an operation while one of its layers runs, with the activations of its hop.
_MOMENT: Final = ("activation_bytes", "weight_grad_bytes", "message_bytes", "working_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a worker holds at one moment, by what they are for; the module's text defines what counts as what."""

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
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class MessageBuffers:
    """How many messages a runtime holds; the defaults are those of this package's runtime.

    An activation that was sent is held until the gradient that answers it has come.

    Attributes:
        receives_ahead: receives that are posted, at most, counting the one that the next operation needs.
        sends_kept: the latest gradients sent to a worker that are held, at most; before the next is sent, the earliest
            of them must have arrived.

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
    """The worst moment of a worker: the bytes that it holds, and the operation that it runs (None if it runs none)."""

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
    """Return the worst moment of every worker of `placement`, ascending.

    Exact for the module's model, whatever the routes: it follows from the order of a worker's own operations.

    Raises:
        PlanError: the workload has another number of layers than the placement.
    """
    if placement.num_layers != len(workload.layers):
        raise PlanError(
            f"{placement.num_layers} layers are placed, but the workload has {len(workload.layers)}; "
            "use the workload of the model that is planned"
        )
    of = workload_memory(workload)
    memory = {worker: WorkerMemory(of.state_of(held), None) for worker, held in placement.ranges.items()}
    places, amounts = of.worst(program.records, program.starts, buffers)
    for worker, place, own in zip(program.workers, places.tolist(), amounts.tolist(), strict=True):
        if place >= 0 and worker in memory:
            peak = replace(memory[worker].peak, **dict(zip(_MOMENT, own, strict=True)))
            memory[worker] = WorkerMemory(peak, *operations_from(program.records[place : place + 1]))
    return memory


@lru_cache(maxsize=4)
def workload_memory(workload: Workload) -> WorkloadMemory:
    """Return the memory of a workload, shared by all callers because it caches figures of its layers."""
    return WorkloadMemory(workload)


class WorkloadMemory:
    """Bytes that workers hold for the layers of a workload, throughout a step and at its worst moment."""

    def __init__(self, workload: Workload) -> None:
        layers = self._layers = workload.layers
        names = ("activation_bytes", "weight_grad_bytes", "working_bytes")
        # Of each layer what it keeps, selectively, leaves for W, and works with.
        own = [*([getattr(layer, name) for layer in layers] for name in names), workload.selective_bytes]
        self._activations, self._weight_grads, self._working, self._selective = np.array(own, np.int64)
        # Of each layer its input: none for the first. The output of the last one is a loss.
        self._inputs = np.array([0, *(layer.output_bytes for layer in layers[:-1]), 0], np.int64)
        self._state_bytes = cache(lambda ranges: self.state_of(ranges).total_bytes)
        self._figures = cache(self._new_figures)

    def state_of(self, ranges: Iterable[LayerRange]) -> MemoryUse:
        """Return the bytes that a worker with these layers holds throughout a step."""
        held = [self._layers[layer] for layers in ranges for layer in layers]
        return MemoryUse(
            param_bytes=sum(layer.param_bytes for layer in held),
            gradient_bytes=sum(layer.gradient_bytes for layer in held),
            optimizer_bytes=sum(layer.optimizer_bytes for layer in held),
            # A worker keeps inputs and targets together if it needs either.
            sample_bytes=max((layer.sample_bytes for layer in held), default=0),
        )

    def state_bytes(self, placement: Placement) -> dict[int, int]:
        """Return the bytes that each worker holds throughout a step."""
        return {worker: self._state_bytes(held) for worker, held in placement.ranges.items()}

    def moving_bytes(self, records: Records, starts: Sequence[int] | Integers) -> list[int]:
        """Return the most that each worker holds beside its state, with default buffers; arguments as of `worst`."""
        found: list[int] = self.worst(records, starts, MessageBuffers())[1].sum(axis=1).tolist()
        return found

    def worst(
        self, records: Records, starts: Sequence[int] | Integers, buffers: MessageBuffers
    ) -> tuple[Integers, Integers]:
        """Find the worst moment of each worker.

        Args:
            records: operations of one worker after the other, `PROGRAM_RECORD`.
            starts: the place of each worker's first operation, and in the end their number.
            buffers: those of the runtime.

        Returns:
            The places of the operations that the workers are in then, -1 for a worker that has none; and the bytes that
            they hold beside their state, by `_MOMENT`, int64 [workers, 4].
        """
        fields = ["start", "stop", "recompute_start", "recompute_stop", "recompute_selective"]
        width = 1 + int(records["stop"].max(initial=0))
        # As one number: sorting rows takes many times as long.
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
        """`stages` and `moments`, as in `_worst_moments`, of layers start to stop, of which some are recomputed."""
        layer, own = np.arange(start, stop), slice(start, stop)
        is_inner = (layer > 0) & (layer < len(self._layers) - 1)
        is_again = is_inner & (again_start <= layer) & (layer < again_stop)
        in_full = is_again & (layer < again_stop - num_selective)
        activations, weight_grads, working = self._activations[own], self._weight_grads[own], self._working[own]
        inputs, outputs = self._inputs[own], self._inputs[start + 1 : stop + 1]
        # Kept from F to B or I, and the part of it that is in what I leaves for W.
        kept = np.select([in_full, is_again], [inputs, self._selective[own]], activations)
        left = np.where(weight_grads >= kept, kept, 0)
        kept_output = 0 if in_full[-1] else int(outputs[-1])
        # While the backward of a layer runs: what is computed again, and the gradient of its input.
        rest = np.maximum(0, activations - kept)
        again = working + np.where(in_full, outputs, 0)
        sent = np.where(layer == start, inputs, 0)
        from_above = np.append(outputs[:-1], 0)

        # The amounts of `_MOMENT` by kind while each layer runs; layers below it, or above, it included.
        moments = np.zeros((len(KINDS), 4, len(layer)), np.int64)
        moments[_FORWARD] = kept.cumsum() + outputs, 0 * rest, 0 * rest, working + rest
        moments[_BACKWARD] = kept.cumsum() + kept_output, 0 * rest, sent, again + rest + from_above + inputs - sent
        moments[_INPUT_GRAD] = (
            kept.sum() - left[::-1].cumsum()[::-1] + kept_output,
            weight_grads[::-1].cumsum()[::-1],
            sent,
            again + np.where(weight_grads >= activations, 0, rest) + inputs - sent,
        )
        moments[_WEIGHT_GRAD, 1], moments[_WEIGHT_GRAD, 3] = weight_grads.sum(), working
        worst = moments.sum(axis=1).argmax(axis=1)
        stage = int(inputs[0]), int(outputs[-1]), int(kept.sum()), int(weight_grads.sum()), kept_output
        return stage, moments[np.arange(len(KINDS)), :, worst]


def _worst_moments(
    records: Records, starts: Integers, stages: Integers, moments: Integers, row_of: Integers, buffers: MessageBuffers
) -> tuple[Integers, Integers]:
    """`WorkloadMemory.worst` from what single operations need.

    Every amount that a worker holds is a sum of changes, each of which follows from one operation alone, so arrays have
    an element for each operation.

    Args:
        stages: bytes of the layers of each operation: of the tensor that comes in from below, of the one that leaves
            above, of kept activations, of what is kept for the weight gradients, and of the output if the layers keep
            it themselves; int64 [operations, 5].
        moments: what an operation needs at its worst, by row, kind and `_MOMENT`; int64 [rows, 4, 4].
        row_of: the row in `moments` of each operation; int64 [operations].
    """
    below, above, activations, weight_grads, output = stages.T
    kind, first = records["kind"], records["first"]
    receives, is_sent = records["receive_from"] >= 0, records["send_to"] >= 0
    forward = kind == _FORWARD
    # The I of a first hop computes nothing: what the hop keeps stays until its W, which is the backward in one go.
    idle, late = (kind == _INPUT_GRAD) & first, (kind == _WEIGHT_GRAD) & first
    backward = (kind == _BACKWARD) | late
    input_grad, weight_grad = (kind == _INPUT_GRAD) & ~first, (kind == _WEIGHT_GRAD) & ~first

    # From F to the backward; an input that comes from the same worker is counted as the output of the hop before.
    shared = np.where(np.where(forward, receives, is_sent), 0, below)
    # When the gradient is there, the output is let go of, unless the hop keeps it itself.
    answered = np.where(idle | late, above - output, 0)
    released = np.where(backward | input_grad, activations + above - shared - answered, 0)
    kept = np.where(forward, activations + above - shared, -np.where(idle, answered, 0))
    held_activations = _sum_before(kept - released, starts)

    # From I to W; at a first hop that is the gradient that came in.
    used = np.where(weight_grad, weight_grads, np.where(late, above, 0))
    held_weight_grads = _sum_before(np.where(input_grad, weight_grads, np.where(idle, above, 0)) - used, starts)

    # Gradients that go down, to another worker or to another hop of this one, which uses it up.
    gradient = np.where((backward | input_grad) & ~first, below, 0)
    is_used_up = ((kind == _BACKWARD) | (kind == _INPUT_GRAD)) & ~receives
    handed_over = np.where(is_sent, 0, gradient) - np.where(is_used_up, above, 0)
    sent = _sent(records, starts, gradient, buffers.sends_kept)
    held_messages = _sum_before(handed_over + sent, starts)

    # Receives are asked for when an operation begins to wait, some ahead.
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
    """Of changes by operation, the sum of those by earlier operations of the same worker."""
    until = np.concatenate(([0], np.cumsum(changes)))
    found: Integers = until[:-1] - np.repeat(until[starts[:-1]], np.diff(starts))
    return found


def _sent(records: Records, starts: Integers, gradient: Integers, sends_kept: int) -> Integers:
    """Changes in the bytes of sent gradients: of those to one receiver, only the latest few are held."""
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


def _worst(amounts: Integers, starts: Integers) -> tuple[Integers, Integers]:
    """Of the amounts at each moment of each operation, [operations, moments, 4], the first of the largest by worker."""
    totals = amounts.sum(axis=2)
    places = np.full(len(starts) - 1, -1)
    found = np.zeros((len(starts) - 1, amounts.shape[2]), np.int64)
    for worker, (start, stop) in enumerate(pairwise(starts.tolist())):
        if stop > start:
            place, moment = divmod(int(totals[start:stop].argmax()), totals.shape[1])
            places[worker], found[worker] = start + place, amounts[start + place, moment]
    return places, found
