"""Measures seconds and bytes of each layer, and the fixed seconds of an operation beside its layers.

A hop of a route is computed as the executor does it, in phases that can be measured one by one. The bytes of a phase
are those that the allocator hands out: held before, at the most, and after. On a CPU torch counts nothing by itself,
but reports to its profiler every block that is taken and given back, those inside kernels too. An accelerator's
allocator keeps the figures, rounded up to its blocks.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chameleon_ft.config import RunConfig
from chameleon_ft.cost.profile import LayerTimes, Spread
from chameleon_ft.data.buckets import largest_bucket
from chameleon_ft.data.samples import SamplesInOrder
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import gradient_bytes
from chameleon_ft.models.checks import boundary_specs
from chameleon_ft.models.fields import with_fields
from chameleon_ft.models.precision import loss_of
from chameleon_ft.plan import LayerRange
from chameleon_ft.sync import Segment
from chameleon_ft.trees import leaves_of, mapped
from chameleon_ft.worker.device import is_host_memory, wait_for_stream
from chameleon_ft.worker.execution.backward import Roots, input_gradient, whole_backward
from chameleon_ft.worker.execution.compilation import stand_in
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.micro_batches import KEPT_MICRO_BATCHES, MicroBatch
from chameleon_ft.workload import LayerCost, is_recomputed

_MARK = "phase "


class Held(NamedTuple):
    """Bytes that are held before, at the most during, and after a phase; only differences mean something."""

    before: int
    peak: int
    after: int


def held_in_phases(phases: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, Held]:
    """Run the phases in order and return the bytes that tensors on `device` hold in each.

    On a CPU no figure counts the blocks taken before the first phase, so no phase may give one of them back.
    """
    # Garbage is collected at any time, also garbage from before.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _from_events(phases) if is_host_memory(device) else _from_statistics(phases, device)
    finally:
        if collects:
            gc.enable()


def _from_statistics(phases: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for name, run in phases.items():
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        run()
        torch.accelerator.synchronize(device)
        peak, after = torch.accelerator.max_memory_allocated(device), torch.accelerator.memory_allocated(device)
        found[name] = Held(before, peak, after)
    return found


def _from_events(phases: Mapping[str, Callable[[], None]]) -> dict[str, Held]:
    # Torch loads its library for traces even if it is not used, and the library would write to the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, use_kineto=False) as profiler:
        for name, run in phases.items():
            with torch.autograd.profiler.record_function(_MARK + name):
                run()
    results: Any = profiler.kineto_results
    assert results is not None
    events = results.events()
    blocks = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    # By time alone: blocks of the same nanosecond stay in order.
    blocks.sort(key=itemgetter(0))
    marks = {event.name(): event for event in events if event.name().startswith(_MARK)}
    found: dict[str, Held] = {}
    held = at = 0
    for name in phases:
        end_ns = marks[_MARK + name].end_ns()
        before = peak = held
        while at < len(blocks) and blocks[at][0] <= end_ns:
            held += blocks[at][1]
            peak = max(peak, held)
            at += 1
        found[name] = Held(before, peak, held)
    return found


Phases = dict[str, Callable[[], None]]
"""The parts of a computation by name, to be called one after the other."""


class ModelOnDevice:
    """A job whose layers are built a few at a time, with the first micro-batch of a run to run them on.

    Attributes:
        boundaries: the output of each layer for one micro-batch.
        first_trained: The first layer with parameters that are trained, which has the last part of a backward.
        samples: inputs and targets of the micro-batch.
    """

    def __init__(self, job: Job, config: RunConfig, device: torch.device) -> None:
        size = config.batch.micro_batch_size
        job = largest_bucket(job)
        self._samples = SamplesInOrder(job.dataset, config.seed, job.collate, is_tolerant=True)
        self._size = size
        self.job = with_fields(job, *self._samples.micro_batch(0, size))
        self.boundaries = boundary_specs(self.job, size, device=device, seed=config.seed)
        self.first_trained = next((layer for layer, size in enumerate(gradient_bytes(job)) if size), 0)
        self.seed = config.seed
        self.device = device
        self.samples = self.read()

    @property
    def num_layers(self) -> int:
        return self.job.num_layers

    def read(self) -> MicroBatch:
        """Read the micro-batch, which takes as much memory as reading another one."""
        read = self._samples.micro_batch(0, self._size)
        return MicroBatch(*mapped(lambda tensor: tensor.to(self.device), read))

    def kind(self, layer: int) -> str:
        """Return the name of the factory of `layer`, in lower case."""
        factory = self.job.layers[layer]
        name = str(getattr(getattr(factory, "func", factory), "__name__", "layer")).lower()
        return name if name.isidentifier() else "layer"

    def boundary_before(self, layer: int, *, alike: bool = False) -> Any:
        """Return the samples, or random tensors of the shapes and types that `layer` receives.

        Integers are all zeros, a value that every layer accepts. If `alike`, all vectors of a random tensor are equal;
        samples stay as they are.
        """
        if layer == 0:
            return self.samples.input_of(self.job)
        leaves = []
        for spec in self.boundaries[layer - 1].leaves:
            leaf = stand_in(spec, self.device)
            if alike and leaf.ndim:
                leaf = leaf.flatten()[: leaf.shape[-1]].expand_as(leaf).clone()
            leaves.append(leaf.requires_grad_(spec.has_gradient and layer > self.first_trained))
        return self.boundaries[layer - 1].unflatten(leaves)

    def gradients_after(self, layer: int) -> list[Tensor | None]:
        """Return gradients of the tensors of the output of `layer`; None for the loss."""
        if layer == self.num_layers - 1:
            return [None]
        leaves = self.boundaries[layer].leaves if layer >= self.first_trained else ()
        found = [stand_in(spec, self.device) if spec.has_gradient else None for spec in leaves]
        return found or [None] * len(self.boundaries[layer].leaves)

    def boundary_bytes(self, layer: int) -> int:
        """Return the bytes that cross behind `layer`; none before the first and behind the last."""
        return self.boundaries[layer].num_bytes if 0 <= layer < self.num_layers - 1 else 0

    def synchronize(self) -> None:
        """Wait until the device has completed its work."""
        wait_for_stream(self.device)


class ResidentLayers:
    """Some layers on the device, with accumulated gradients and an optimizer that has been used, as in a run.

    Attributes:
        param_bytes: bytes held for parameters and buffers.
        gradient_bytes: bytes held for gradients.
        optimizer_bytes: bytes held for the optimizer's state and the masters of parameters.
        commit_bytes: bytes in use only during a commit, for norm and update.
    """

    held: HeldLayers

    def __init__(self, model: ModelOnDevice, layers: LayerRange) -> None:
        self.model = model
        self.layers = layers
        held = held_in_phases(_in_phases(self._build(), "layers", "gradients", "optimizer", "commit"), model.device)
        self.param_bytes, self.gradient_bytes, self.optimizer_bytes = (
            held[name].after - held[name].before for name in ("layers", "gradients", "optimizer")
        )
        masters = self.held.master_bytes
        self.param_bytes, self.optimizer_bytes = self.param_bytes - masters, self.optimizer_bytes + masters
        self.commit_bytes = held["commit"].peak - held["commit"].before

    def _build(self) -> Iterator[None]:
        self.held = HeldLayers(self.model.job, self.layers, seed=self.model.seed, device=self.model.device)
        yield
        buffers = GradientBuffers(self.held, (Segment(self.layers, (0,)),))
        for _ in ("optimizer", "commit"):
            yield
            buffers.zero()
            buffers.square_sum(0)
            self.held.update(0)


class Hop:
    """Runs `layers`, which are resident, on one micro-batch, phase by phase.

    All of them may be recomputed selectively, and all vectors of the input may be equal.
    """

    def __init__(
        self, resident: ResidentLayers, layers: LayerRange, *, selective: bool = False, alike: bool = False
    ) -> None:
        self._selective = layers if selective else ()
        self._alike = alike
        self._held = resident.held
        self.model = resident.model
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == self.model.num_layers
        self.reads = self.is_first or self.is_last or any(map(self.model.job.keywords, layers))

    def fused_phases(self) -> Phases:
        """The phases of a forward and a whole backward; the operations are F and B, and samples are read before F."""
        return _in_phases(self._fused(), "enter", "read", "F", "gradient", "B", "leave")

    def split_phases(self) -> Phases:
        """The phases of a forward and a backward in halves; not of a route's first hop, which has no I."""
        return _in_phases(self._split(), "enter", "F", "gradient", "graph", "I", "W", "leave")

    # Each phase ends with the release of what a run does not hold any more.

    def _fused(self) -> Iterator[None]:
        boundary = self._boundary()
        yield
        if self.reads:
            self.model.read()
        yield
        output = self._forward(boundary)
        yield
        gradients = self.model.gradients_after(self.layers.stop - 1)
        yield
        whole_backward(self._roots(output, gradients))
        outgoing = [leaf.grad for leaf in leaves_of(boundary)]
        del boundary, output, gradients
        yield
        del outgoing

    def _split(self) -> Iterator[None]:
        boundary = self._boundary()
        yield
        output = self._forward(boundary)
        yield
        gradients = self.model.gradients_after(self.layers.stop - 1)
        yield
        # The graph of I stays until W, as that of a layer does which other layers of its hop follow.
        graph = None if self.is_last else mapped(lambda leaf: leaf.view_as(leaf), output)
        yield
        roots = self._roots(output, gradients)
        outgoing, weight_half = input_gradient(roots, leaves_of(boundary), self._held.parameters(self.layers))
        del boundary, output, gradients, roots
        yield
        weight_half()
        del weight_half, graph
        yield
        del outgoing

    def _boundary(self) -> Any:
        return self.model.boundary_before(self.layers.start, alike=self._alike)

    def _roots(self, output: Any, gradients: list[Tensor | None]) -> Roots:
        pairs = zip(leaves_of(output), gradients, strict=True)
        return [each for each in pairs if self.is_last or each[1] is not None]

    def _forward(self, boundary: Any) -> Any:
        """Run F; samples are read outside it, as in a step."""
        samples = self.model.samples
        output = self._held.forward(
            self.layers, boundary, step=0, micro_batch=0, fields=samples.fields, selective=self._selective
        )
        if self.is_last:
            output = loss_of(self.model.job, output, samples.targets)
        return output


