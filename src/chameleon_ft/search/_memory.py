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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.schedule import InFlightLimit
from chameleon_ft.workload import Workload

# By start (0 to L) and stop (0 to L); what stands where a stage would have no layers means nothing.
Bytes: TypeAlias = NDArray[np.int64]

# Receives that are posted.
_AHEAD: Final = 4
_NONE: Final = -(2**62)
_ANY: Final = 2**62


@dataclass(frozen=True, slots=True)
class _Need:
    """A stage of m micro-batches needs `fixed` + m * `each` bytes."""

    fixed: Bytes
    each: Bytes


class StageMemory:
    """Bytes of stages of `workload`, with fused or split backward."""

    def __init__(self, workload: Workload, *, split_backward: bool) -> None:
        self._split = split_backward
        self._stages = _Stages(workload)
        self._needs: dict[tuple[int, int], _Need] = {}
        self._most: dict[tuple[int, int], Bytes] = {}

    def stage_bytes(self, start: int, stop: int, limit: InFlightLimit, micro_batches: int) -> int:
        """The most that layers `start` to `stop` need on a worker under `limit`."""
        need = self._need(min(limit.in_flight, micro_batches), min(limit.kept, micro_batches))
        return int(need.fixed[start, stop] + micro_batches * need.each[start, stop])

    def most_micro_batches(self, to_end: int, capacity: int) -> Bytes:
        """By start and stop, how many micro-batches the stage that is `to_end` stages from the end can have, if it has
        no fewer than that.

        It has to be able to keep as many as 1F1B has in flight there.
        """
        key = to_end, capacity
        found = self._most.get(key)
        if found is None:
            need = self._need(to_end, to_end)
            spare = capacity - need.fixed
            # Where messages are empty, any number fits or none.
            each = np.maximum(need.each, 1)
            found = np.where(need.each > 0, spare // each, np.where(spare >= 0, _ANY, -1))
            self._most[key] = found
        return found

    def most_in_flight(self, capacity: int) -> Bytes:
        """By start and stop, more micro-batches than any order of operations can have between F and B (or I) at once.

        Each of them holds its activations, and what was sent on is kept. Where the state alone is too much, it is one.
        """
        stages = self._stages
        return _how_many(self._spare(capacity), stages.activations + stages.output)

    def most_waiting(self, capacity: int, micro_batches: int) -> Bytes:
        """By start and stop, more than any order can have waiting for W when the last I has ended."""
        stages = self._stages
        # The I of a first hop lets go of nothing.
        each = np.concatenate([stages.activations[:1], stages.weight_grads[1:]])
        return _how_many(self._spare(capacity) - micro_batches * stages.both, each)

    def _spare(self, capacity: int) -> Bytes:
        return capacity - self._stages.state - self._stages.samples

    def limits(
        self, stops: tuple[int, ...], capacities: tuple[int | None, ...], micro_batches: int
    ) -> list[InFlightLimit]:
        """For each stage of a pipeline that fits, a limit up to twice the pipeline's depth that its memory allows."""
        depth = len(stops)
        starts = (0, *stops[:-1])
        found: list[InFlightLimit] = []
        for position, (start, stop, capacity) in enumerate(zip(starts, stops, capacities, strict=True)):
            base = base_limit(position, depth)
            fitting = (
                wish
                for wish in self._wishes(base, depth)
                if capacity is None or self.stage_bytes(start, stop, wish, micro_batches) <= capacity
            )
            found.append(next(fitting, base))
        return found

    def _wishes(self, base: InFlightLimit, depth: int) -> Iterator[InFlightLimit]:
        """Limits from the largest that is ever tried down to `base`."""
        for extra in range(depth, -1, -1):
            if self._split:
                yield InFlightLimit(base.in_flight + extra, depth + extra)
            else:
                yield InFlightLimit(base.in_flight + extra, base.kept + extra)
        if self._split:
            for kept in range(depth - 1, base.kept, -1):
                yield InFlightLimit(base.in_flight, kept)

    def _need(self, in_flight: int, kept: int) -> _Need:
        """For as many micro-batches as are kept, or more."""
        key = in_flight, kept
        found = self._needs.get(key)
        if found is None:
            found = self._needs[key] = self._split_need(in_flight, kept) if self._split else self._fused_need(in_flight)
        return found

    def _fused_need(self, most: int) -> _Need:
        stages = self._stages
        output, both, each = stages.output, stages.both, stages.activations + stages.output
        # Until the next operation begins, a B's gradient is still there.
        after = most - 1
        holding = [(live, (live - 1) * each + stages.backward) for live in {1, min(most, _AHEAD), most}]
        holding += [(live, live * each + output) for live in {min(after, _AHEAD), after} if live]
        worst = _largest(held - live * both + min(live, _AHEAD) * output for live, held in holding)
        return _Need(stages.state + stages.samples + worst, both)

    def _split_need(self, most: int, kept: int) -> _Need:
        stages = self._stages
        output, both, held = stages.output, stages.both, stages.weight_grads
        each = stages.activations + output
        worst = kept * held + stages.working
        for live in {1, min(most, _AHEAD), most}:
            others = (live - 1) * each + (kept - live) * held - live * both
            in_input_grad = stages.input_grad + min(live - 1, _AHEAD - 1) * output
            in_others = np.maximum(stages.forward, each + stages.working) + min(live, _AHEAD) * output
            worst = np.maximum(worst, others + np.maximum(in_input_grad, in_others))
        fixed = stages.state + stages.samples
        first = fixed[:1] + (kept - 1) * each[:1] + stages.backward[:1]
        # The I of a first hop computes nothing and lets go of nothing; its W is a B.
        return _Need(np.concatenate([first, (fixed + worst)[1:]]), np.concatenate([output[:1], both[1:]]))


class _Stages:
    """Matrices of what a stage holds, and needs in its operations.

    Attributes:
        state: parameters, gradients and optimizer state.
        samples: kept at hand all the time.
        activations: of one micro-batch, from F to B.
        weight_grads: of one micro-batch, from I to W.
        output: of the message to the next stage; `both`: with that from the stage before.
        forward, backward, input_grad: the most that F, B and I need, the activations of their own micro-batch included,
            without messages that wait.
        working: the most that W needs on top of what is kept.
    """

    def __init__(self, workload: Workload) -> None:
        layers = workload.layers
        outputs = np.array([0, *(layer.output_bytes for layer in layers[:-1]), 0], dtype=np.int64)
        made = outputs[:-1]  # by a layer's I or B: the gradient of its input
        output = outputs[1:]
        working = _column([layer.working_bytes for layer in layers])
        activation = _column([layer.activation_bytes for layer in layers])
        weight_grad = _column([layer.weight_grad_bytes for layer in layers])
        # What I lets go of, where what it leaves for W stands in for it.
        released = np.where(weight_grad >= activation, activation, 0)
        kept = _sums(activation)

        self.state = _between(
            [layer.param_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in layers],
        )
        self.samples = _most_within(_column([layer.sample_bytes for layer in layers]))
        self.activations = _between(activation)
        self.weight_grads = _between(weight_grad)
        self.output = np.broadcast_to(outputs, self.state.shape)
        self.both = self.output + outputs[:, np.newaxis]
        self.working = _most_within(working)
        # In the layer that runs: what those below it hold, and what it makes and takes.
        below = kept[1:] + working
        self.forward = _most_within(below + output) - kept[:, np.newaxis]
        # The gradient from the layer above is a message only at the stage's end, and counted with those.
        inner = _most_within(below + output + made)
        first = np.concatenate([[_NONE], below + made])[np.newaxis, :]
        inner = np.concatenate([np.full((len(inner), 1), _NONE), inner[:, :-1]], axis=1)
        self.backward = np.maximum(inner, first) - kept[:, np.newaxis] + self.output
        gone = _sums(weight_grad) - _sums(released)
        running = _most_within(working + made - gone[:-1])
        self.input_grad = running + gone[np.newaxis, :] + self.activations + self.output


def base_limit(position: int, depth: int) -> InFlightLimit:
    """What stage `position` of a pipeline has to be able to keep: the micro-batches that 1F1B has in flight there."""
    return InFlightLimit(depth - position, depth - position)


def _how_many(spare: Bytes, each: Bytes) -> Bytes:
    """How often `each` goes into `spare`, at least once; any number of times where it is nothing."""
    found: Bytes = np.where(each > 0, np.maximum(spare // np.maximum(each, 1), 1), _ANY)
    return found


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


def _largest(matrices: Iterator[Bytes]) -> Bytes:
    found = next(matrices)
    for each in matrices:
        found = np.maximum(found, each)
    return found
