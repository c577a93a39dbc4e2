"""The optimizer of a rank: over the parameters of its layers, or over the slices of them that it owns.

A slice of a parameter is a view of it with as many dimensions, of which all but the last are 1. So an optimizer that
treats matrices and vectors differently does so with their slices, and updates the parameter in place.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job import Job
from chameleon_ft.plan.shards import UNITS

__all__ = ["LayerOptimizer", "ParameterVector", "Range"]

_ALIGNMENT: Final = 64  # elements: vectorized code computes the same values for a slice as for the whole parameter
_ENTRY: Final = re.compile(r"optimizer/(?P<name>[^\[]*?)(\[(?P<start>\d+):(?P<stop>\d+)\])?/(?P<key>[^/]*)")

Range = tuple[int, int]
"""The units from a first one to one that is not included; see `plan.shards`."""

_Updated = Mapping[str, nn.Parameter]
"""The parameters of a layer that are trained, by name."""


class ParameterVector:
    """The trained parameters of a layer, one after the other, without those that are shared with other layers."""

    def __init__(self, parameters: _Updated) -> None:
        self._parameters = parameters
        self._size = sum(p.numel() for p in parameters.values())

    def pieces(self, units: Range) -> Iterator[tuple[str, int, int]]:
        """Yield (name, first element, element after the last) of the parts of parameters in a range of units.

        Ranges that meet have neither gaps nor overlaps between them.
        """
        first, last = (self._cut(unit) for unit in units)
        begin = 0
        for name, parameter in self._parameters.items():
            start, stop = max(first, begin), min(last, begin + parameter.numel())
            if start < stop:
                yield name, start - begin, stop - begin
            begin += parameter.numel()

    def views(self, units: Range) -> list[Tensor]:
        """Return the elements of parameters in a range of units, in place."""
        return [self._parameters[name].detach().view(-1)[start:stop] for name, start, stop in self.pieces(units)]

    def _cut(self, unit: int) -> int:
        """Return the element at which a unit begins: aligned in its parameter."""
        element, begin = self._size * unit // UNITS, 0
        for parameter in self._parameters.values():
            if element < begin + parameter.numel():
                return element - (element - begin) % _ALIGNMENT
            begin += parameter.numel()
        return begin


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter, or a slice of it, that the optimizer updates: `own`, which is a view of `parameter`."""

    layer: int
    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    own: nn.Parameter

    @classmethod
    def of(cls, layer: int, name: str, parameter: nn.Parameter, start: int, stop: int) -> Self:
        if stop - start == parameter.numel():
            return cls(layer, name, parameter, start, stop, parameter)
        shape = (1,) * (parameter.ndim - 1) + (stop - start,)
        own = nn.Parameter(parameter.detach().view(-1)[start:stop].view(shape))
        return cls(layer, name, parameter, start, stop, own)

    @property
    def prefix(self) -> str:
        """The beginning of the keys of its state."""
        is_whole = self.own is self.parameter
        return f"optimizer/{self.name}/" if is_whole else f"optimizer/{self.name}[{self.start}:{self.stop}]/"


@dataclass(frozen=True, slots=True)
class _Kept:
    """State that is kept for elements of a parameter: tensors with a value for each element, and values for all."""

    start: int
    stop: int
    state: Mapping[str, Any]

    def cut(self, start: int, stop: int) -> dict[str, Any]:
        """Return what is kept for some of the elements; tensors are views.

        Raises ConfigError if that cannot be told.
        """
        if (start, stop) == (self.start, self.stop):
            return dict(self.state)
        found = {}
        for key, value in self.state.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                # Two parts must not count their updates in one tensor.
                found[key] = value.clone() if isinstance(value, Tensor) else value
            elif value.numel() == self.stop - self.start:
                found[key] = value.detach().view(-1)[start - self.start : stop - self.start]
            else:
                raise ConfigError(
                    f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {self.stop - self.start} elements, "
                    'which cannot be divided between workers; set parallel.optimizer_redundancy = "all"'
                )
        return found


