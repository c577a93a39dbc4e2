"""Switches to later generations: the one that is prepared, the ones that follow it, and the layers that move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGeneration:
    """The generation that the run is to switch to, until it is in force or given up."""

    spec: GenerationSpec
    unprepared: frozenset[int]  # participants that have not answered yet
    deadline_s: float  # end of the wait for the answers, in monotonic seconds
    probe_at_s: float = 0.0  # when the participants are asked whether they reach each other
    prepared_at: float = 0.0  # when the last one did, in Unix seconds; 0 before
    is_switching: bool = False  # whether `Switch` was sent to the workers

    @property
    def number(self) -> int:
        """The number of the generation."""
        return self.spec.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """Layers that have moved during training on the way to a plan, in waves."""

    waves: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def after(self, wave: Transfer | None, seconds: float) -> Self:
        """Return the sum with one more wave; None if no layer moved before this switch."""
        if wave is None:
            return self
        return replace(
            self,
            waves=self.waves + 1,
            seconds=self.seconds + seconds,
            num_bytes=self.num_bytes + wave.total_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The plans that the run is to switch to while it trains.

    Attributes:
        next: the generation that is being prepared, if there is one.
        following: the generations to switch to, one after the other; the first is that of `next`.
        record: the fields of the record of the decision that leads to the last of them.
        migrated: the layers that have moved on the way to the last of these plans.
        migrating_at: when layers began to move in the active generation, if they do, in Unix seconds.
    """

    next: NextGeneration | None = None
    following: tuple[GenerationSpec, ...] = ()
    record: Mapping[str, object] = FrozenMap({})
    migrated: Migrated = field(default_factory=Migrated)
    migrating_at: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "record", FrozenMap(self.record))

    @property
    def underway(self) -> NextGeneration | None:
        """The next generation, if workers may have switched to it already."""
        return self.next if self.next is not None and self.next.is_switching else None

    def extended(self, seconds: float) -> Self:
        """Extend the wait for those that prepare by a time in which the coordinator did not run."""
        if self.next is None:
            return self
        return replace(self, next=replace(self.next, deadline_s=self.next.deadline_s + seconds))

    def stopped(self) -> Self:
        """Note that all workers stop: only a switch that is underway may still have happened."""
        return replace(self, next=self.underway, following=(), migrated=Migrated())
