"""What a stage holds at the worst moment of any program that keeps to its limits: of all stages at once.

The limits are those of `InFlightLimit`: at most `in_flight` micro-batches between F and B (or I), and with split
backward at most `kept` between F and W. What counts is written in `chameleon_ft.estimate.memory`, with its default
buffers: messages that were sent are kept until the step has ended, and four receives are posted ahead.

Let a stage of m micro-batches have k in flight when nothing more is to come from the stages before. Then m - k are
done, and have left their sent messages behind; what it holds falls or rises from there with every backward, in a
straight line but for the receives that are posted ahead. So the ends of the lines are looked at, not the whole step. A
worker that has forwards still to come holds no more than that: each of them will leave two messages behind, and asks
for no more than two ahead.

So what a stage needs is some bytes, and some more for every micro-batch: two matrices by the layers where it starts and
stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.schedule import InFlightLimit
from chameleon_ft.workload import Workload

if TYPE_CHECKING:
    from chameleon_ft.search._memory_kernel import Holds

# By start (0 to L) and stop (0 to L); what stands where a stage would have no layers means nothing.
Bytes: TypeAlias = NDArray[np.int64]

_NONE: Final = -(2**62)
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What memory does to stages of one worker: by micro-batches, start and stop.

    Attributes:
        forwards: the most that can be run until the first gradient comes back.
        weight_grads: the least W that have been run when the last I has ended.
    """

    forwards: Bytes
    weight_grads: Bytes


class StageMemory:
    """Bytes of stages of `workload`, with fused or split backward."""

    def __init__(self, workload: Workload, *, split_backward: bool) -> None:
        self._split = split_backward
        self._holds = _holds(workload)
        self._num_layers = len(workload.layers)
        self._rooms: dict[int, Bytes] = {}

    def stage_bytes(self, start: int, stop: int, limit: InFlightLimit, micro_batches: int) -> int:
        """The most that layers `start` to `stop` need on a worker under `limit`."""
        from chameleon_ft.search._memory_kernel import stage_bytes

        return stage_bytes(self._holds, self._split, start, stop, limit.in_flight, limit.kept, micro_batches)

    def rooms(self, capacity: int, deepest: int) -> Bytes:
        """By stages to the end, which are `deepest` at the most, start and stop: how many micro-batches a stage can
        have, if it has no fewer than there are stages to the end.

        It has to be able to keep as many as 1F1B has in flight there.
        """
        found = self._rooms.get(capacity)
        if found is None or len(found) <= deepest:
            from chameleon_ft.search._memory_kernel import fill_rooms

            size = self._num_layers + 1
            more = deepest if found is None else min(max(deepest, 2 * len(found)), self._num_layers)
            found = self._rooms[capacity] = np.empty((more + 1, size, size), np.int64)
            fill_rooms(self._holds, self._split, capacity, found)
        return found

    def held_back(self, capacity: int, counts: Bytes) -> HeldBack:
        """For these numbers of micro-batches.

        Each that is in flight holds its activations, and what was sent on is kept. There is room for one at least, and
        then for one that waits for its W.
        """
        from chameleon_ft.search._memory_kernel import fill_held_back

        size = self._num_layers + 1
        forwards, weight_grads = np.zeros((2, len(counts), size, size), np.int64)
        fill_held_back(self._holds, capacity, counts, forwards, weight_grads)
        return HeldBack(forwards, weight_grads)

    def limits(self, stops: tuple[int, ...], capacities: tuple[int | None, ...], micro_batches: int) -> Bytes:
        """For each stage of a pipeline that fits, a limit up to twice the pipeline's depth that its memory allows.

        Returns:
            int64 [2, stages]: micro-batches in flight, and kept. Of wishes from the largest that is ever tried down to
            `base_limit`, the first that fits.
        """
        from chameleon_ft.search._memory_kernel import fill_limits

        known = [_UNKNOWN if capacity is None else capacity for capacity in capacities]
        found = np.empty((2, len(stops)), np.int64)
        fill_limits(self._holds, self._split, np.array(stops), np.array(known), micro_batches, found)
        return found


def _holds(workload: Workload) -> Holds:
    from chameleon_ft.search._memory_kernel import Holds

    layers = workload.layers
    outputs = np.array([0, *(layer.output_bytes for layer in layers[:-1]), 0], dtype=np.int64)
    made = outputs[:-1]  # by a layer's I or B: the gradient of its input
    sent = outputs[1:]
    working = _column([layer.working_bytes for layer in layers])
    activation = _column([layer.activation_bytes for layer in layers])
    weight_grad = _column([layer.weight_grad_bytes for layer in layers])
    # What I lets go of, where what it leaves for W stands in for it.
    released = np.where(weight_grad >= activation, activation, 0)
    kept = _sums(activation)

    state = _between([layer.param_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in layers])
    activations, weight_grads = _between(activation), _between(weight_grad)
    output = np.ascontiguousarray(np.broadcast_to(outputs, state.shape))
    # In the layer that runs: what those below it hold, and what it makes and takes.
    below = kept[1:] + working
    # The gradient from the layer above is a message only at the stage's end, and counted with those.
    inner = _most_within(below + sent + made)
    first = np.concatenate([[_NONE], below + made])[np.newaxis, :]
    inner = np.concatenate([np.full((len(inner), 1), _NONE), inner[:, :-1]], axis=1)
    gone = _sums(weight_grad) - _sums(released)
    return Holds(
        fixed=state + _most_within(_column([layer.sample_bytes for layer in layers])),
        activations=activations,
        weight_grads=weight_grads,
        output=output,
        both=output + outputs[:, np.newaxis],
        forward=_most_within(below + sent) - kept[:, np.newaxis],
        backward=np.maximum(inner, first) - kept[:, np.newaxis] + output,
        input_grad=_most_within(working + made - gone[:-1]) + gone[np.newaxis, :] + activations + output,
        working=_most_within(working),
    )


def base_limit(position: int, depth: int) -> InFlightLimit:
    """What stage `position` of a pipeline has to be able to keep: the micro-batches that 1F1B has in flight there."""
    return InFlightLimit(depth - position, depth - position)


def _column(values: list[int]) -> Bytes:
    return np.array(values, dtype=np.int64)


def _sums(values: Bytes | list[int]) -> Bytes:
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])


def _between(values: Bytes | list[int]) -> Bytes:
    """Sums over the layers of each stage."""
    sums = _sums(values)
    return sums[np.newaxis, :] - sums[:, np.newaxis]


def _most_within(values: Bytes) -> Bytes:
    """The largest of the values of each stage's layers."""
    count = len(values)
    spread = np.full((count + 1, count + 1), _NONE, dtype=np.int64)
    starts, layers = np.triu_indices(count)
    spread[starts, layers + 1] = values[layers]
    found: Bytes = np.maximum.accumulate(spread, axis=1)
    return found
