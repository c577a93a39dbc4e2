"""Gradients in flat buffers, each with flags: one for each parameter that some micro-batch of the step has given one.

The flags follow the gradients in a buffer, so they are summed over workers, kept and sent again with them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from chameleon_ft.plan.rest import GradientKey
from chameleon_ft.runtime.execution.layers import HeldLayers
from chameleon_ft.sync import Segment

__all__ = ["GradientBuffers", "note_gradient", "without_gradients"]

# Elements of one norm. In float64 it is taken of a copy, which must stay small on a CPU; elsewhere a launch costs more.
_NORM_ELEMENTS_ON_CPU: Final = 1 << 14
_NORM_ELEMENTS: Final = 1 << 22

_Parameters = list[list[nn.Parameter]]
"""The copies of each parameter of a key."""


@dataclass(slots=True)
class _Flag:
    """Where it is noted that a parameter has got a gradient in this step."""

    buffer: weakref.ref[Tensor]
    place: int
    is_set: bool = False

    def set(self) -> None:
        """Set the flag, unless that has been done."""
        if not self.is_set and (buffer := self.buffer()) is not None:
            buffer[self.place] = 1
            self.is_set = True


_FLAGS: Final[WeakIdKeyDictionary] = WeakIdKeyDictionary()  # of parameters


def note_gradient(parameter: nn.Parameter) -> None:
    """Note that a backward has added to the gradient of a parameter. Autograd calls it if it adds by itself."""
    if (flag := _FLAGS.get(parameter)) is not None:
        flag.set()


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take the gradients of parameters away inside the block."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


class GradientBuffers:
    """The gradients of the held layers as views into flat buffers: one for each `GradientKey` and element type.

    Autograd accumulates into the views in place. The copies of a tied parameter share one view, which sums their
    gradients. Flags, one for each view, are at the end of a buffer. Layers that are arriving have gradients too, once
    they are expected: their sums are received.

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
        with without_gradients([copy for key in keys for each in self._parameters[key] for copy in each]):
            yield

    @contextmanager
    def without_idle(self) -> Iterator[None]:
        """Hide the gradients of parameters that no micro-batch has given any: an update leaves them as they are.

        The gradients are those of a whole step, as the buffers have them when the block begins.
        """
        idle = [copy for key, buffers in self._buffers.items() for copy in _idle_in(self._parameters[key], buffers)]
        with without_gradients(idle):
            yield

    def zero(self) -> None:
        """Start a step."""
        self.totals.clear()
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.zero_()
        for parameters in self._parameters.values():
            for copies in parameters:
                for copy in copies:
                    _FLAGS[copy].is_set = False

    def scale(self, factor: float) -> None:
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.mul_(factor)

    def square_sum(self, worker: int) -> float:
        """Return the squared L2 norm of the segments that `worker` is the first holder of.

        Every layer has one first holder, so the sum of this over all workers counts each layer once.
        """
        keys = [key for segment in self.segments if segment.holders[0] == worker for key in segment.keys]
        own = [gradients for key in keys for gradients, _ in _parts_of(self._parameters[key], self._buffers[key])]
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
        torch.zeros(sum(copies[0].numel() + 1 for copies in alike), dtype=dtype, device=alike[0][0].device)
        for dtype, alike in _by_type(parameters)
    )
    _give_views(parameters, buffers)
    return buffers


def _give_views(parameters: _Parameters, buffers: Sequence[Tensor], *, but: Collection[int] = ()) -> None:
    """Give copies of parameters, but for some ids, their views of the flat buffers as gradients."""
    for buffer, (_, alike) in zip(buffers, _by_type(parameters), strict=True):
        first_flag = buffer.numel() - len(alike)
        views = buffer[:first_flag].split([copies[0].numel() for copies in alike])
        for place, (copies, view) in enumerate(zip(alike, views, strict=True), first_flag):
            for copy in copies:
                if id(copy) in but:
                    continue
                copy.grad = view.view_as(copy)
                if copy not in _FLAGS:
                    copy.register_post_accumulate_grad_hook(note_gradient)
                _FLAGS[copy] = _Flag(weakref.ref(buffer), place)


def _parts_of(parameters: _Parameters, buffers: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the gradients and the flags of each flat buffer."""
    for buffer, (_, alike) in zip(buffers, _by_type(parameters), strict=True):
        yield buffer[: -len(alike)], buffer[-len(alike) :]


def _idle_in(parameters: _Parameters, buffers: Sequence[Tensor]) -> Iterator[nn.Parameter]:
    """Yield all copies of the parameters without a gradient.

    A gradient that is not zero has come from somewhere: a custom backward may add to it by itself.
    """
    for (_, flags), (_, alike) in zip(_parts_of(parameters, buffers), _by_type(parameters), strict=True):
        for copies, flag in zip(alike, flags.tolist(), strict=True):
            if not flag and copies[0].grad is not None and not copies[0].grad.any():
                yield from copies


def _by_type(parameters: _Parameters) -> list[tuple[torch.dtype, _Parameters]]:
    ordered = sorted(parameters, key=lambda copies: str(_gradient_type(copies)))
    return [(dtype, list(group)) for dtype, group in groupby(ordered, key=_gradient_type)]


def _gradient_type(copies: list[nn.Parameter]) -> torch.dtype:
    """Return the element type in which gradients are summed; it may have more bits than that of the parameter."""
    return copies[0].grad_dtype or copies[0].dtype