class LayerOptimizer:
    """One torch optimizer over all that a rank updates, renewed when that changes.

    Attributes:
        owned: layer -> the ranges of units that the rank owns; None: it updates all parameters of its layers.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._torch: torch.optim.Optimizer | None = None
        self._parts: tuple[_Part, ...] = ()
        self.owned: Mapping[int, Sequence[Range]] | None = None

    def renew(self, layers: Mapping[int, _Updated], received: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Update what the rank owns of these layers from now on, with the state that is kept for it.

        Args:
            received: layer -> state of slices, by the keys that `state_of_slice` gives.
        """
        kept: dict[tuple[int, str], list[_Kept]] = defaultdict(list)
        for part in self._parts:
            if (state := self._state_of(part)) and part.layer in layers:
                kept[part.layer, part.name].append(_Kept(part.start, part.stop, state))
        for layer, own in (received or {}).items():
            for name, pieces in _kept_in(own, layers[layer]).items():
                kept[layer, name] += pieces
        parts = tuple(part for layer in sorted(layers) for part in self._parts_of(layer, layers[layer]))
        optimizer = self._job.optimizer([part.own for part in parts]) if parts else None
        if optimizer is not None:
            for part in parts:
                if (found := _assembled(kept[part.layer, part.name], part.start, part.stop)) is not None:
                    optimizer.state[part.own] = _shaped(found, part)
        self._torch, self._parts = optimizer, parts  # complete: another thread may be reading the state of a layer

    def vector_of(self, layer: int, updated: _Updated) -> ParameterVector:
        """Return the parameters of a layer that are updated by slices."""
        shared = self._shared(layer)
        return ParameterVector({name: parameter for name, parameter in updated.items() if name not in shared})

    def update(self, step: int) -> float:
        """Update the parameters from their gradients as they are; return the learning rate."""
        lr = self.learning_rate(step)
        if self._torch is not None:
            if self._job.learning_rate is not None:
                for group in self._torch.param_groups:
                    group["lr"] = lr
            for part in self._parts:
                if part.own is not part.parameter and part.parameter.grad is not None:
                    part.own.grad = part.parameter.grad.view(-1)[part.start : part.stop].view(part.own.shape)
            self._torch.step()
        return lr

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if self._job.learning_rate is not None:
            return self._job.learning_rate(step)
        return 0.0 if self._torch is None else float(self._torch.param_groups[0]["lr"])

    def state_of(self, layer: int) -> dict[str, Any]:
        """Return the state that moves with a layer: all of it, or if slices are owned, that of shared parameters."""
        shared = None if self.owned is None else self._shared(layer)
        return {
            f"{part.prefix}{key}": value
            for part in self._parts
            if part.layer == layer and (shared is None or part.name in shared)
            for key, value in self._state_of(part).items()
        }

    def state_of_slice(self, layer: int, updated: _Updated, units: Range) -> dict[str, Any]:
        """Return the state of a range of units that the rank owns; tensors may be views of the optimizer's own."""
        found: dict[str, Any] = {}
        own = [part for part in self._parts if part.layer == layer]
        for name, start, stop in self.vector_of(layer, updated).pieces(units):
            kept = [
                _Kept(each.start, each.stop, state)
                for each in own
                if each.name == name and (state := self._state_of(each))
            ]
            for key, value in (_assembled(kept, start, stop) or {}).items():
                found[f"optimizer/{name}[{start}:{stop}]/{key}"] = value
        return found

    def restore(self, layer: int, state: Mapping[str, Any]) -> None:
        """Take over the state of what the rank owns of a layer; it may be cut into other slices."""
        if self._torch is None:
            return
        own = [part for part in self._parts if part.layer == layer]
        kept = _kept_in(state, {part.name: part.parameter for part in own})
        for part in own:
            if (found := _assembled(kept.get(part.name, ()), part.start, part.stop)) is not None:
                self._torch.state[part.own] = {
                    key: value.to(self._device_of(key, part.own)) if isinstance(value, Tensor) else value
                    for key, value in _shaped(found, part).items()
                }

    def _state_of(self, part: _Part) -> Mapping[str, Any]:
        return {} if self._torch is None else self._torch.state.get(part.own, {})

    def _shared(self, layer: int) -> frozenset[str]:
        """Return the parameters of a layer that are tied: each holder of one updates all of it."""
        return frozenset(name for copies in self._job.tied for number, name in copies if number == layer)

    def _parts_of(self, layer: int, updated: _Updated) -> Iterator[_Part]:
        names: Iterable[str] = updated
        if self.owned is not None:
            names = self._shared(layer).intersection(updated)
            vector = self.vector_of(layer, updated)
            for units in self.owned.get(layer, ()):
                for name, start, stop in vector.pieces(units):
                    yield _Part.of(layer, name, updated[name], start, stop)
        for name in sorted(names, key=list(updated).index):
            yield _Part.of(layer, name, updated[name], 0, updated[name].numel())

    def _device_of(self, key: str, parameter: nn.Parameter) -> torch.device:
        """Return where torch keeps a value: the counter "step" on the CPU, unless the update is fused or capturable."""
        assert self._torch is not None
        group = next(g for g in self._torch.param_groups if any(p is parameter for p in g["params"]))
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        return torch.device("cpu") if on_host else parameter.device


def _kept_in(state: Mapping[str, Any], parameters: _Updated) -> dict[str, list[_Kept]]:
    """Return what a layer's state has for each of these parameters, in whichever slices."""
    found: dict[tuple[str, int, int], dict[str, Any]] = defaultdict(dict)
    for entry, value in state.items():
        if (match := _ENTRY.fullmatch(entry)) and (name := match["name"]) in parameters:
            ends = (0, parameters[name].numel()) if match["start"] is None else (match["start"], match["stop"])
            found[name, int(ends[0]), int(ends[1])][match["key"]] = value
    by_name: dict[str, list[_Kept]] = defaultdict(list)
    for (name, start, stop), own in found.items():
        by_name[name].append(_Kept(start, stop, own))
    return by_name


def _assembled(kept: Iterable[_Kept], start: int, stop: int) -> dict[str, Any] | None:
    """Return the state of some elements of a parameter from that of pieces; None if it is not there.

    Of exactly one piece the tensors themselves are kept. Values for all elements are those of the first piece.
    """
    parts: list[dict[str, Any]] = []
    end, is_whole = start, False
    for piece in sorted(kept, key=lambda piece: (piece.start, -piece.stop)):
        if piece.start <= end < piece.stop and end < stop:
            parts.append(piece.cut(end, min(stop, piece.stop)))
            end = min(stop, piece.stop)
            is_whole = (piece.start, piece.stop) == (start, stop)
    if end < stop:
        return None
    if is_whole:
        return parts[0]
    return {
        key: torch.cat([part[key].reshape(-1) for part in parts])
        if isinstance(value, Tensor) and value.ndim > 0
        else value
        for key, value in parts[0].items()
    }


def _shaped(state: Mapping[str, Any], part: _Part) -> dict[str, Any]:
    """Give values of elements the shape of a part, which owns their memory."""
    return {
        key: value.view(part.own.shape)
        if isinstance(value, Tensor) and value.ndim > 0 and value.numel() == part.own.numel()
        else value
        for key, value in state.items()
    }
