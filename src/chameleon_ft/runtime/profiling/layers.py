"""Measures seconds and bytes of each layer, and the fixed seconds of an operation beside its layers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from chameleon_ft.plan import LayerRange
from chameleon_ft.profiles import LayerTimes, Spread
from chameleon_ft.runtime.execution.micro_batches import KEPT_MICRO_BATCHES
from chameleon_ft.runtime.profiling.hops import Hop, ModelOnDevice, ResidentLayers
from chameleon_ft.runtime.profiling.memory import held_in_phases
from chameleon_ft.workload import LayerCost, is_recomputed

_WARM_UP = 3
_MOST_LAYERS_TOGETHER = 3


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """All layers of a model: their costs, the times behind them, and the fixed seconds of an operation."""

    costs: tuple[LayerCost, ...]
    times: tuple[LayerTimes, ...]
    operation_overhead_s: float


def measure_layers(model: ModelOnDevice, *, repeats: int, progress: Callable[[str], None]) -> MeasuredLayers:
    """Measure every layer alone, never more than a few on the device at a time."""
    progress("fixed cost of an operation")
    overhead_s = operation_overhead_s(model, repeats=repeats)
    sizes: list[LayerCost] = []
    times: list[LayerTimes] = []
    for layer in range(model.num_layers):
        progress(f"layer {layer + 1} of {model.num_layers}")
        resident = ResidentLayers(model, LayerRange(layer, layer + 1))
        sized = sized_layer(resident)
        sizes.append(sized)
        times.append(_times(resident, repeats, selective=sized.selective_bytes is not None))
    # No operation takes less than its fixed part, but on a busy machine a difference of times may say so.
    overhead_s = min(overhead_s, *(min(each.forward.median_s, each.backward.median_s) for each in times))
    costs = tuple(_timed(*each, overhead_s) for each in zip(sizes, times, strict=True))
    return MeasuredLayers(costs, tuple(times), overhead_s)


def _timed(sized: LayerCost, measured: LayerTimes, overhead_s: float) -> LayerCost:
    """Return the layer with its seconds beside the fixed ones of an operation."""
    return replace(
        sized,
        forward_s=max(0.0, measured.forward.median_s - overhead_s),
        input_grad_s=max(0.0, measured.input_grad.median_s - overhead_s),
        weight_grad_s=max(0.0, measured.weight_grad.median_s - overhead_s),
        fused_backward_s=max(0.0, measured.backward.median_s - overhead_s),
        selective_s=0.0 if measured.selective is None else measured.selective.median_s,
    )


def operation_overhead_s(model: ModelOnDevice, *, repeats: int) -> float:
    """Return the seconds that a hop of several layers saves over the same layers one by one, per operation saved.

    The median over the ranges of a few neighbouring layers, over F and B, and over rounds that each run all of them one
    after the other, so that a machine that slows down does so for both. Zero where one by one takes no longer, and
    where there are fewer than three layers.
    """
    together = min(_MOST_LAYERS_TOGETHER, model.num_layers)
    start = (model.num_layers - together) // 2
    window = LayerRange(start, start + together)
    resident = ResidentLayers(model, window)
    singles = [Hop(resident, LayerRange(layer, layer + 1)) for layer in window]
    longer = [
        (first, Hop(resident, LayerRange(start + first, start + stop)), stop - first)
        for first in range(together)
        for stop in range(first + 2, together + 1)
        if stop - first < model.num_layers
    ]
    saved: list[float] = []
    for number in range(_WARM_UP + repeats if longer else 0):
        alone = [_fused_s(hop) for hop in singles]
        for first, hop, count in longer:
            whole = _fused_s(hop)
            parts = alone[first : first + count]
            if number >= _WARM_UP:
                saved += [(sum(part[kind] for part in parts) - whole[kind]) / (count - 1) for kind in (0, 1)]
    return max(0.0, statistics.median(saved)) if saved else 0.0


def sized_layer(resident: ResidentLayers) -> LayerCost:
    """Return the one layer that is resident with its bytes, and no seconds yet.

    The bytes are those of `chameleon_ft.estimate.memory`: an input belongs to the activations of the layer that
    receives it, and an output does not. The working memory of a layer is the most that an operation holds beyond that;
    or a commit, when there are no activations. Between I and W everything that I has been through is kept, because the
    graph of the layers below and of the weights hangs on it. Only the part above the last weights is released, and only
    for the last layer and its loss is that counted.

    What a mixture of experts holds depends on how many tokens each expert gets. So the bytes are the most that it holds
    for random vectors, of which each expert gets some, and for equal ones, which all go to the same experts.
    """
    model, hop = resident.model, Hop(resident, resident.layers)
    layer = resident.layers.start
    own = _most_bytes(resident)
    again = _bytes_if_selective(resident, own.kept)
    behind = model.boundary_bytes(layer)
    halves = own.working_halves if again is None else max(own.working_halves, again.working_halves)
    samples = KEPT_MICRO_BATCHES * sum(tensor.nbytes for tensor in model.samples)
    return LayerCost(
        f"{model.kind(layer)} {layer}",
        0.0,
        0.0,
        0.0,
        param_bytes=resident.param_bytes,
        gradient_bytes=resident.gradient_bytes,
        optimizer_bytes=resident.optimizer_bytes,
        master_bytes=resident.held.master_bytes,
        activation_bytes=own.kept,
        weight_grad_bytes=own.left,
        output_bytes=behind,
        working_bytes=max(0, own.working, resident.commit_bytes - own.kept - behind),
        halves_working_bytes=max(0, halves),
        sample_bytes=samples if hop.is_first or hop.is_last else 0,
        selective_bytes=None if again is None else again.kept,
        selective_weight_grad_bytes=None if again is None else again.left,
        selective_working_bytes=None if again is None else max(0, again.working),
    )


@dataclass(frozen=True, slots=True)
class _HopBytes:
    """Bytes of the one layer of a hop: kept from F, left for W, and the most beyond those in F or B, and in I or W."""

    kept: int
    left: int
    working: int
    working_halves: int

    def at_most(self, other: _HopBytes) -> _HopBytes:
        """Return bytes that suffice for both, at each moment of an operation."""
        kept, left = max(self.kept, other.kept), max(self.left, other.left)
        return _HopBytes(
            kept,
            left,
            max(self.kept + self.working, other.kept + other.working) - kept,
            max(self.left + self.working_halves, other.left + other.working_halves) - left,
        )


def _most_bytes(resident: ResidentLayers, *, selective: bool = False) -> _HopBytes:
    """Return the bytes of the one layer for any input between those whose vectors all differ and are all equal."""
    found = _bytes_of(Hop(resident, resident.layers, selective=selective))
    if resident.layers.start == 0:  # its input is that of the samples
        return found
    return found.at_most(_bytes_of(Hop(resident, resident.layers, selective=selective, alike=True)))


def _bytes_of(hop: Hop) -> _HopBytes:
    before, behind = (hop.model.boundary_bytes(layer) for layer in (hop.layers.start - 1, hop.layers.stop - 1))
    _warm_up(hop)
    fused = held_in_phases(hop.fused_phases(), hop.model.device)
    base = fused["enter"].before
    kept = max(0, fused["F"].after - base - behind)
    working = max(fused["read"].peak, fused["F"].peak - behind, fused["B"].peak - 2 * behind - before) - base - kept
    if hop.is_first:
        return _HopBytes(kept, kept, working, 0)
    split = held_in_phases(hop.split_phases(), hop.model.device)
    base = split["enter"].before
    left = max(kept, split["I"].after - base - before - behind)
    halves = max(split["I"].peak, split["W"].peak) - base - left - behind - before
    return _HopBytes(kept, left, working, halves)


def _bytes_if_selective(resident: ResidentLayers, activation_bytes: int) -> _HopBytes | None:
    """Return the bytes of the layer if it is recomputed selectively; None if that saves nothing."""
    if not is_recomputed(resident.layers.start, resident.model.num_layers):
        return None
    found = _most_bytes(resident, selective=True)
    return found if found.kept < activation_bytes else None


def _times(resident: ResidentLayers, repeats: int, *, selective: bool) -> LayerTimes:
    """Time F, B, I and W of the one layer that is resident. The first layer's I makes nothing, and its W is its B.

    With `selective`, also how much longer F and B take if the layer is recomputed selectively.
    """
    hop = Hop(resident, resident.layers)
    again = Hop(resident, resident.layers, selective=True)
    fused: list[tuple[float, float]] = []
    split: list[tuple[float, float]] = []
    longer: list[float] = []
    for _ in range(_WARM_UP + repeats):
        fused.append(_fused_s(hop))
        if selective:
            longer.append(max(0.0, sum(_fused_s(again)) - sum(fused[-1])))
        if not hop.is_first:
            seconds = _seconds(hop, hop.split_phases())
            split.append((seconds["I"], seconds["W"]))
    forward, backward = (Spread.of(times) for times in zip(*fused[_WARM_UP:], strict=True))
    input_grad, weight_grad = Spread(0.0, 0.0, 0.0, repeats), backward
    if split:
        input_grad, weight_grad = (Spread.of(times) for times in zip(*split[_WARM_UP:], strict=True))
    return LayerTimes(
        forward=forward,
        backward=backward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        selective=Spread.of(longer[_WARM_UP:]) if longer else None,
    )


def _fused_s(hop: Hop) -> tuple[float, float]:
    seconds = _seconds(hop, hop.fused_phases())
    return seconds["F"], seconds["B"]


def _seconds(hop: Hop, phases: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, run in phases.items():
        hop.model.synchronize()
        start = time.perf_counter()
        run()
        hop.model.synchronize()
        found[name] = time.perf_counter() - start
    return found


def _warm_up(hop: Hop) -> None:
    """Run all phases once, so that memory that libraries take for good is not counted."""
    for phases in (hop.fused_phases(), {} if hop.is_first else hop.split_phases()):
        for run in phases.values():
            run()
