"""The layers a rank holds: modules, optimizer, and gradients in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn

from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.models.build import generator_lock, seed_forward
from chameleon_ft.models.recomputation import selective_recomputation
from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.rest import GradientKey
from chameleon_ft.runtime.execution.held_layer import HeldLayer, LayerState
from chameleon_ft.runtime.execution.optimizer import LayerOptimizer, Range
from chameleon_ft.sync import Segment

__all__ = ["GradientBuffers", "HeldLayers"]

# Elements of one norm. In float64 it is taken of a copy, which must stay small on a CPU; elsewhere a launch costs more.
_NORM_ELEMENTS_ON_CPU: Final = 1 << 14
_NORM_ELEMENTS: Final = 1 << 22

_Parameters = list[list[nn.Parameter]]
"""The copies of each parameter of a key."""


class HeldLayers:
    """The layers a rank holds, on its device, and one optimizer over all their updated tensors.

    Args:
        boundaries: expected output of each layer of the model; empty: any.
        owned: layer -> the ranges of units that the rank updates; None: all of its layers.

    Attributes:
        arriving: layers that are blank, because their state has not arrived yet. They are not held: no
            update changes them, but they have gradients.
    """

    def __init__(
        self,
        job: Job,
        layers: Iterable[int],
        *,
        seed: int,
        device: torch.device,
        boundaries: Sequence[BoundarySpec] = (),
        owned: Mapping[int, Sequence[Range]] | None = None,
    ) -> None:
        self._job = job
        self._checked = boundaries[:-1]  # the last output goes into the loss, and is not sent
        self._seed = seed
        self._device = device
        self._layers: dict[int, HeldLayer] = {}
        self.arriving: frozenset[int] = frozenset()
        self._optimizer = LayerOptimizer(job)
        self._optimizer.owned = owned
        masters = {}
        for layer in sorted(layers):
            self._layers[layer] = HeldLayer.initial(job, layer, seed=seed, device=device)
            masters[layer] = self._divide(layer)
        self._renew_optimizer(masters)

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._layers) - self.arriving

    def expect(self, layer: int, blank: HeldLayer) -> None:
        """Note that the state of a layer will arrive. Called from any thread."""
        self.arriving |= {layer}  # first: it must not seem to be held
        self._layers = dict(sorted({**self._layers, layer: blank}.items()))

    def take_in(self, layer: int, state: Mapping[str, Any], blank: HeldLayer | None = None) -> None:
        """Hold one more layer, with the state that `state_of` gave elsewhere; tensors of `state` may be kept.

        Args:
            blank: the layer, unless it is expected; tensors of `state` may be its own, then nothing is copied.
        """
        if layer not in self.arriving:
            self.expect(layer, blank or self._blank(layer))
        self.arriving -= {layer}
        self._renew_optimizer()
        self.restore(layer, state)

    def targets_of(self, layer: int) -> dict[str, Tensor]:
        """The tensors that the state of a layer can be received into, by their keys."""
        return self._layers[layer].targets

    def keep_only(self, layers: Collection[int]) -> None:
        """Release all other layers, and their memory; also those that are arriving."""
        if not self.layers.union(self.arriving).issubset(layers):
            self._layers = {layer: own for layer, own in self._layers.items() if layer in layers}
            self.arriving &= self._layers.keys()
            self._renew_optimizer()

    def drop_gradients(self) -> None:
        """Release the memory of the gradients, unless something else refers to it."""
        for own in self._layers.values():
            own.module.zero_grad(set_to_none=True)

    def forward(
        self, layers: LayerRange, boundary: Tensor, *, step: int, micro_batch: int, selective: Collection[int] = ()
    ) -> Tensor:
        """Run `layers` on one micro-batch, each with its own random key; save less of `selective` layers.

        Raises:
            ConfigError: an output differs from the expected one in shape or type.
        """
        for layer in layers:
            with generator_lock, selective_recomputation() if layer in selective else nullcontext():
                seed_forward(self._seed, step=step, micro_batch=micro_batch, layer=layer, device=self._device)
                boundary = self._layers[layer].module(boundary)
            if layer < len(self._checked):
                self._checked[layer].require(boundary, layer=layer)
        return boundary

    def parameters(self, layers: Iterable[int]) -> list[nn.Parameter]:
        """The trained parameters of `layers`, in order."""
        return [parameter for layer in layers for parameter in self._layers[layer].parameters]

    @property
    def master_bytes(self) -> int:
        """Bytes of the masters of parameters."""
        return sum(master.nbytes for own in self._layers.values() for master in own.masters.values())

    def tied(self, layers: Collection[int]) -> list[list[nn.Parameter]]:
        """The trained parameters that exactly these layers share: of each, the copies in layers that are held."""
        groups = (
            [self._layers[layer].module.get_parameter(name) for layer, name in copies if layer in self._layers]
            for copies in self._job.tied_with(layers)
        )
        return [copies for copies in groups if copies and copies[0].requires_grad]

    def update(self, step: int) -> float:
        """Run the optimizer on the gradients as they are and return the learning rate of that step."""
        held = [own for layer, own in self._layers.items() if layer not in self.arriving]
        for own in held:
            own.pass_gradients_on()
        lr = self._optimizer.update(step)
        for own in held:
            own.drop_passed_gradients()
            own.derive()
        return lr

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self._optimizer.learning_rate(step)

    def own(
        self, owned: Mapping[int, Sequence[Range]], received: Mapping[int, Mapping[str, Any]] | None = None
    ) -> None:
        """Update only these ranges of units from now on, layer -> ranges.

        Args:
            received: layer -> the state of slices that other owners gave, by `state_of_slice`.
        """
        if received or owned != self._optimizer.owned:
            self._optimizer.owned = owned
            given = received or {}
            self._renew_optimizer({layer: {**self._divide(layer), **given.get(layer, {})} for layer in self.layers})

    def own_more(self, received: Mapping[int, Mapping[Range, LayerState]]) -> None:
        """Update more ranges of units from now on: layer -> range -> its state, by `state_of_slice`."""
        owned = {layer: tuple(ranges) for layer, ranges in (self._optimizer.owned or {}).items()}
        for layer, own in received.items():
            owned[layer] = (*owned.get(layer, ()), *own)
        states = {layer: {k: v for state in own.values() for k, v in state.items()} for layer, own in received.items()}
        self.own(owned, states)

    def views_of_slice(self, layer: int, units: Range) -> list[Tensor]:
        """The elements of parameters in a range of units of a layer, in place, whoever owns them."""
        own = self._layers[layer]
        parameters = dict(zip(own.updated, own.parameters, strict=True))
        return self._optimizer.vector_of(layer, parameters).views(units)

    def state_of_slice(self, layer: int, units: Range) -> LayerState:
        """The optimizer's state of a range of units of a layer, which this rank owns."""
        return self._optimizer.state_of_slice(layer, self._layers[layer].updated, units)

    def owned_state_of(self, layer: int) -> LayerState:
        """All slices of optimizer state of a layer that this rank owns."""
        owned = self._optimizer.owned or {}
        return {k: v for units in owned.get(layer, ()) for k, v in self.state_of_slice(layer, units).items()}

    def state_of(self, layer: int) -> LayerState:
        """The tensors that move with a layer: its own, so training changes them.

        Slices of optimizer state have owners of their own, and are not part of it.
        """
        return {**self._layers[layer].state, **self._optimizer.state_of(layer)}

    def constant_state_of(self, layer: int) -> LayerState:
        """As `state_of`, but constant until the next update: with copies of the buffers."""
        buffers = {f"module/{name}" for name, _ in self._layers[layer].module.named_buffers()}
        state = self.state_of(layer)
        return {key: value.clone() if key in buffers else value for key, value in state.items()}

    def replicated_state_of(self, layer: int) -> LayerState:
        """As `state_of`, without the buffers, which each holder changes in its own way. So it is equal on all holders.

        The copies of tied parameters are part of it. Parameters whose masters are divided are not.
        """
        own = self._layers[layer]
        parameters = {f"module/{name}" for name, _ in own.module.named_parameters() if name not in own.divided}
        state = sorted(self.state_of(layer).items())  # which may have come from another holder in another order
        return {key: value for key, value in state if key in parameters or key.startswith("optimizer/")}

    def compared_state_of(self, layer: int) -> LayerState:
        """As `replicated_state_of`, with the parameters that are rounded from their masters."""
        derived = {f"derived/{name}": value.detach() for name, value in sorted(self._layers[layer].derived.items())}
        return {**self.replicated_state_of(layer), **derived}

    def snapshot(self, layer: int) -> LayerState:
        """Copy the state of a layer to host memory, even if it is there: training goes on changing it."""
        return _copied(self.state_of(layer))

    def snapshot_of_slice(self, layer: int, start: int, stop: int) -> LayerState:
        """Copy the optimizer's state of some units of a layer to host memory."""
        return _copied(self.state_of_slice(layer, (start, stop)))

    def restore(self, layer: int, state: Mapping[str, Any]) -> None:
        """Take over the state that `state_of` or `snapshot` gave for this layer, maybe with slices."""
        self._layers[layer].restore(state)
        self._optimizer.restore(layer, state)

    def restore_slices(self, layer: int, state: Mapping[str, Any]) -> None:
        """Take over what this rank owns of the slices of a layer, of which `state_of_slice` gave the state."""
        self._optimizer.restore(layer, state)

    def _blank(self, layer: int) -> HeldLayer:
        is_divided = self._optimizer.owned is not None
        return HeldLayer.blank(self._job, layer, seed=self._seed, device=self._device, is_divided=is_divided)

    def _divide(self, layer: int) -> LayerState:
        """Release the masters of a layer if they are divided; return the slices of them that this rank owns."""
        own = self._layers[layer]
        if self._optimizer.owned is None or not own.masters:
            return {}
        divided = self._layers[layer] = own.divide(self._job.tied_in(layer))
        return self._optimizer.slices_of_masters(layer, divided.updated, own.masters)

    def _renew_optimizer(self, received: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Update what is held now, with the state that was kept for it or is received."""
        self._optimizer.renew({layer: self._layers[layer].updated for layer in sorted(self.layers)}, received)


class GradientBuffers:
    """The gradients of the held layers as views into flat buffers: one for each `GradientKey` and element type.

    Autograd accumulates into the views in place. The copies of a tied parameter share one view, which sums their
    gradients. Layers that are arriving have gradients too, once they are expected: their sums are received.

    Attributes:
        segments: those of the given segments in which the held layers take part.
        totals: keys of gradients that are the sum over all holders, instead of the worker's own contribution.
    """

    def __init__(self, held: HeldLayers, segments: Sequence[Segment]) -> None:
        self.totals: set[GradientKey] = set()
        # The copies of each parameter; all but tied ones have a single copy.
        self._parameters: dict[GradientKey, _Parameters] = {}
        self._buffers: dict[GradientKey, tuple[Tensor, ...]] = {}
        self._tied: tuple[GradientKey, ...] = ()  # of all segments
        self.regroup(held, segments)

    def regroup(self, held: HeldLayers, segments: Sequence[Segment]) -> None:
        """Take the segments of another generation; the gradients of modules that are still there stay as they are."""
        before, buffers = self._parameters, self._buffers
        self.segments = tuple(segment for segment in segments if _has_part(held.layers, segment))
        self._tied = tuple(segment.tied for segment in segments if segment.tied)
        self._parameters = self._parameters_of(held, [key for segment in self.segments for key in segment.keys])
        self._buffers = {
            key: buffers[key] if key in before and _are_left(parameters, before[key]) else _flat_gradients(parameters)
            for key, parameters in self._parameters.items()
        }
        self.totals &= self._buffers.keys()

    def expect(self, held: HeldLayers) -> None:
        """Allocate the gradients of the layers that are arriving. Called from any thread, while others are in use."""
        tied = [key for key in self._tied if not held.arriving.isdisjoint(key)]
        parameters = self._parameters_of(held, [*((layer,) for layer in sorted(held.arriving)), *tied])
        found = {}
        for key, own in parameters.items():
            if key in self._buffers:
                _give_views(own, self._buffers[key], but={id(copy) for each in self._parameters[key] for copy in each})
            else:
                found[key] = _flat_gradients(own)
        # Another thread may be going through them.
        self._parameters = {**self._parameters, **parameters}
        self._buffers = {**self._buffers, **found}

    def _parameters_of(self, held: HeldLayers, keys: Iterable[GradientKey]) -> dict[GradientKey, _Parameters]:
        tied = {key: held.tied(key) for key in self._tied}
        elsewhere = {id(copy) for groups in tied.values() for copies in groups for copy in copies}
        return {
            key: tied[key] if key in tied else [[p] for p in held.parameters(key) if id(p) not in elsewhere]
            for key in keys
        }

    def of(self, segment: Segment) -> tuple[Tensor, ...]:
        """The flat buffers of a segment, by its keys."""
        return tuple(buffer for key in segment.keys for buffer in self._buffers[key])

    def of_key(self, key: GradientKey) -> tuple[Tensor, ...]:
        """The flat buffers of a key, one for each element type of its parameters."""
        return self._buffers[key]

    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        """The flat buffers of all keys that a layer is in, in the same order on all its holders."""
        return tuple(buffer for key in sorted(self._buffers) if layer in key for buffer in self._buffers[key])

    @contextmanager
    def protecting(self, keys: Iterable[GradientKey]) -> Iterator[None]:
        """Leave the gradients of `keys` as they are inside the block: what a backward adds to them there is dropped."""
        copies = [copy for key in keys for parameter in self._parameters[key] for copy in parameter]
        gradients = [copy.grad for copy in copies]
        for copy in copies:
            copy.grad = None
        try:
            yield
        finally:
            for copy, gradient in zip(copies, gradients, strict=True):
                copy.grad = gradient

    def zero(self) -> None:
        """Start a step."""
        self.totals.clear()
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.zero_()

    def scale(self, factor: float) -> None:
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.mul_(factor)

    def square_sum(self, worker: int) -> float:
        """Return the squared L2 norm of the segments that `worker` is the first holder of.

        Every layer has one first holder, so the sum of this over all workers counts each layer once.
        """
        own = [buffer for segment in self.segments if segment.holders[0] == worker for buffer in self.of(segment)]
        parts = [part for b in own for part in b.split(_NORM_ELEMENTS_ON_CPU if b.is_cpu else _NORM_ELEMENTS)]
        return math.fsum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)


def _has_part(layers: frozenset[int], segment: Segment) -> bool:
    """Return whether a worker with these layers is a holder of the segment."""
    return not layers.isdisjoint(segment.tied) if segment.tied else layers.issuperset(segment.layers)


def _are_left(parameters: _Parameters, before: _Parameters) -> bool:
    """Return whether these are the objects of `before`, in its groups, but for copies in layers that were dropped."""
    held = {id(copy) for copies in parameters for copy in copies}
    left = [[id(copy) for copy in copies if id(copy) in held] for copies in before]
    return left == [list(map(id, copies)) for copies in parameters]


def _flat_gradients(parameters: _Parameters) -> tuple[Tensor, ...]:
    """Make flat buffers, one for each element type, and give all copies of each parameter its view as gradient."""
    buffers = tuple(
        torch.zeros(sum(copies[0].numel() for copies in alike), dtype=dtype, device=alike[0][0].device)
        for dtype, alike in _by_type(parameters)
    )
    _give_views(parameters, buffers)
    return buffers


def _give_views(parameters: _Parameters, buffers: Sequence[Tensor], *, but: Collection[int] = ()) -> None:
    """Give copies of parameters, but for some ids, their views of the flat buffers as gradients."""
    for buffer, (_, alike) in zip(buffers, _by_type(parameters), strict=True):
        views = buffer.split([copies[0].numel() for copies in alike])
        for copies, view in zip(alike, views, strict=True):
            for copy in copies:
                if id(copy) not in but:
                    copy.grad = view.view_as(copy)


def _by_type(parameters: _Parameters) -> list[tuple[torch.dtype, _Parameters]]:
    ordered = sorted(parameters, key=lambda copies: str(_gradient_type(copies)))
    return [(dtype, list(group)) for dtype, group in groupby(ordered, key=_gradient_type)]


def _gradient_type(copies: list[nn.Parameter]) -> torch.dtype:
    """Return the element type in which gradients are summed; it may have more bits than that of the parameter."""
    return copies[0].grad_dtype or copies[0].dtype


def _copied(state: LayerState) -> LayerState:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in state.items()
    }
