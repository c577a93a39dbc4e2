"""Putting checkpoints together from the parts that ranks write."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.control.messages import CheckpointSaved
from chameleon_ft.observe import complete_checkpoints, mark_complete, prune_checkpoints

__all__ = ["CheckpointCollector"]


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
        self._saved: dict[int, set[int]] = {}
        self._first_generation = 0

    def add(self, part: CheckpointSaved) -> bool:
        """Take note of a part that was written; return whether it completes its checkpoint."""
        if part.generation < self._first_generation:
            return False
        saved = self._saved.setdefault(part.step, set())
        saved.update(part.layers)
        if len(saved) < self._num_layers:
            return False
        del self._saved[part.step]
        mark_complete(self._directory, part.step, model=self._model)
        return True

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
