"""Plans that are considered while training continues: with workers that join a live run, or after a hasty decision.

A worker that joins is a spare until a decision considers it, and then part of the plan if that is worth it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias

from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["PREALLOCATION_S", "LayerBytes", "PendingChange", "ScaleUp"]

_QUIET_S: Final = 0.5  # wait after the last newcomer, before all are considered together
_GATHERING_S: Final = 10.0  # longest wait after the first newcomer, for others that are still loading
PREALLOCATION_S: Final = 10.0
"""Seconds for newcomers to preallocate memory for incoming layers."""

LayerBytes: TypeAlias = tuple[tuple[int, int], ...]
"""(layer, bytes of its state), in the order of arrival."""


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A better plan with newcomers, which are preallocating memory for it."""

    question: int  # number of the decision
    generation: int
    live: tuple[int, ...]  # live workers that the decision was made for
    deadline_s: float  # end of the wait, in monotonic seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """The newcomers, and the progress of their admission. Times are monotonic seconds."""

    loaded: tuple[int, ...] = ()  # ready workers that do not take part yet, in order of arrival
    newcomers: frozenset[int] = frozenset()  # live workers that no decision has taken into account yet
    hurried_at_s: float | None = None  # when training continued under a plan that was chosen without a search
    first_at_s: float = 0.0  # when the first newcomer became a spare
    last_at_s: float = 0.0  # when the last newcomer did
    considering: int | None = None  # generation of the decision that is being made; None if there is none
    question: int = 0  # number of that decision, or of the last one
    change: PendingChange | None = None  # the plan for which they preallocate
    is_pausing: bool = False  # whether all workers were told to pause after the current step for that plan
    prepared: int | None = None  # `question` of the decision that the pause is for
    expecting: frozenset[int] = frozenset()  # workers that were told of incoming layers but have no orders yet
    preallocating: Mapping[int, LayerBytes] = FrozenMap({})  # expecting worker -> layers, until it has preallocated

    def __post_init__(self) -> None:
        object.__setattr__(self, "preallocating", FrozenMap(self.preallocating))

    def admitted(self, now: float) -> Self:
        """Turn the ready workers into spares."""
        if not self.loaded:
            return self
        first_at_s = self.first_at_s if self.newcomers else now
        newcomers = self.newcomers.union(self.loaded)
        return replace(self, loaded=(), newcomers=newcomers, first_at_s=first_at_s, last_at_s=now)

    def without(self, worker: int) -> Self:
        """Remove a lost worker."""
        loaded = tuple(each for each in self.loaded if each != worker)
        return replace(self, loaded=loaded, newcomers=self.newcomers - {worker})

    def is_complete(self, now: float, *, is_loading: bool) -> bool:
        """Return whether to consider a plan now, with all newcomers, instead of waiting for more that are loading."""
        if not self.newcomers:
            if self.hurried_at_s is None:
                return False
            return not is_loading or now >= self.hurried_at_s + _GATHERING_S
        if now < self.last_at_s + _QUIET_S:
            return False
        return not is_loading or now >= self.first_at_s + _GATHERING_S

    def expect(self, incoming: Mapping[int, LayerBytes]) -> Self:
        """Note that these layers will come to these newcomers."""
        return replace(self, expecting=frozenset(incoming), preallocating=incoming)

    def preallocated(self, worker: int, layers: LayerBytes) -> Self:
        """Note that a worker has preallocated for `layers`; ignored if it expects others by now."""
        if self.preallocating.get(worker) != layers:
            return self
        return replace(self, preallocating={w: each for w, each in self.preallocating.items() if w != worker})

    def released(self, ordered: Collection[int] = ()) -> tuple[Self, tuple[int, ...]]:
        """Expect no layers any more; also return the workers that expected some and are not among `ordered`."""
        return replace(self, expecting=frozenset(), preallocating={}), tuple(sorted(self.expecting - set(ordered)))

    def hurried(self, now: float) -> Self:
        """Note that a plan was chosen without a search: newcomers, and better plans, are still to be considered."""
        return replace(self, hurried_at_s=now, is_pausing=False, prepared=None)

    def settled(self) -> Self:
        """Clear the newcomers: all are in the plan, or stay spares."""
        return replace(self, newcomers=frozenset(), hurried_at_s=None, is_pausing=False, prepared=None)
