"""Workers that join while the run goes on: spares until they are considered, and part of the plan if that pays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias

from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["PREALLOCATION_S", "LayerBytes", "PendingChange", "ScaleUp"]

_QUIET_S: Final = 0.5  # without anyone new, before the newcomers are considered together
_GATHERING_S: Final = 10.0  # for those that are still loading
PREALLOCATION_S: Final = 10.0
"""Seconds that are granted to newcomers to preallocate what comes to them."""

LayerBytes: TypeAlias = tuple[tuple[int, int], ...]
"""(layer, bytes of its state), in the order in which they come."""


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A plan with newcomers that pays, while they preallocate what comes to them.

    Attributes:
        question: of the decision.
        live: workers that it was made for.
        deadline_s: when to wait no longer, in monotonic seconds.
    """

    question: int
    generation: int
    live: tuple[int, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """The newcomers, and how far the run is with taking them in. Times are monotonic seconds.

    Attributes:
        loaded: workers that are ready, and do not take part yet, in the order in which they came.
        newcomers: live workers that no decision has reckoned with yet.
        first_at_s: when the first of them became a spare, and
        last_at_s: when the last did.
        considering: generation for which it is being decided what to do with them; None if it is not.
        question: number of that decision, and of the last one before.
        change: what they preallocate for.
        is_pausing: whether all were told to pause after the current step, for the change that `change` was.
        prepared: question of the decision that the pause is for.
        expecting: workers that were told which layers will come to them, and have no orders yet.
        preallocating: those of them that have not preallocated yet -> what they were told.
    """

    loaded: tuple[int, ...] = ()
    newcomers: frozenset[int] = frozenset()
    first_at_s: float = 0.0
    last_at_s: float = 0.0
    considering: int | None = None
    question: int = 0
    change: PendingChange | None = None
    is_pausing: bool = False
    prepared: int | None = None
    expecting: frozenset[int] = frozenset()
    preallocating: Mapping[int, LayerBytes] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "preallocating", FrozenMap(self.preallocating))

    def admitted(self, now: float) -> Self:
        """Make spares of the workers that are ready."""
        if not self.loaded:
            return self
        first_at_s = self.first_at_s if self.newcomers else now
        newcomers = self.newcomers.union(self.loaded)
        return replace(self, loaded=(), newcomers=newcomers, first_at_s=first_at_s, last_at_s=now)

    def without(self, worker: int) -> Self:
        """A worker is lost."""
        loaded = tuple(each for each in self.loaded if each != worker)
        return replace(self, loaded=loaded, newcomers=self.newcomers - {worker})

    def is_complete(self, now: float, *, is_loading: bool) -> bool:
        """Whether the newcomers are to be considered now, rather than wait for more that are loading."""
        if not self.newcomers or now < self.last_at_s + _QUIET_S:
            return False
        return not is_loading or now >= self.first_at_s + _GATHERING_S

    def expect(self, incoming: Mapping[int, LayerBytes]) -> Self:
        """A change has been found in which these layers come to these newcomers."""
        return replace(self, expecting=frozenset(incoming), preallocating=incoming)

    def preallocated(self, worker: int, layers: LayerBytes) -> Self:
        """A worker has room for these layers, which may be others than it was told of last."""
        if self.preallocating.get(worker) != layers:
            return self
        return replace(self, preallocating={w: each for w, each in self.preallocating.items() if w != worker})

    def released(self, ordered: Collection[int] = ()) -> tuple[Self, tuple[int, ...]]:
        """Return the workers to which nothing comes after all: those that expect layers and have no orders now."""
        return replace(self, expecting=frozenset(), preallocating={}), tuple(sorted(self.expecting - set(ordered)))

    def settled(self) -> Self:
        """All newcomers have a place, or are spares."""
        return replace(self, newcomers=frozenset(), is_pausing=False, prepared=None)
