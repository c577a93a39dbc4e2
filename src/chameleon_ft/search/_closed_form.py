"""How many micro-batches a pipeline can finish at most, by a formula: for shapes that are probably not worth a look.

If layers could be cut anywhere, messages were free and nothing ever waited, a stage i of speed s_i could do, by T,

    m w_i / s_i <= T - (what comes before it) = T - h (w_0 + ... + w_(i-1)) / s

where h is the least share of a layer's time that the stages before must have spent on a micro-batch before this one
starts, or starts and ends, and s the largest speed of all: with that, filling stage by stage lets each next one do the
most. So all stages together do the work W of m micro-batches only if

    m W <= T * sum_i s_i prod_(j<i) (1 - h s_j / (s m))

Gradient sync that takes g seconds for every second of a micro-batch's work makes it (m + g) on both sides. And since
layers cannot be cut, some stage has as much work as the largest of the best cut: m times that is a bound too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._kinds import Kind, Shape

_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Those of the workers of a shape, and what is asked of them."""

    speeds: NDArray[np.float64]
    total: float
    least: float
    largest: float

    @classmethod
    def of(cls, speeds: Sequence[float]) -> _Speeds:
        # Whole numbers would have the kernel compiled once more.
        return cls(np.array(speeds, np.float64), sum(speeds), min(speeds), max(speeds))


@dataclass(frozen=True, slots=True)
class _Crews:
    """Those of several shapes.

    Attributes:
        speeds: of the workers of one shape after the other.
        ends: where they end.
        least: the smallest speed of each.
        rates: micro-batches for each second that nothing can pass: workers that are never idle do no more, nor does
            that of the largest stage.
    """

    speeds: NDArray[np.float64]
    ends: NDArray[np.int64]
    least: NDArray[np.float64]
    rates: NDArray[np.float64]


