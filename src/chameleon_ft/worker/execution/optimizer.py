"""The optimizer of a rank: over the parameters of its layers, or over the slices of them that it owns.

A slice of a parameter has as many dimensions, of which all but the last are 1. So an optimizer that treats matrices and
vectors differently does so with their slices. A parameter whose elements are not updated by themselves, as by Muon, is
in one slice as a whole. A slice is a view of the parameter, which is updated in place; or, if the
parameter is rounded from a master, a slice of the master, which only owners have. The parameters of a layer are one
vector, which is divided into slices.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.optimizer import ModelOptimizer
from chameleon_ft.models.precision import parameter_like
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.worker.state_transfer.description import decode_description, encode_description

# Of so many elements, vectorized code computes the same values for a slice as for the whole parameter.
_ALIGNMENT: Final = 64

Range = tuple[int, int]
"""The units from a first one to one that is not included; see `plan.shards`."""

Trained = Mapping[str, nn.Parameter]
"""The parameters of a layer that are trained, by name."""


class ParameterVector:
    """The trained parameters of a layer, one after the other, without those that are shared with other layers.

    Args:
        undivided: names of parameters of which no part is updated by itself, and which are therefore in one slice.
    """

    def __init__(self, parameters: Trained, undivided: Collection[str] = ()) -> None:
        self._parameters = parameters
        self._undivided = undivided
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
        """Return the element at which a unit begins: aligned in its parameter, or an end of an undivided one."""
        element, begin = self._size * unit // UNITS, 0
        for name, parameter in self._parameters.items():
            end = begin + parameter.numel()
            if element < end:
                if name in self._undivided:
                    return begin if element - begin <= end - element else end
                return element - (element - begin) % _ALIGNMENT
            begin = end
        return begin


_ENTRY: Final = re.compile(
    r"(module|(?P<optimizer>optimizer))/(?P<name>.+?)(\[(?P<start>\d+):(?P<stop>\d+)\])?(?(optimizer)/(?P<key>[^/]*))"
)
# The key of a master, instead of one of the optimizer's state.
_MASTER: Final = ""
# The key of what the optimizer keeps besides the state of parameters, as JSON.
_VALUES: Final = "values"


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter, or a slice of it, that the optimizer updates.

    Attributes:
        own: what is updated: a view of `parameter`, or of its master.
    """

    layer: int
    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    own: nn.Parameter

    @classmethod
    def of(
        cls, layer: int, name: str, parameter: nn.Parameter, start: int, stop: int, master: Tensor | None = None
    ) -> Self:
        """Make the part of some elements; `master` has theirs, if a rounded parameter's is known yet."""
        is_whole = stop - start == parameter.numel()
        if is_whole and not _is_rounded(parameter):
            return cls(layer, name, parameter, start, stop, parameter)
        values = parameter.detach().view(-1)[start:stop]
        if _is_rounded(parameter):
            # A forward would not miss a master that nothing is restored into, but for NaN.
            values = torch.full_like(values, math.nan, dtype=parameter.grad_dtype) if master is None else master
        shape = parameter.shape if is_whole else (1,) * (parameter.ndim - 1) + (stop - start,)
        return cls(layer, name, parameter, start, stop, parameter_like(parameter, values.view(shape)))

    @property
    def is_rounded(self) -> bool:
        """Whether the parameter is rounded from a master, of which `own` is a slice."""
        return _is_rounded(self.parameter)

    def take_gradient(self) -> None:
        """Give it the gradient of its elements of the parameter, or none if the parameter has none."""
        if self.own is not self.parameter:
            whole = self.parameter.grad
            self.own.grad = None if whole is None else whole.view(-1)[self.start : self.stop].view(self.own.shape)

    def round(self) -> None:
        """Round its elements of the parameter from those of the master."""
        self.parameter.detach().view(-1)[self.start : self.stop].copy_(self.own.detach().view(-1))


@dataclass(frozen=True, slots=True)
class _Kept:
    """State that is kept for elements of a parameter: tensors with a value for each element, and values for all.

    Either the optimizer's, or the master alone, as `_MASTER`.
    """

    start: int
    stop: int
    state: Mapping[str, Any]

    @property
    def is_master(self) -> bool:
        return _MASTER in self.state

    def cut(self, start: int, stop: int) -> dict[str, Any]:
        """Return what is kept for some of the elements; tensors are views.

        Raises ConfigError if that cannot be determined.
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


@dataclass(frozen=True, slots=True)
class _Updating:
    """All that is updated, and the optimizer's state of it."""

    parts: tuple[_Part, ...] = ()
    state: Mapping[Tensor, Mapping[str, Any]] = field(default_factory=dict)

    def state_of(self, part: _Part) -> Mapping[str, Any]:
        return self.state.get(part.own, {})

    def kept_for(self, layer: int, name: str) -> list[_Kept]:
        """Return the optimizer's state of a parameter, and masters."""
        return [
            _Kept(part.start, part.stop, state)
            for part in self.parts
            if (part.layer, part.name) == (layer, name)
            for state in (self.state_of(part), {_MASTER: part.own.detach()} if part.is_rounded else {})
            if state
        ]


