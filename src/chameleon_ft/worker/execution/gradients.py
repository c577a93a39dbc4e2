"""Gradients in flat buffers, each with flags: one for each parameter that some micro-batch of the step has given one.

The flags follow the gradients in a buffer, so they are summed over workers, kept and sent again with them. So are other
sums over the step, in flat buffers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Final

import torch
from torch import Tensor, nn

from chameleon_ft.plan.rest import GradientKey
from chameleon_ft.sync import Segment
from chameleon_ft.worker.device import copied_to_device
from chameleon_ft.worker.execution.layers import HeldLayers, StepSum

# Elements of one norm. In float64 it is taken of a copy, which must stay small on a CPU; elsewhere a launch costs more.
_NORM_ELEMENTS_ON_CPU: Final = 1 << 14
_NORM_ELEMENTS: Final = 1 << 22

_Summed = nn.Parameter | StepSum
_Parameters = Sequence[Sequence[_Summed]]
"""The copies of each of some parameters; or each of some sums over the step, which take the place of gradients."""


@contextmanager
def without_gradients(parameters: Sequence[_Summed]) -> Iterator[None]:
    """Take the gradients of parameters away inside the block."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


class _FlatGradients:
    """The gradients of parameters of one element type in a flat buffer, and behind them a flag for each.

    Torch counts how often a tensor is changed in place. Each gradient has a count of its own, which tells whether a
    backward has added to it. A hook would be a call of Python for each parameter in every backward.
    """

    def __init__(self, parameters: _Parameters, dtype: torch.dtype) -> None:
        sizes = [copies[0].numel() for copies in parameters]
        self.are_gradients = not isinstance(parameters[0][0], StepSum)
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=parameters[0][0].device)
        self.elements, self.flags = self.buffer.split([sum(sizes), len(sizes)])
        # Views share the count of their base, but not through `data`.
        self._gradients = [view.data for view in self.elements.split(sizes)]
        self._changes = [gradient._version for gradient in self._gradients]

    def give(self, parameters: _Parameters, *, but: Collection[int] = ()) -> None:
        """Give all copies of the parameters, but for some ids, their views as gradients."""
        for copies, gradient in zip(parameters, self._gradients, strict=True):
            for copy in copies:
                if id(copy) not in but:
                    copy.grad = gradient.view(copy.shape)

    def zero(self) -> None:
        """Start a step."""
        self.buffer.zero_()
        self._changes = [gradient._version for gradient in self._gradients]

    def set_flags(self) -> None:
        """Set the flags of the gradients that have changed since the last call, or since the step has begun."""
        before, self._changes = self._changes, [gradient._version for gradient in self._gradients]
        if self._changes != before:
            changed = [now != earlier for now, earlier in zip(self._changes, before, strict=True)]
            self.flags.masked_fill_(copied_to_device(torch.tensor(changed), self.flags.device), 1)


def _idle_in(parameters: _Parameters, flags: Tensor) -> Iterator[_Summed]:
    """Yield all copies of the parameters without a gradient, by their flags in host memory.

    One that is not zero has come from somewhere: a custom kernel may add to it behind torch's back.
    """
    for copies, flag in zip(parameters, flags.tolist(), strict=True):
        if not flag and copies[0].grad is not None and not copies[0].grad.any():
            yield from copies


