"""Seconds and bytes of each layer, and what an operation costs beside its layers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from chameleon_ft.plan import LayerRange
from chameleon_ft.profiles import LayerTimes, Spread
from chameleon_ft.runtime.batches import KEPT_MICRO_BATCHES
from chameleon_ft.runtime.profiling.hops import Hop, ModelOnDevice, ResidentLayers
from chameleon_ft.runtime.profiling.memory import held_in_phases
from chameleon_ft.workload import LayerCost, is_recomputed

__all__ = ["LayerBytes", "MeasuredLayers", "layer_bytes", "measure_layers", "operation_overhead_s", "spread"]

_WARM_UP = 3
_MOST_LAYERS_TOGETHER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The bytes of a `LayerCost`, by the same names."""

    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    weight_grad_bytes: int
    output_bytes: int
    working_bytes: int
    sample_bytes: int
    selective_bytes: int | None


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
    costs: list[LayerCost] = []
    times: list[LayerTimes] = []
    for layer in range(model.num_layers):
        progress(f"layer {layer + 1} of {model.num_layers}")
        resident = ResidentLayers(model, LayerRange(layer, layer + 1))
        sizes = layer_bytes(resident)
        measured = _times(resident, repeats, selective=sizes.selective_bytes is not None)
        costs.append(_cost(f"{model.kind(layer)} {layer}", measured, sizes, overhead_s))
        times.append(measured)
    return MeasuredLayers(tuple(costs), tuple(times), overhead_s)


def spread(times_s: Sequence[float]) -> Spread:
    """What repeated measurements come to."""
    return Spread(statistics.median(times_s), min(times_s), max(times_s), len(times_s))