class ClosedForm:
    """The formula for one workload, with fused or split backward."""

    def __init__(self, costs: CostModel, kinds: Sequence[Kind], *, split_backward: bool) -> None:
        layers = costs.workload.layers
        work_s = [
            layer.forward_s + (layer.least_backward_s if split_backward else layer.backward_s) for layer in layers
        ]
        busy = [(layer, own_s) for layer, own_s in zip(layers, work_s, strict=True) if own_s]
        self._speeds = [kind.speed for kind in kinds]
        self._work_s = sum(work_s)
        forward = min((layer.forward_s / own_s for layer, own_s in busy), default=0.0)
        # Fused backwards of the stages before come after it. What is to be reduced does not wait for them.
        self._ahead = forward if split_backward else 1.0
        self._ahead_of_sync = forward
        # What is tied may be reduced for several layers of a stage at once.
        own_bytes = [layer.gradient_bytes for layer in layers]
        for each in costs.workload.tied:
            for number in each.layers:
                own_bytes[number] -= each.gradient_bytes
        self._bytes_per_s = min(
            (size / own_s for size, own_s in zip(own_bytes, work_s, strict=True) if own_s), default=0.0
        )
        self._largest_s = _largest_stage_s(work_s)
        self._last: dict[tuple[Shape, float], int] = {}
        self._crews: dict[Shape, _Speeds] = {}
        self._crews_of: dict[tuple[Shape, ...], _Crews] = {}

    def most(self, shape: Shape, time_s: float, per_byte_s: float, enough: int) -> int:
        """The most micro-batches, up to `enough`, with so many seconds of gradient sync for every byte."""
        if not self._work_s:
            return enough
        # Here, as below, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.search._closed_form_kernel import most_possible

        crew = self._crews.get(shape)
        if crew is None:
            crew = self._crews[shape] = _Speeds.of([self._speeds[kind] for kind in shape])
        # Workers that are never idle do no more.
        high = int(min(enough, time_s * crew.total / self._work_s * (1 + _ROUNDING)))
        if largest_s := self._largest_s[len(shape)]:
            high = int(min(high, time_s * crew.largest / largest_s * (1 + _ROUNDING)))
        # Times that are asked for differ little, and so do answers.
        found = self._last[shape, per_byte_s] = most_possible(
            crew.speeds,
            self._work_s * (1 - _ROUNDING),
            self._ahead,
            self._ahead_of_sync,
            float(time_s),
            self._bytes_per_s * per_byte_s * crew.least,
            self._last.get((shape, per_byte_s), 0),
            high,
        )
        return found

    def least_s(self, depth: int, micro_batches: int, per_byte_s: float) -> float:
        """Seconds that the formula allows a pipeline of workers of the first kind at the least."""
        speed = self._speeds[0]

        def shared(head: float) -> float:
            return speed * (1 - (1 - head) ** depth) / head if head > 0 else speed * depth

        synced = micro_batches + self._bytes_per_s * per_byte_s * speed
        return (1 - _ROUNDING) * max(
            micro_batches * self._work_s / shared(self._ahead / micro_batches),
            synced * self._work_s / shared(self._ahead_of_sync / synced),
            micro_batches * self._largest_s[depth] / speed,
        )

    def of(self, shapes: tuple[Shape, ...], per_byte_s: float, enough: int) -> ClosedForms:
        """The same for all of some shapes at once."""
        crews = self._crews_of.get(shapes)
        if crews is None:
            crews = self._crews_of[shapes] = self._crews_in(shapes)
        return ClosedForms(self, crews, per_byte_s, enough)

    def _crews_in(self, shapes: Sequence[Shape]) -> _Crews:
        crews = [[self._speeds[kind] for kind in shape] for shape in shapes]
        rates = np.full(len(crews), np.inf)
        if self._work_s:
            rates = np.array([sum(crew) for crew in crews], np.float64) / self._work_s
            largest_s = np.array([self._largest_s[len(crew)] for crew in crews])
            fastest = np.array([max(crew) for crew in crews], np.float64)
            of_largest = np.divide(fastest, largest_s, out=np.full(len(crews), np.inf), where=largest_s > 0)
            rates = np.minimum(rates, of_largest) * (1 + _ROUNDING)
        return _Crews(
            speeds=np.array([speed for crew in crews for speed in crew], np.float64),
            ends=np.cumsum([len(crew) for crew in crews], dtype=np.int64),
            least=np.array([min(crew) for crew in crews], np.float64),
            rates=rates,
        )


class ClosedForms:
    """The formula for some shapes, with so many seconds of gradient sync for every byte."""

    def __init__(self, form: ClosedForm, crews: _Crews, per_byte_s: float, enough: int) -> None:
        # Here, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.search._closed_form_kernel import Formula

        self.formula = Formula(
            speeds=crews.speeds,
            ends=crews.ends,
            work_s=float(form._work_s * (1 - _ROUNDING)),
            ahead=float(form._ahead),
            ahead_of_sync=float(form._ahead_of_sync),
            extra=form._bytes_per_s * per_byte_s * crews.least,
            rates=crews.rates,
            enough=enough,
        )
        self._found = np.zeros(len(crews.ends), np.int64)

    @property
    def rates(self) -> NDArray[np.float64]:
        """By shape, micro-batches for each second that nothing can pass."""
        found: NDArray[np.float64] = self.formula.rates
        return found

    def most(self, time_s: float) -> NDArray[np.int64]:
        """By shape, the most micro-batches."""
        from chameleon_ft.search._closed_form_kernel import most_possible_of_each

        most_possible_of_each(self.formula, time_s * (1 + _ROUNDING), self._found)
        return self._found.copy()


def _largest_stage_s(work_s: Sequence[float]) -> list[float]:
    """By number of stages, what the stage with most work has at the least, whatever the cut."""
    from chameleon_ft.search._closed_form_kernel import fill_largest

    until_s = np.concatenate([[0.0], np.cumsum(work_s)])
    largest_s = np.empty(len(until_s))
    fill_largest(until_s, np.empty(len(until_s)), largest_s)
    found: list[float] = largest_s.tolist()
    return found
