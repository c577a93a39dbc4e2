"""The parameters of a layer as one vector, which is divided into slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor, nn

from chameleon_ft.plan.shards import UNITS

_ALIGNMENT: Final = 64  # elements: vectorized code computes the same values for a slice as for the whole parameter

Range = tuple[int, int]
"""The units from a first one to one that is not included; see `plan.shards`."""

Trained = Mapping[str, nn.Parameter]
"""The parameters of a layer that are trained, by name."""


class ParameterVector:
    """The trained parameters of a layer, one after the other, without those that are shared with other layers."""

    def __init__(self, parameters: Trained) -> None:
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
