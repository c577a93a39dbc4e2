"""Plans that are considered while training continues: for workers that join or leave, become slow or recover, or after
a plan that was chosen without a search.

A worker that joins is a spare until a decision considers it, and then part of the plan if that is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.control.detectors.slow_links import workers_of_link
from chameleon_ft.plan.frozen_map import FrozenMap

_QUIET_S: Final = 0.5  # wait after the last newcomer, before all are considered together
_GATHERING_S: Final = 10.0  # longest wait after the first newcomer, for others that are still loading
_RETRY_S: Final = 1.0  # wait after a generation could not be prepared; twice as long after each that follows
_RETRY_MAX_S: Final = 120.0  # longest such wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """The newcomers, and the progress of their admission. Times are monotonic seconds."""

    loaded: tuple[int, ...] = ()  # ready workers that do not take part yet, in order of arrival
    newcomers: frozenset[int] = frozenset()  # live workers that no decision has taken into account yet
    provisional_since_s: float | None = None  # when training continued under a plan that was chosen without a search
    first_at_s: float = 0.0  # when the first newcomer became a spare
    last_at_s: float = 0.0  # when the last newcomer did
    considering: int | None = None  # generation of the decision that is being made; None if there is none
    question: int = 0  # number of that decision, or of the last one
    asked_speeds: Mapping[int, float] = FrozenMap({})  # as `Detectors.speeds`, for that decision
    speeds: Mapping[int, float] = FrozenMap({})  # likewise for the newest one that was carried out
    retries: int = 0  # generations in a row that could not be prepared
    retry_at_s: float = 0.0  # no other is prepared before

    def __post_init__(self) -> None:
        for name in ("asked_speeds", "speeds"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

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
        asked_speeds, speeds = (
            {each: speed for each, speed in known.items() if worker not in (workers_of_link(each) or (each,))}
            for known in (self.asked_speeds, self.speeds)
        )
        newcomers = self.newcomers - {worker}
        return replace(self, loaded=loaded, newcomers=newcomers, asked_speeds=asked_speeds, speeds=speeds)

    def is_complete(self, now: float, *, is_loading: bool, speeds: Mapping[int, float]) -> bool:
        """Return whether to consider a plan now, with all newcomers, instead of waiting for more that are loading.

        A plan that was chosen without a search, or for other `speeds` of slow workers, may be a bad one: its successor
        waits for none.
        """
        if speeds != self.speeds:
            return True
        if not self.newcomers:
            return self.provisional_since_s is not None
        if now < self.last_at_s + _QUIET_S:
            return False
        return not is_loading or now >= self.first_at_s + _GATHERING_S

    def asked(self, generation: int, speeds: Mapping[int, float]) -> Self:
        """Note that a decision is being made in a generation, for these speeds of slow workers."""
        return replace(self, considering=generation, question=self.question + 1, asked_speeds=speeds)

    def failed(self, now: float) -> Self:
        """Note that a generation could not be prepared: the next attempt is made after a while."""
        retry_at_s = now + min(_RETRY_MAX_S, _RETRY_S * 2 ** min(self.retries, 10))
        return replace(self, retries=self.retries + 1, retry_at_s=retry_at_s)

    def with_provisional_plan(self, now: float) -> Self:
        """Note that a plan was chosen without a search: newcomers, and better plans, are still to be considered."""
        return replace(self, provisional_since_s=now)

    def settled(self) -> Self:
        """Note that the last decision is carried out: all newcomers are in the plan, or stay spares."""
        return replace(
            self, newcomers=frozenset(), provisional_since_s=None, speeds=self.asked_speeds, retries=0, retry_at_s=0.0
        )