class LayerOptimizer:
    """The job's optimizer, which holds all that a rank updates.

    The state of layers and slices may be read in any thread, also while other parameters take the place of these.

    Args:
        model: an optimizer of the job, without which all layers are built on the meta device.

    Attributes:
        owned: layer -> the ranges of units that the rank owns; None: it updates all parameters of its layers.
        first_trained: the first layer of the model with a parameter that is trained.
    """

    def __init__(self, job: Job, model: ModelOptimizer | None = None) -> None:
        self._job = job
        self._model = ModelOptimizer(job) if model is None else model.anew()
        self.first_trained = self._model.first_trained
        self._updating = _Updating()
        self._values_json: str | None = ""
        self.owned: Mapping[int, Sequence[Range]] | None = None

    def renew(self, layers: Mapping[int, Trained], received: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Update what the rank owns of these layers from now on, with the state that is kept for it.

        Args:
            received: layer -> state of slices, by the keys that `state_of_slice` gives.
        """
        kept: dict[tuple[int, str], list[_Kept]] = defaultdict(list)
        for layer, name in {(part.layer, part.name) for part in self._updating.parts if part.layer in layers}:
            kept[layer, name] += self._updating.kept_for(layer, name)
        for layer, own in (received or {}).items():
            for name, pieces in _kept_in(own, layers[layer]).items():
                kept[layer, name] += pieces
        masters = {place: [each for each in pieces if each.is_master] for place, pieces in kept.items()}
        states = {place: [each for each in pieces if not each.is_master] for place, pieces in kept.items()}
        parts = tuple(part for layer in sorted(layers) for part in self._parts_of(layer, layers[layer], masters))
        state = self._model.torch.state
        # Other threads may read the state of before meanwhile.
        self._updating = replace(self._updating, state=dict(state))
        self._model.hold(((part.layer, part.name), part.own) for part in parts)
        for part in parts:
            if found := _assembled(states.get((part.layer, part.name), ()), part.start, part.stop):
                state[part.own] = self._shaped(found, part)
        self._updating = _Updating(parts, state)

    def vector_of(self, layer: int, updated: Trained) -> ParameterVector:
        """Return the parameters of a layer that are updated by slices."""
        tied = self._job.tied_in(layer)
        undivided = {name for name in updated if not self._model.is_elementwise((layer, name))}
        return ParameterVector({name: each for name, each in updated.items() if name not in tied}, undivided)

    def slices_of_masters(self, layer: int, updated: Trained, masters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return copies of what the rank owns of the masters of a layer, by the keys that `state_of_slice` gives."""
        vector = self.vector_of(layer, updated)
        return {
            _key(name, start, stop, _MASTER): masters[name].detach().view(-1)[start:stop].clone()
            for units in (self.owned or {}).get(layer, ())
            for name, start, stop in vector.pieces(units)
            if name in masters
        }

    def update(self, step: int) -> float:
        """Update the parameters from their gradients as they are; return the learning rate."""
        parts = self._updating.parts
        for part in parts:
            part.take_gradient()
        lr = self._model.step(step)
        self._values_json = None
        for part in parts:
            if part.is_rounded:
                part.round()
        return lr

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self._model.learning_rate(step)

    def state_of(self, layer: int) -> dict[str, Any]:
        """Return the state that moves with a layer: all of it, or if slices are owned, that of shared parameters.

        What the optimizer keeps besides is part of it, because it is equal on all workers.
        """
        tied, updating = None if self.owned is None else self._job.tied_in(layer), self._updating
        if self._values_json is None:
            changed = self._model.values.changed()
            self._values_json = encode_description([{_VALUES: changed}]).decode() if changed else ""
        return ({_VALUES: self._values_json} if self._values_json else {}) | {
            f"optimizer/{part.name}/{key}": value
            for part in updating.parts
            if part.layer == layer and (tied is None or part.name in tied)
            for key, value in updating.state_of(part).items()
        }

    def state_of_slice(self, layer: int, updated: Trained, units: Range) -> dict[str, Any]:
        """Return the state of a range of units that the rank owns; tensors may be views of the optimizer's own."""
        found, updating = dict[str, Any](), self._updating
        for name, start, stop in self.vector_of(layer, updated).pieces(units):
            for key, value in _both_assembled(updating.kept_for(layer, name), start, stop).items():
                found[_key(name, start, stop, key)] = value
        return found

    def restore(self, layer: int, state: Mapping[str, Any]) -> None:
        """Take over the state of what the rank owns of a layer; it may be cut into other slices."""
        if values := state.get(_VALUES):
            self._model.values.restore(decode_description(values.encode())[0][_VALUES])
            self._values_json = None
        own = [part for part in self._updating.parts if part.layer == layer]
        kept = _kept_in(state, {part.name: part.parameter for part in own})
        for part in own:
            found = _both_assembled(kept.get(part.name, ()), part.start, part.stop)
            if (master := found.pop(_MASTER, None)) is not None:
                part.own.data.copy_(master.view(part.own.shape))
            if found:
                self._model.torch.state[part.own] = {
                    key: value.to(self._device_of(key, part)) if isinstance(value, Tensor) else value
                    for key, value in self._shaped(found, part).items()
                }

    def _parts_of(
        self, layer: int, updated: Trained, masters: Mapping[tuple[int, str], Sequence[_Kept]]
    ) -> Iterator[_Part]:
        names: Iterable[str] = updated
        if self.owned is not None:
            # Each holder of a shared parameter updates all of it.
            names = self._job.tied_in(layer).intersection(updated)
            vector = self.vector_of(layer, updated)
            for units in self.owned.get(layer, ()):
                for name, start, stop in vector.pieces(units):
                    kept = _assembled(masters.get((layer, name), ()), start, stop) or {}
                    yield _Part.of(layer, name, updated[name], start, stop, kept.get(_MASTER))
        for name in sorted(names, key=list(updated).index):
            yield _Part.of(layer, name, updated[name], 0, updated[name].numel())

    def _shaped(self, state: Mapping[str, Any], part: _Part) -> dict[str, Any]:
        """Give values of elements the shape of a part, which owns their memory; others stay as they are."""
        is_elementwise = self._model.is_elementwise((part.layer, part.name))
        return {
            key: value.view(part.own.shape)
            if is_elementwise and isinstance(value, Tensor) and value.ndim > 0 and value.numel() == part.own.numel()
            else value
            for key, value in state.items()
        }

    def _device_of(self, key: str, part: _Part) -> torch.device:
        """Return where torch keeps a value: the counter "step" on the CPU, unless the update is fused or capturable."""
        group = self._model.group_of((part.layer, part.name)) or {}
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        return torch.device("cpu") if on_host else part.own.device


def joined_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a layer with masters whose slices it has as whole ones, in place of rounded parameters.

    Raises ValueError if slices are missing.
    """
    joined, slices = dict[str, Any](), defaultdict[str, list[tuple[int, Tensor]]](list)
    for entry, value in state.items():
        match = _ENTRY.fullmatch(entry)
        if match is None or match["key"] is not None or match["start"] is None:
            joined[entry] = value
        else:
            slices[f"module/{match['name']}"].append((int(match["start"]), value))
    for key, parts in slices.items():
        whole, end = torch.empty(state[key].shape, dtype=parts[0][1].dtype), 0
        # Slices may overlap.
        for start, part in sorted(parts, key=lambda each: each[0]):
            if start > end:
                break
            whole.view(-1)[start : start + part.numel()] = part.view(-1)
            end = max(end, start + part.numel())
        if end < whole.numel():
            raise ValueError(f"no slice has element {end} of {key}")
        joined[key] = whole
    return joined


def _kept_in(state: Mapping[str, Any], parameters: Trained) -> dict[str, list[_Kept]]:
    """Return what a layer's state has for each of these parameters, in whichever slices."""
    found: dict[tuple[str, int, int, bool], dict[str, Any]] = defaultdict(dict)
    for entry, value in state.items():
        if not (match := _ENTRY.fullmatch(entry)) or (name := match["name"]) not in parameters:
            continue
        key, parameter = match["key"] or _MASTER, parameters[name]
        if key == _MASTER and not (_is_rounded(parameter) and value.dtype == parameter.grad_dtype):
            continue
        ends = (0, parameter.numel()) if match["start"] is None else (match["start"], match["stop"])
        found[name, int(ends[0]), int(ends[1]), key == _MASTER][key] = value
    by_name: dict[str, list[_Kept]] = defaultdict(list)
    for (name, start, stop, _), own in found.items():
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


def _both_assembled(kept: Iterable[_Kept], start: int, stop: int) -> dict[str, Any]:
    """Return the optimizer's state of some elements and their master, as `_MASTER`, as far as these are there."""
    pieces = list(kept)
    return {
        **(_assembled((each for each in pieces if not each.is_master), start, stop) or {}),
        **(_assembled((each for each in pieces if each.is_master), start, stop) or {}),
    }


def _key(name: str, start: int, stop: int, key: str) -> str:
    """Return the key in a layer's state of what is kept for a slice."""
    place = f"{name}[{start}:{stop}]"
    return f"module/{place}" if key == _MASTER else f"optimizer/{place}/{key}"


def _is_rounded(parameter: nn.Parameter) -> bool:
    """Return whether a tensor that is to be updated is a parameter that is rounded from a master."""
    return parameter.grad_dtype not in (None, parameter.dtype)
