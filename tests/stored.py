"""The files of a run, as docs/files.md describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chameleon_ft.storage.checkpoints import layer_part
from chameleon_ft.storage.files import RunDirectory, read_lines


def event_lines(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the events of a run as JSON values."""
    return list(read_lines(run.events_file))


def layer_directory(checkpoints: Path, step: int, layer: int) -> Path:
    return checkpoints / layer_part(step, layer)


def step_directory(checkpoints: Path, step: int) -> Path:
    return layer_directory(checkpoints, step, 0).parent
