"""The folders of checkpoints in a directory, as docs/files.md describes them."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.storage.checkpoints import layer_part


def layer_directory(checkpoints: Path, step: int, layer: int) -> Path:
    return checkpoints / layer_part(step, layer)


def step_directory(checkpoints: Path, step: int) -> Path:
    return layer_directory(checkpoints, step, 0).parent
