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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, pairwise
from typing import Final

import numpy as np

from chameleon_ft.cost._kernels.records import OPTION, LayerFigures
from chameleon_ft.cost.presets import Recompute
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.plan.shards import owned_share
from chameleon_ft.schedule import Operation, Program
from chameleon_ft.schedule.program import KINDS, operations_from
from chameleon_ft.schedule.records import PROGRAM_RECORD, Integers, Records
from chameleon_ft.workload import Workload, is_recomputed

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
    """Bytes that workers hold for the layers of a workload: throughout a step, at its peak, and of single stages.

    No other module adds up a worker's memory. `worst` is exact for any program, and `one_f_one_b_bytes` for a stage
    under 1F1B, whatever the other stages are. `min_stage_bytes` is a lower bound for all programs of a stage, and no
    program under the limits of `stage_limits` exceeds the memory. Planners that only need to know whether a stage fits
    call `min_stage_bytes` first, because it is quick, and then `one_f_one_b_bytes`.

    Attributes:
        held_before: bytes of parameters, gradients and optimizer state of all layers before each one, and of all.
    """

    def __init__(self, workload: Workload) -> None:
        self._layers = workload.layers
        self._figures = _layer_figures(workload)
        self._owners = workload.owners
        self._replicated = workload.replicated_bytes
        self._state_bytes = cache(lambda ranges, holders: self._state_of(ranges, holders).total_bytes)
        self.one_f_one_b_bytes = cache(self._one_f_one_b_bytes)
        own = self._figures
        self.held_before = _sums_before(own.state)
        self._kept_before = {
            Recompute.NONE: _sums_before(own.activation),
            Recompute.SELECTIVE: _sums_before(own.selective),
            Recompute.FULL: _sums_before(np.where(own.is_recomputable, own.input, own.activation)),
        }

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
        from chameleon_ft.cost._kernels.stage_memory import measure_stages

        fields = ["start", "stop", "recompute_start", "recompute_stop", "recompute_selective"]
        width = 1 + int(records["stop"].max(initial=0))
        # Each row becomes one number, because sorting rows is many times slower.
        keys = np.zeros(len(records), np.int64)
        for name in fields:
            keys = keys * width + records[name]
        _, first, row_of = np.unique(keys, return_index=True, return_inverse=True)
        rows = np.array(records[fields][first].tolist(), np.int64).reshape(-1, len(fields))
        stages = np.empty((len(rows), 5), np.int64)
        moments = np.empty((len(rows), len(KINDS), len(_MOMENT)), np.int64)
        measure_stages(self._figures, rows, stages, moments)
        return _worst_moments(records, np.array(starts), stages[row_of], moments, row_of, buffers)

    def min_stage_bytes(self, start: int, stop: int, *, in_flight: int, recompute: Recompute = Recompute.NONE) -> int:
        """Return a lower bound of the memory of any program that has so many micro-batches in flight at a time.

        It counts the state of layers `start` to `stop`, which all are recomputed in one way, and what stays of their
        activations. The exact peak adds messages, tensors for weight gradients, samples and work space.
        """
        held, kept = self.held_before, self._kept_before[recompute]
        return held[stop] - held[start] + in_flight * (kept[stop] - kept[start])

    def _one_f_one_b_bytes(
        self, start: int, stop: int, *, to_end: int, micro_batches: int, recompute: bool = False
    ) -> int:
        """Return the peak of one stage of a pipeline under 1F1B with fused backward, whatever its other stages are.

        Args:
            start, stop: layers of the stage.
            to_end: stages from this one to the end of the pipeline, both included; 1 at the last one.
            micro_batches: micro-batches of the pipeline in a step.
            recompute: the stage recomputes all its layers in full.
        """
        warm_up = min(to_end, micro_batches)
        backward = np.array([0] * warm_up + [1, 0] * (micro_batches - warm_up) + [1] * warm_up, np.bool_)
        is_first, is_last = start == 0, stop == len(self._layers)
        # Which workers the neighbours are does not matter.
        before, after = (-1 if is_first else 1), (-1 if is_last else 2)
        records = np.zeros(len(backward), PROGRAM_RECORD)
        records["kind"] = np.where(backward, _BACKWARD, _FORWARD)
        records["start"], records["stop"], records["first"], records["last"] = start, stop, is_first, is_last
        records["receive_from"] = np.where(backward, after, before)
        records["send_to"] = np.where(backward, before, after)
        if recompute:
            records["recompute_start"], records["recompute_stop"] = start, stop
        (moving_bytes,) = self.moving_bytes(records, [0, len(records)])
        return self.state_of([range(start, stop)]).total_bytes + moving_bytes

    def stage_options(
        self, capacity_bytes: int | None, *, split_backward: bool, micro_batches: int
    ) -> tuple[Integers, Records]:
        """Return the useful ways to recompute each stage on a worker, with what micro-batches need and how many fit.

        Args:
            capacity_bytes: memory of the worker; None if it is not checked, so that recomputation is useless.
            split_backward: backward is split in two.
            micro_batches: micro-batches of the pipeline, which never has more in flight.

        Returns:
            Row of the first option of each stage by start and stop, int64 [L + 1, L + 2]; and `OPTION` [options], those
            of a stage by seconds, at speed 1. The options of (start, stop) end where those of (start, stop + 1) begin.
        """
        from chameleon_ft.cost._kernels.stage_memory import fill_options

        size = len(self._layers)
        room = sum(3 * (stop - start) + 1 for start, stop in combinations(range(size + 1), 2))
        first, options = np.empty((size + 1, size + 2), np.int64), np.empty(room + 1, OPTION)
        capacity, most = (2**62, 0) if capacity_bytes is None else (capacity_bytes, micro_batches)
        work = np.empty(5, np.int64), np.empty((len(KINDS), len(_MOMENT)), np.int64)
        count = fill_options(self._figures, capacity, split_backward, most, first, options, *work)
        return first, options[:count].copy()

    def stage_limits(
        self,
        options: Records,
        cut_points: Sequence[int],
        capacities: Sequence[int],
        *,
        micro_batches: int,
        split_backward: bool,
    ) -> Integers | None:
        """Return limits of the stages of a pipeline under which no order of operations exceeds the memory.

        Args:
            options: the option of each stage; `OPTION` [stages].
            cut_points: layer after the last one of each stage.
            capacities: bytes of each worker; negative where memory is not checked.
            micro_batches: micro-batches of the pipeline.
            split_backward: backward is split in two.

        Returns:
            int64 [3, stages]: micro-batches in flight, micro-batches kept, and W that wait. None if a stage has no room
            for one micro-batch.
        """
        from chameleon_ft.cost._kernels.stage_memory import fill_limits

        messages = self.max_message_bytes(np.array([0, *cut_points[:-1]]), np.array(cut_points), micro_batches)
        limits = np.empty((3, len(cut_points)), np.int64)
        fits = fill_limits(options, np.array(capacities), messages, micro_batches, split_backward, limits)
        return limits if fits else None

    def max_message_bytes(self, starts: Integers, stops: Integers, micro_batches: int) -> Integers:
        """Return an upper bound of the bytes in message buffers of stages: posted receives and sent gradients.

        The buffers of the current micro-batch are counted with its operations. Each other micro-batch has either posted
        the receive of its activation or sent its gradient.
        """
        buffers, others = MessageBuffers(), micro_batches - 1
        boundaries = np.append(self._figures.input, 0)
        below, above = boundaries[starts], boundaries[stops]
        ahead = buffers.receives_ahead
        downwards, upwards = min(ahead, others), min(ahead, micro_batches)
        found: Integers = np.maximum(
            min(ahead + buffers.sends_kept, others) * below + min(ahead - downwards, micro_batches) * above,
            upwards * above + min(ahead - upwards + buffers.sends_kept, others) * below,
        )
        return found


