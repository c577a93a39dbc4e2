"""The marks of checkpoints on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chameleon_ft.errors import CheckpointError
from chameleon_ft.observe import complete_checkpoints, mark_complete, mark_damaged, seal_layer, sound_checkpoint
from chameleon_ft.observe.checkpoints import layer_directory, step_directory


def test_a_mark_has_reached_the_disk_once_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, fsync = 7, os.fsync
    synced: list[tuple[Path, list[str]]] = []

    def recorded(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path, sorted(each.name for each in path.iterdir()) if path.is_dir() else []))
        fsync(descriptor)

    layer = layer_directory(tmp_path, step, 0)
    layer.mkdir(parents=True)
    seal_layer(layer, {})
    monkeypatch.setattr(os, "fsync", recorded)
    directory = step_directory(tmp_path, step)
    mark_complete(tmp_path, step, model="a model", num_layers=1)
    assert (directory, ["complete.json", layer.name]) in synced
    assert synced[-1] == (tmp_path, [directory.name])
    mark_damaged(tmp_path, step)
    assert synced[-1] == (directory, ["damaged.json", layer.name])
    assert complete_checkpoints(tmp_path) == []


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints: cannot be read: Too many levels of symbolic links"):
        sound_checkpoint(tmp_path / "checkpoints")
