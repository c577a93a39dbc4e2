"""The evaluations of a run: what was asked for, and what is under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.plan.frozen_map import FrozenMap

_KEPT_RESULTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The evaluation that was asked for, and the one that is under way.

    Attributes:
        request: number of the newest request.
        is_wanted: whether a user has asked for an evaluation that is not complete.
        pending: steps trained when the evaluation began that is not complete; None if there is none.
        results: by steps trained, the finite results by name of the newest evaluations, of whose states checkpoints may
            still be being written.
    """

    request: int = 0
    is_wanted: bool = False
    pending: int | None = None
    results: Mapping[int, Mapping[str, float]] = FrozenMap({})

    def begun(self, committed: int) -> Self:
        """Note that all workers evaluate after so many steps."""
        return replace(self, pending=committed)

    def ended(self, values: Mapping[str, float]) -> Self:
        """Note that the evaluation is complete."""
        assert self.pending is not None
        known = dict(sorted(self.results.items())[1 - _KEPT_RESULTS :]) | {self.pending: FrozenMap(values)}
        return replace(self, is_wanted=False, pending=None, results=FrozenMap(known))

    def of(self, step: int) -> Mapping[str, float]:
        """Return the results after so many steps, if they are known."""
        return self.results.get(step, FrozenMap({}))

    def requested(self) -> Self:
        """Note another request."""
        return replace(self, request=self.request + 1, is_wanted=True)

    def continued(self, first_step: int) -> Self:
        """Note that a generation begins: if with another state, steps are trained again before the evaluation."""
        after = replace(
            self, results=FrozenMap({step: own for step, own in self.results.items() if step <= first_step})
        )
        return after if self.pending == first_step else replace(after, pending=None)