def needed_bytes(options: Records) -> Integers:
    """Return what options of stages need with one micro-batch at a time, without messages; int64 [options]."""
    moments = [options[name] for name in ("forward", "backward", "weight")]
    found: Integers = options["fixed"] + np.maximum.reduce(moments)
    return found


def _sums_before(values: Integers) -> list[int]:
    sums: list[int] = [0, *np.cumsum(values).tolist()]
    return sums


def _layer_figures(workload: Workload) -> LayerFigures:
    layers, selective = workload.layers, workload.recomputed_selectively().layers
    outputs = [layer.output_bytes for layer in layers[:-1]]
    return LayerFigures(
        state=np.array([layer.held_bytes for layer in layers], np.int64),
        sample=np.array([layer.sample_bytes for layer in layers], np.int64),
        activation=np.array([layer.activation_bytes for layer in layers], np.int64),
        input=np.array([0, *outputs], np.int64),
        # The output of the last layer is a loss.
        output=np.array([*outputs, 0], np.int64),
        selective=np.array([layer.activation_bytes for layer in selective], np.int64),
        weight_grad=np.array([layer.weight_grad_bytes for layer in layers], np.int64),
        selective_weight_grad=np.array([layer.weight_grad_bytes for layer in selective], np.int64),
        working=np.array([layer.working_bytes for layer in layers], np.int64),
        selective_working=np.array([layer.working_bytes for layer in selective], np.int64),
        halves_working=np.array([layer.working_in_halves for layer in layers], np.int64),
        is_recomputable=np.array([is_recomputed(layer, len(layers)) for layer in range(len(layers))]),
        forward_s=np.array([layer.forward_s for layer in layers]),
        selective_s=np.array([layer.selective_s for layer in layers]),
    )


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
