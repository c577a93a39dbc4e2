"""Where checkpoints are and which of them are complete. What is in them is torch's business."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

__all__ = ["checkpoint_model", "complete_checkpoints", "layer_directory", "mark_complete", "prune_checkpoints"]

_MARK = "complete.json"
_PREFIX = "step-"
_DIGITS = 8


def step_directory(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint from which training resumes at `step`."""
    return checkpoints / f"{_PREFIX}{step:0{_DIGITS}d}"


def layer_directory(checkpoints: Path, step: int, layer: int) -> Path:
    """Folder of one layer of that checkpoint."""
    return step_directory(checkpoints, step) / f"layer-{layer:04d}"


def mark_complete(checkpoints: Path, step: int, *, model: str) -> None:
    """Say that all layers of a checkpoint are on disk, and of which model they are: `model` is its fingerprint.

    A checkpoint without this mark is never read.
    """
    directory = step_directory(checkpoints, step)
    draft = directory / f".{_MARK}"
    draft.write_text(json.dumps({"step": step, "model": model}) + "\n", encoding="utf-8")
    draft.replace(directory / _MARK)


def checkpoint_model(checkpoints: Path, step: int) -> str:
    """Return the fingerprint of the model that a complete checkpoint is of."""
    return str(json.loads((step_directory(checkpoints, step) / _MARK).read_text(encoding="utf-8"))["model"])


def complete_checkpoints(checkpoints: Path) -> list[int]:
    """Return the steps of the complete checkpoints, ascending."""
    return sorted(step for directory, step in _directories(checkpoints) if (directory / _MARK).exists())


def prune_checkpoints(checkpoints: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and whatever is older than those and incomplete."""
    complete = complete_checkpoints(checkpoints)
    if len(complete) < keep:
        return
    oldest_kept = complete[-keep]
    for directory, step in _directories(checkpoints):
        if step < oldest_kept:
            # Unmarked first: a removal that is cut short must not leave half a checkpoint that looks whole.
            (directory / _MARK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)


def _directories(checkpoints: Path) -> list[tuple[Path, int]]:
    """Return the folders of checkpoints with their steps; whatever else a user keeps beside them is left alone."""
    names = ((entry, entry.name.removeprefix(_PREFIX)) for entry in checkpoints.glob(f"{_PREFIX}*"))
    return [(entry, int(name)) for entry, name in names if len(name) == _DIGITS and name.isdecimal()]