class GradientBuffers:
    """The gradients of the held layers as views into flat buffers: one for each `GradientKey` and element type.

    Autograd accumulates into the views in place. The copies of a tied parameter share one view, which sums their
    gradients. Layers that are arriving have gradients too, once they are expected: their sums are received.

    Attributes:
        segments: The given segments in which the held layers take part.
        totals: Keys of gradients that are the sum over all holders, instead of the worker's own contribution.
    """

    def __init__(self, held: HeldLayers, segments: Sequence[Segment]) -> None:
        self.totals: set[GradientKey] = set()
        # The copies of each parameter, by element type; all but tied ones have a single copy.
        self._parameters: dict[GradientKey, list[_Parameters]] = {}
        self._flat: dict[GradientKey, tuple[_FlatGradients, ...]] = {}
        self._tied: tuple[GradientKey, ...] = ()
        self.regroup(held, segments)

    def regroup(self, held: HeldLayers, segments: Sequence[Segment]) -> None:
        """Take the segments of another generation; the gradients of modules that are still there stay as they are."""
        before, flat = self._parameters, self._flat
        self.segments = tuple(segment for segment in segments if _has_part(held.layers, segment))
        self._tied = tuple(segment.tied for segment in segments if segment.tied)
        self._parameters = self._parameters_of(held, [key for segment in self.segments for key in segment.keys])
        self._flat = {
            key: flat[key] if key in before and _are_left(parameters, before[key]) else _flat_gradients(parameters)
            for key, parameters in self._parameters.items()
        }
        self.totals &= self._flat.keys()

    def expect(self, held: HeldLayers) -> None:
        """Allocate the gradients of the layers that are arriving."""
        tied = [key for key in self._tied if not held.arriving.isdisjoint(key)]
        parameters = self._parameters_of(held, [*((layer,) for layer in sorted(held.arriving)), *tied])
        found = {}
        for key, own in parameters.items():
            if key in self._flat:
                known = {id(copy) for copy in _copies(self._parameters[key])}
                for flat, alike in zip(self._flat[key], own, strict=True):
                    flat.give(alike, but=known)
            else:
                found[key] = _flat_gradients(own)
        self._parameters = {**self._parameters, **parameters}
        self._flat = {**self._flat, **found}

    def _parameters_of(self, held: HeldLayers, keys: Iterable[GradientKey]) -> dict[GradientKey, list[_Parameters]]:
        tied = {key: held.tied(key) for key in self._tied}
        elsewhere = {id(copy) for groups in tied.values() for copies in groups for copy in copies}
        return {
            key: _by_type(tied[key])
            if key in tied
            else [
                *_by_type([[p] for p in held.parameters(key) if id(p) not in elsewhere]),
                *_by_type([[each] for each in held.sums(key)]),
            ]
            for key in keys
        }

    def of(self, segment: Segment) -> tuple[Tensor, ...]:
        """The flat buffers of a segment, by its keys."""
        return tuple(buffer for key in segment.keys for buffer in self.of_key(key))

    def of_key(self, key: GradientKey) -> tuple[Tensor, ...]:
        """The flat buffers of a key, one for each element type of its parameters."""
        return tuple(flat.buffer for flat in self._flat[key])

    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        """The flat buffers of all keys that a layer is in, in the same order on all its holders."""
        return tuple(buffer for key in sorted(self._flat) if layer in key for buffer in self.of_key(key))

    def set_flags(self, segments: Iterable[Segment] | None = None) -> None:
        """Set the flags of parameters that a backward has given a gradient, in some segments or in all.

        Call it before anything else uses the buffers, and when the last backward has ended.
        """
        keys = self._flat if segments is None else [key for segment in segments for key in segment.keys]
        for key in keys:
            for flat in self._flat[key]:
                flat.set_flags()

    @contextmanager
    def protecting(self, keys: Iterable[GradientKey]) -> Iterator[None]:
        """Leave the gradients of `keys` as they are inside the block: what a backward adds to them there is dropped."""
        with without_gradients([copy for key in keys for copy in _copies(self._parameters[key])]):
            yield

    @contextmanager
    def without_idle(self) -> Iterator[None]:
        """Hide the gradients of parameters that no micro-batch has given any: an update leaves them as they are.

        The gradients are those of a whole step, as the buffers have them when the block begins.
        """
        self.set_flags()
        flags = [flat.flags for own in self._flat.values() for flat in own]
        # The host waits once for all.
        on_host = torch.cat(flags).cpu().split([len(each) for each in flags]) if flags else ()
        parameters = chain.from_iterable(self._parameters[key] for key in self._flat)
        idle = [copy for alike, own in zip(parameters, on_host, strict=True) for copy in _idle_in(alike, own)]
        with without_gradients(idle):
            yield

    def zero(self) -> None:
        """Start a step."""
        self.totals.clear()
        for flat in chain.from_iterable(self._flat.values()):
            flat.zero()

    def scale(self, factor: float) -> None:
        for elements in self._gradients(self._flat):
            elements.mul_(factor)

    def first_held(self, worker: int) -> list[GradientKey]:
        """Return the keys of the segments that `worker` is the first holder of."""
        return [key for segment in self.segments if segment.holders[0] == worker for key in segment.keys]

    def clamp(self, largest: float) -> None:
        for elements in self._gradients(self._flat):
            elements.clamp_(-largest, largest)

    def _gradients(self, keys: Iterable[GradientKey]) -> list[Tensor]:
        """Return the gradients of some keys, without other sums."""
        return [flat.elements for key in keys for flat in self._flat[key] if flat.are_gradients]

    def square_sum(self, worker: int) -> float:
        """Return the squared L2 norm of the segments that `worker` is the first holder of.

        Every layer has one first holder, so the sum of this over all workers counts each layer once.
        """
        own = self._gradients(self.first_held(worker))
        parts = [part for b in own for part in b.split(_NORM_ELEMENTS_ON_CPU if b.is_cpu else _NORM_ELEMENTS)]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        # The host waits once for all.
        return math.fsum(norm**2 for norm in torch.stack(norms).tolist()) if norms else 0.0


def _has_part(layers: frozenset[int], segment: Segment) -> bool:
    """Return whether a worker with these layers is a holder of the segment."""
    return not layers.isdisjoint(segment.tied) if segment.tied else layers.issuperset(segment.layers)


def _copies(parameters: list[_Parameters]) -> Iterator[_Summed]:
    return (copy for alike in parameters for copies in alike for copy in copies)


def _are_left(parameters: list[_Parameters], before: list[_Parameters]) -> bool:
    """Return whether these are the objects of `before`, in its groups, but for copies in layers that were dropped."""
    held = set(map(id, _copies(parameters)))
    left = [[[id(copy) for copy in copies if id(copy) in held] for copies in alike] for alike in before]
    return left == [[list(map(id, copies)) for copies in alike] for alike in parameters]


def _flat_gradients(parameters: list[_Parameters]) -> tuple[_FlatGradients, ...]:
    """Make flat buffers, one for each element type, and give all copies of each parameter its view as gradient."""
    made = tuple(_FlatGradients(alike, _gradient_type(alike[0])) for alike in parameters)
    for flat, alike in zip(made, parameters, strict=True):
        flat.give(alike)
    return made


def _by_type(parameters: _Parameters) -> list[_Parameters]:
    ordered = sorted(parameters, key=lambda copies: str(_gradient_type(copies)))
    return [list(group) for _, group in groupby(ordered, key=_gradient_type)]


def _gradient_type(copies: Sequence[_Summed]) -> torch.dtype:
    """Return the element type in which gradients are summed; it may have more bits than that of the parameter."""
    first = copies[0]
    return first.dtype if isinstance(first, StepSum) else first.grad_dtype or first.dtype