def operation_overhead_s(model: ModelOnDevice, *, repeats: int) -> float:
    """Seconds that a hop of several layers saves over the same layers one by one, for each operation saved.

    The median over the ranges of a few neighbouring layers, over F and B, and over the rounds in which all of them are
    run one after the other, so that a machine that becomes slower on the way does so for both. Zero where one by one
    takes no longer, and where there are fewer than three layers: a hop through a whole model loads its samples once.
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
        alone = [_fused_s(hop, model) for hop in singles]
        for first, hop, count in longer:
            whole = _fused_s(hop, model)
            parts = alone[first : first + count]
            if number >= _WARM_UP:
                saved += [(sum(part[kind] for part in parts) - whole[kind]) / (count - 1) for kind in (0, 1)]
    return max(0.0, statistics.median(saved)) if saved else 0.0


def layer_bytes(resident: ResidentLayers) -> LayerBytes:
    """The bytes of the one layer that is resident.

    As `chameleon_ft.estimate.memory` counts them: an input belongs to the activations of the layer that it comes in to,
    and an output does not. What a layer works with is the most of what an operation holds beyond that; or a commit,
    when there are no activations. Between I and W everything is kept that I has been through, for the graph of the
    layers below and of the weights hangs on it; only what lies above the last weights is let go of, and that is counted
    out for the last layer and its loss alone.
    """
    model, hop = resident.model, Hop(resident, resident.layers)
    layer = resident.layers.start
    before, behind = model.boundary_bytes(layer - 1), model.boundary_bytes(layer)
    _run_all(hop)
    fused = held_in_phases(
        {
            "enter": hop.enter,
            "F": hop.forward,
            "gradient": hop.receive_gradient,
            "B": hop.backward,
            "end": hop.leave,
        },
        model.device,
    )
    base = fused["enter"].before
    activations = max(0, fused["F"].after - base - behind)
    working = [
        resident.state.commit_bytes - activations - behind,
        fused["F"].peak - base - activations - behind,
        fused["B"].peak - base - activations - 2 * behind - before,
    ]
    left = activations
    if not hop.is_first:
        split = held_in_phases(
            {
                "enter": hop.enter,
                "F": hop.forward,
                "gradient": hop.receive_gradient,
                "graph": (lambda: None) if hop.is_last else hop.keep_graph,
                "I": hop.input_grad,
                "W": hop.weight_grad,
                "end": hop.leave,
            },
            model.device,
        )
        base = split["enter"].before
        left = max(activations, split["I"].after - base - before - behind)
        working += [
            split["I"].peak - base - left - behind - before,
            split["W"].peak - base - left - behind - before,
        ]
    samples = KEPT_MICRO_BATCHES * sum(tensor.nbytes for tensor in model.samples)
    return LayerBytes(
        param_bytes=resident.state.param_bytes,
        gradient_bytes=resident.state.gradient_bytes,
        optimizer_bytes=resident.state.optimizer_bytes,
        activation_bytes=activations,
        weight_grad_bytes=left,
        output_bytes=behind,
        working_bytes=max(0, *working),
        sample_bytes=samples if hop.is_first or hop.is_last else 0,
        selective_bytes=_selective_bytes(resident, activations),
    )


def _selective_bytes(resident: ResidentLayers, activation_bytes: int) -> int | None:
    """Bytes that the layer keeps if it is recomputed selectively; None if that is no less."""
    model, layer = resident.model, resident.layers.start
    if not is_recomputed(layer, model.num_layers):
        return None
    hop = Hop(resident, resident.layers, selective=True)
    _run_all(hop)
    held = held_in_phases(
        {
            "enter": hop.enter,
            "F": hop.forward,
            "gradient": hop.receive_gradient,
            "B": hop.backward,
            "end": hop.leave,
        },
        model.device,
    )
    kept = max(0, held["F"].after - held["enter"].before - model.boundary_bytes(layer))
    return kept if kept < activation_bytes else None


def _times(resident: ResidentLayers, repeats: int, *, selective: bool) -> LayerTimes:
    """F, B, I and W of the one layer that is resident. The first layer's I makes nothing, and its W is its B.

    With `selective`, also by how much F and B are longer if the layer is recomputed selectively.
    """
    hop = Hop(resident, resident.layers)
    again = Hop(resident, resident.layers, selective=True)
    fused: list[tuple[float, float]] = []
    split: list[tuple[float, float]] = []
    longer: list[float] = []
    for _ in range(_WARM_UP + repeats):
        fused.append(_fused_s(hop, resident.model))
        if selective:
            longer.append(max(0.0, sum(_fused_s(again, resident.model)) - sum(fused[-1])))
        if not hop.is_first:
            split.append(_split_s(hop, resident.model))
    backward = spread([seconds for _, seconds in fused[_WARM_UP:]])
    return LayerTimes(
        forward=spread([seconds for seconds, _ in fused[_WARM_UP:]]),
        backward=backward,
        input_grad=spread([seconds for seconds, _ in split[_WARM_UP:]]) if split else Spread(0.0, 0.0, 0.0, repeats),
        weight_grad=spread([seconds for _, seconds in split[_WARM_UP:]]) if split else backward,
        selective=spread(longer[_WARM_UP:]) if longer else None,
    )


def _cost(name: str, times: LayerTimes, sizes: LayerBytes, overhead_s: float) -> LayerCost:
    def own(measured: Spread) -> float:
        return max(0.0, measured.median_s - overhead_s)

    return LayerCost(
        name=name,
        forward_s=own(times.forward),
        input_grad_s=own(times.input_grad),
        weight_grad_s=own(times.weight_grad),
        fused_backward_s=own(times.backward),
        selective_s=0.0 if times.selective is None else times.selective.median_s,
        **asdict(sizes),
    )


def _fused_s(hop: Hop, model: ModelOnDevice) -> tuple[float, float]:
    hop.enter()
    forward_s = _seconds(hop.forward, model)
    hop.receive_gradient()
    backward_s = _seconds(hop.backward, model)
    hop.leave()
    return forward_s, backward_s


def _split_s(hop: Hop, model: ModelOnDevice) -> tuple[float, float]:
    hop.enter()
    hop.forward()
    hop.receive_gradient()
    input_grad_s = _seconds(hop.input_grad, model)
    hop.leave()
    return input_grad_s, _seconds(hop.weight_grad, model)


def _seconds(run: Callable[[], None], model: ModelOnDevice) -> float:
    model.synchronize()
    start = time.perf_counter()
    run()
    model.synchronize()
    return time.perf_counter() - start


def _run_all(hop: Hop) -> None:
    """Once through, so that what libraries set aside for good is there before anything is counted."""
    hop.enter()
    hop.forward()
    hop.receive_gradient()
    hop.backward()
    if not hop.is_first:
        hop.enter()
        hop.forward()
        hop.receive_gradient()
        hop.input_grad()
        hop.weight_grad()
    hop.leave()
