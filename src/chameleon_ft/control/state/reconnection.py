"""Peers that have lost their connections to a coordinator, and are to come back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.state.switches import NextGeneration


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnection:
    """The wait for peers after a coordinator was lost or held up. Times are monotonic seconds.

    Attributes:
        awaited: lost connections whose peers have not come back.
        until_s: when those count as lost.
        stalled_at_s: when this coordinator had not run, or not led, for a while; None if that never happened.
        doubtful: the generation that a lost coordinator was preparing by its journal; its last lines may be missing,
            so workers may have been told to switch to it.
        journaled: the newest generation in the journal of a lost coordinator, until all of its peers are back: they may
            know later ones, whose numbers this coordinator has used for others meanwhile.
    """

    awaited: frozenset[int] = frozenset()
    until_s: float = 0.0
    stalled_at_s: float | None = None
    doubtful: NextGeneration | None = None
    journaled: int | None = None

    def awaiting(self, connections: Iterable[int], *, until_s: float) -> Self:
        """Note further lost connections; all that are awaited count as lost at `until_s`."""
        return replace(self, awaited=self.awaited.union(connections), until_s=until_s)

    def without(self, connections: Iterable[int]) -> Self:
        """Note that the peers of these connections are back."""
        return replace(self, awaited=self.awaited.difference(connections))

    def extended(self, seconds: float) -> Self:
        """Extend the wait by a time in which the coordinator did not run."""
        return replace(self, until_s=self.until_s + seconds)

    def has_stalled(self, now_s: float, *, within_s: float) -> bool:
        """Return whether the coordinator has stalled in the last `within_s` seconds."""
        return self.stalled_at_s is not None and now_s <= self.stalled_at_s + within_s
