"""Putting checkpoints together from the parts that ranks write."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from chameleon_ft.control.wire.messages import CheckpointSaved
from chameleon_ft.observe import complete_checkpoints, mark_complete, prune_checkpoints

__all__ = ["CheckpointCollector", "SavedCheckpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is complete.

    Attributes:
        step: the one that it resumes at.
        copy_s: seconds that training stood still for it: those of the rank that took longest to copy its layers.
        write_s: seconds in which the slowest rank wrote its copy to disk, beside training.
    """

    step: int
    copy_s: float
    write_s: float


@dataclass(slots=True)
class _Parts:
    """What is there of a checkpoint."""

    layers: set[int] = field(default_factory=set)
    copy_s: float = 0.0
    write_s: float = 0.0

    def add(self, part: CheckpointSaved) -> None:
        self.layers.update(part.layers)
        self.copy_s = max(self.copy_s, part.copy_s)
        self.write_s = max(self.write_s, part.write_s)


class CheckpointCollector:
    """Marks a checkpoint as complete once every layer of it is on disk, and knows which are not needed any more.

    Args:
        directory: the run's folder of checkpoints.
        num_layers: layers of the model.
        model: its fingerprint.
        keep: complete checkpoints to keep.
    """

    def __init__(self, directory: Path, *, num_layers: int, model: str, keep: int) -> None:
        self._directory = directory
        self._num_layers = num_layers
        self._model = model
        self._keep = keep
        self._saved: dict[int, _Parts] = {}
        self._first_generation = 0

    def add(self, part: CheckpointSaved) -> SavedCheckpoint | None:
        """Take note of a part that was written; return the checkpoint that it completes, if it does."""
        if part.generation < self._first_generation:
            return None
        parts = self._saved.setdefault(part.step, _Parts())
        parts.add(part)
        if len(parts.layers) < self._num_layers:
            return None
        del self._saved[part.step]
        mark_complete(self._directory, part.step, model=self._model)
        return SavedCheckpoint(step=part.step, copy_s=parts.copy_s, write_s=parts.write_s)

    def prune(self) -> None:
        """Remove the checkpoints that are not needed any more. That may take long; call it in a thread."""
        prune_checkpoints(self._directory, keep=self._keep)

    def forget(self, generation: int) -> None:
        """With `generation` all begin from other state: incomplete checkpoints, and parts still under way, are void."""
        self._saved.clear()
        self._first_generation = generation

    def complete(self) -> list[int]:
        """Return the steps that complete checkpoints resume at, ascending."""
        return complete_checkpoints(self._directory)
