"""The checkpoints of a run: what ranks report about them, and when the next one is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from chameleon_ft.control.state.checkpoint_schedule import CheckpointSchedule
from chameleon_ft.control.wire.messages import LEFT_OUT, CheckpointSaved, SlowIO
from chameleon_ft.plan.frozen_map import FrozenMap, without
from chameleon_ft.plan.shards import UNITS


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """The layers of a checkpoint that are on disk."""

    layers: frozenset[int] = frozenset()
    slices: frozenset[tuple[int, int, int]] = frozenset()  # (layer, first unit, unit after the last)
    seals: Mapping[str, str] = FrozenMap({})  # name of each layer's and slice's folder -> digest of what it has
    copy_s: float = 0.0  # seconds that training paused: the longest that a rank took to copy its layers
    write_s: float = 0.0  # seconds that the slowest rank took to write its copy in the background

    def __post_init__(self) -> None:
        object.__setattr__(self, "seals", FrozenMap(self.seals))

    def covers_all(self, num_layers: int) -> bool:
        """Return whether the slices leave nothing out of any layer; they may overlap after a change of owners."""
        ends = dict.fromkeys(range(num_layers), 0)
        for layer, start, stop in sorted(self.slices):
            if start <= ends[layer]:
                ends[layer] = max(ends[layer], stop)
        return all(end == UNITS for end in ends.values())


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Assembles checkpoints from the parts that ranks write, and remembers failures that were recorded."""

    parts: Mapping[int, CheckpointParts] = FrozenMap({})  # resume step of an incomplete checkpoint -> its parts
    first_generation: int = 0  # parts of earlier generations are ignored: their state was discarded
    failed: Mapping[int, str] = FrozenMap({})  # step of a checkpoint that could not be written -> why
    slow: frozenset[SlowIO] = frozenset()  # reports of slow disks
    unreadable: Mapping[int, str] = FrozenMap({})  # step of a complete checkpoint that is not read again -> why
    loads: int = 0  # the last generation that began by loading a state
    is_reread: bool = False  # whether workers are to load a checkpoint, for their state is wrong or could not be read
    newest: int | None = None  # step of the newest complete checkpoint of this run; None if there is none
    missed: int = 0  # how many since then could not be written
    schedule: CheckpointSchedule = field(default_factory=CheckpointSchedule)  # when the next one is written

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", FrozenMap(self.parts))
        object.__setattr__(self, "failed", FrozenMap(self.failed))
        object.__setattr__(self, "unreadable", FrozenMap(self.unreadable))

    def saved(
        self, part: CheckpointSaved, *, num_layers: int, has_slices: bool = False
    ) -> tuple[Self, CheckpointParts | None]:
        """Add a written part; also return the checkpoint if this part completes it."""
        old = self.parts.get(part.step, CheckpointParts())
        new = CheckpointParts(
            old.layers.union(part.layers),
            old.slices.union(part.slices),
            {**old.seals, **dict(part.seals)},
            max(old.copy_s, part.copy_s),
            max(old.write_s, part.write_s),
        )
        if len(new.layers) < num_layers or (has_slices and not new.covers_all(num_layers)):
            return replace(self, parts={**self.parts, part.step: new}), None
        written = replace(
            self,
            parts=without(self.parts, part.step),
            unreadable=without(self.unreadable, part.step),
            newest=part.step,
            missed=0,
            schedule=self.schedule.ended(part.step, copy_s=new.copy_s, is_complete=True),
        )
        return written, new

    def not_written(self, step: int, why: str) -> Self:
        """Note that a checkpoint could not be written; the first reason counts."""
        is_new = step not in self.failed and why != LEFT_OUT
        return replace(self, failed={step: why, **self.failed}, missed=self.missed + is_new)

    def describe_newest(self) -> str:
        """Return since when no checkpoint is complete."""
        return "no checkpoint of this run is complete" + ("" if self.newest is None else f" since step {self.newest}")

    def repeated(self, step: int) -> Self:
        """Note that training has reached a step again, whose checkpoint may be written after all."""
        return replace(self, failed=without(self.failed, step))

    def without_parts_before(self, generation: int) -> Self:
        """Discard incomplete checkpoints and ignore late parts, because `generation` begins from different state."""
        return replace(self, parts={}, first_generation=generation, is_reread=False)

    def loaded(self, generation: int) -> Self:
        """Note that `generation` begins by loading a state, and repeats all steps after it."""
        return replace(
            self.without_parts_before(generation), failed={}, loads=generation, schedule=self.schedule.returned()
        )

    def interrupted(self) -> Self:
        """Note a loss after which workers keep their state."""
        return replace(self, schedule=self.schedule.interrupted())

    def rejected(self, step: int, why: str) -> Self:
        """Note that workers cannot read the checkpoint of a step."""
        return replace(self, unreadable={**self.unreadable, step: why}, is_reread=True)


def describe_unreadable(step: int, why: str) -> str:
    """Return the line for the user about a checkpoint that cannot be read."""
    return f"that of step {step} cannot be read and is not used again: {why}"