def _in_phases(steps: Iterator[None], *names: str) -> Phases:
    """Name the phases that end with each `yield` of `steps`, and with its end. They must be called in this order."""
    return dict.fromkeys(names, partial(next, steps, None))


_WARM_UP = 3
_MAX_LAYERS_TOGETHER = 3


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
    backwards = [each.backward.median_s for each in times[model.first_trained :]]
    overhead_s = min(overhead_s, *(each.forward.median_s for each in times), *backwards)
    costs = tuple(
        _timed(sized, each, overhead_s, has_backward=number >= model.first_trained)
        for number, (sized, each) in enumerate(zip(sizes, times, strict=True))
    )
    return MeasuredLayers(costs, tuple(times), overhead_s)


def _timed(sized: LayerCost, measured: LayerTimes, overhead_s: float, *, has_backward: bool) -> LayerCost:
    """Return the layer with its seconds beside the fixed ones of an operation."""
    forward_s = max(0.0, measured.forward.median_s - overhead_s)
    if not has_backward:
        return replace(sized, forward_s=forward_s)
    return replace(
        sized,
        forward_s=forward_s,
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
    together = min(_MAX_LAYERS_TOGETHER, model.num_layers)
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

    The bytes are those of `chameleon_ft.cost.memory`: an input belongs to the activations of the layer that
    receives it, and an output does not. The working memory of a layer is the most that an operation holds beyond that;
    or a commit, when there are no activations. Between I and W everything that I has been through is kept, because the
    graph of the layers below and of the weights hangs on it. Only the part above the last weights is released, and only
    for the last layer and its loss is that counted.

    What a mixture of experts holds depends on how many tokens each expert gets. So the bytes are the most that it holds
    for random vectors, of which each expert gets some, and for equal ones, which all go to the same experts.
    """
    model, hop = resident.model, Hop(resident, resident.layers)
    layer = resident.layers.start
    own = _max_bytes(resident)
    again = _max_bytes(resident, selective=True) if is_recomputed(layer, model.num_layers) else None
    if again is not None and again.kept >= own.kept:  # it saves nothing
        again = None
    behind = model.boundary_bytes(layer)
    halves = own.working_halves if again is None else max(own.working_halves, again.working_halves)
    samples = KEPT_MICRO_BATCHES * sum(tensor.nbytes for tensor in leaves_of(model.samples[:2]))
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
        sample_bytes=samples if hop.reads else 0,
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


def _max_bytes(resident: ResidentLayers, *, selective: bool = False) -> _HopBytes:
    """Return the bytes of the one layer for any input between those whose vectors all differ and are all equal."""
    found = _bytes_of(Hop(resident, resident.layers, selective=selective))
    if resident.layers.start == 0:
        return found
    return found.at_most(_bytes_of(Hop(resident, resident.layers, selective=selective, alike=True)))


def _bytes_of(hop: Hop) -> _HopBytes:
    before, behind = (hop.model.boundary_bytes(layer) for layer in (hop.layers.start - 1, hop.layers.stop - 1))
    # Run all phases once, so that memory that libraries take for good is not counted.
    for phases in (hop.fused_phases(), {} if hop.is_first else hop.split_phases()):
        for run in phases.values():
            run()
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
