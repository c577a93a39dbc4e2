"""What ranks report of reading and writing checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.wire.messages import CheckpointSaved, SlowIO
from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["CheckpointEvents", "CheckpointParts"]


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """What is on disk of a checkpoint.

    Attributes:
        copy_s: seconds that training stood still for it: those of the rank that took longest to copy its layers.
        write_s: seconds in which the slowest rank wrote its copy to disk, beside training.
    """

    layers: frozenset[int] = frozenset()
    copy_s: float = 0.0
    write_s: float = 0.0

    def with_part(self, part: CheckpointSaved) -> Self:
        """Return the parts with one more."""
        copy_s, write_s = max(self.copy_s, part.copy_s), max(self.write_s, part.write_s)
        return replace(self, layers=self.layers | set(part.layers), copy_s=copy_s, write_s=write_s)


@dataclass(frozen=True, slots=True)
class CheckpointEvents:
    """Puts checkpoints together from the parts that ranks write, and tells which reports are news.

    Attributes:
        parts: step that a checkpoint resumes at -> its parts, of those that are not complete.
        first_generation: parts of earlier generations are void, for their state was given up.
        failed: steps whose checkpoint could not be written.
        slow: reports of slow disks.
    """

    parts: Mapping[int, CheckpointParts] = FrozenMap({})
    first_generation: int = 0
    failed: frozenset[int] = frozenset()
    slow: frozenset[SlowIO] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", FrozenMap(self.parts))

    def saved(self, part: CheckpointSaved, *, num_layers: int) -> tuple[Self, CheckpointParts | None]:
        """Add a part that was written; return also the whole checkpoint that it completes, if it does."""
        if part.generation < self.first_generation:
            return self, None
        parts = self.parts.get(part.step, CheckpointParts()).with_part(part)
        if len(parts.layers) < num_layers:
            return replace(self, parts={**self.parts, part.step: parts}), None
        return replace(self, parts={step: each for step, each in self.parts.items() if step != part.step}), parts

    def forgotten(self, generation: int) -> Self:
        """With `generation` all begin from other state: incomplete checkpoints, and parts under way, are void."""
        return replace(self, parts={}, first_generation=generation)
