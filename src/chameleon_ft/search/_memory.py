"""What a stage holds at the worst moment of any program that keeps to its limits.

The limits are those of `InFlightLimit`: at most `in_flight` micro-batches between F and B (or I), and with split
backward at most `kept` between F and W. What counts is written in `chameleon_ft.estimate.memory`, with its default
buffers: messages that were sent are kept until the step has ended, and four receives are posted ahead.

Let a stage of m micro-batches have k in flight when nothing more is to come from the stages before. Then m - k are
done, and have left their sent messages behind; what it holds falls or rises from there with every backward, in a
straight line but for the receives that are posted ahead. So the ends of the lines are looked at, not the whole step. A
worker that has forwards still to come holds no more than that: each of them will leave two messages behind, and asks
for no more than two ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from chameleon_ft.schedule import InFlightLimit
from chameleon_ft.workload import LayerCost, Workload

# Receives that are posted.
_AHEAD: Final = 4


class StageMemory:
    """Bytes of stages of `workload`, with fused or split backward."""

    def __init__(self, workload: Workload, *, split_backward: bool) -> None:
        self._layers = workload.layers
        self._split = split_backward
        self._outputs = [layer.output_bytes for layer in workload.layers[:-1]] + [0]
        self.state = self._summed(_state_bytes)
        self.activations = self._summed(lambda layer: layer.activation_bytes)
        self._weight_grads = self._summed(lambda layer: layer.weight_grad_bytes)
        # Between any two stages, at the least.
        self.least_output = min(self._outputs[:-1], default=0)
        self._moments: dict[tuple[int, int], _Moments] = {}

    def stage_bytes(self, start: int, stop: int, limit: InFlightLimit, micro_batches: int) -> int:
        """The most that layers `start` to `stop` need on a worker under `limit`."""
        output = self._outputs[stop - 1]
        both = output + (self._outputs[start - 1] if start else 0)
        each = self.activations[stop] - self.activations[start] + output
        moments = self._moments_of(start, stop)
        fixed = self.state[stop] - self.state[start] + moments.samples
        kept = min(limit.kept, micro_batches)
        if self._split and start == 0:
            # The I of a first hop computes nothing and lets go of nothing; its W is a B.
            return fixed + (kept - 1) * each + moments.backward + micro_batches * output
        most = min(limit.in_flight, micro_batches)
        if not self._split:
            # Until the next operation begins, a B's gradient is still there.
            after = most - 1
            holding = [(live, (live - 1) * each + moments.backward) for live in (1, min(most, _AHEAD), most)]
            holding += [(live, live * each + output) for live in (min(after, _AHEAD), after) if live]
            return fixed + max(
                held + (micro_batches - live) * both + min(live, _AHEAD) * output for live, held in holding
            )
        held = self._weight_grads[stop] - self._weight_grads[start]
        worst = kept * held + moments.working + micro_batches * both
        for live in {1, min(most, _AHEAD), most}:
            others = (live - 1) * each + min(micro_batches - live, kept - live) * held + (micro_batches - live) * both
            in_input_grad = moments.input_grad + min(live - 1, _AHEAD - 1) * output
            in_others = max(moments.forward, each + moments.working) + min(live, _AHEAD) * output
            worst = max(worst, others + max(in_input_grad, in_others))
        return fixed + worst

    def _moments_of(self, start: int, stop: int) -> _Moments:
        found = self._moments.get((start, stop))
        if found is None:
            found = self._moments[start, stop] = self._looked_at(start, stop)
        return found

    def _looked_at(self, start: int, stop: int) -> _Moments:
        """Layer by layer, as `chameleon_ft.estimate.memory` goes through them."""
        layers, outputs, sums = self._layers, self._outputs, self.activations
        forward = backward = input_grad = 0
        left = sums[stop] - sums[start]
        held = 0
        for running in range(stop - 1, start - 1, -1):
            layer = layers[running]
            made = outputs[running - 1] if running else 0
            below = sums[running + 1] - sums[start]
            from_above = 0 if running + 1 == stop else outputs[running]
            forward = max(forward, below + outputs[running] + layer.working_bytes)
            backward = max(backward, below + outputs[stop - 1] + layer.working_bytes + from_above + made)
            held += layer.weight_grad_bytes
            if layer.weight_grad_bytes >= layer.activation_bytes:
                left -= layer.activation_bytes
            input_grad = max(input_grad, left + held + outputs[stop - 1] + layer.working_bytes + made)
        own = layers[start:stop]
        return _Moments(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            working=max(layer.working_bytes for layer in own),
            samples=max(layer.sample_bytes for layer in own),
        )

    def _summed(self, amount: Callable[[LayerCost], int]) -> list[int]:
        return list(accumulate(map(amount, self._layers), initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    """The most that an operation of a stage needs, the activations of its own micro-batch included.

    Attributes:
        forward, backward, input_grad: in F, B and I; without messages that wait.
        working: on top of what is kept, in W.
        samples: kept at hand all the time.
    """

    forward: int
    backward: int
    input_grad: int
    working: int
    samples: int


def base_limit(position: int, depth: int) -> InFlightLimit:
    """What stage `position` of a pipeline has to be able to keep: the micro-batches that 1F1B has in flight there."""
    return InFlightLimit(depth - position, depth - position)


def _state_bytes(layer: LayerCost) -> int:
    return layer.param_bytes + layer.gradient_bytes + layer.optimizer_bytes
