"""The marks of checkpoints on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.errors import CheckpointError, DamagedCheckpointError
from chameleon_ft.storage.checkpoints import (
    best_checkpoint,
    complete_checkpoints,
    mark_complete,
    mark_damaged,
    named_step,
    note_evaluation,
    pin_checkpoint,
    pinned_checkpoints,
    prune_checkpoints,
    require_sound,
    restore_checkpoints,
    seal_layer,
    sound_checkpoint,
    supersede_checkpoints,
)
from chameleon_ft.storage.stores import Directory
from tests.golden import refused
from tests.stored import layer_directory, step_directory


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
    with refused(CheckpointError):
        sound_checkpoint(tmp_path / "checkpoints")


def write_checkpoints(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        layer = layer_directory(checkpoints, step, 0)
        layer.mkdir(parents=True)
        (layer / "tensors").write_text("layer 0")
        seal_layer(layer, {})
        mark_complete(checkpoints, step, model="a model", num_layers=1)


def as_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def as_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "spoil", "is_damaged"),
    [
        ("layer-0000/checksums.json", as_a_loop, False),
        ("layer-0000/tensors", as_a_loop, False),
        ("complete.json", as_a_directory, False),
        ("layer-0000/checksums.json", Path.unlink, True),
        ("layer-0000/tensors", Path.unlink, True),
        ("layer-0000", shutil.rmtree, True),
    ],
)
def test_a_file_that_cannot_be_read_here_is_told_from_one_that_is_damaged(
    tmp_path: Path, name: str, spoil: Callable[[Path], object], is_damaged: bool
) -> None:
    write_checkpoints(tmp_path, 2, 4)
    spoil(step_directory(tmp_path, 4) / name)
    with pytest.raises(DamagedCheckpointError if is_damaged else OSError, match=name.rpartition("/")[2]):
        require_sound(tmp_path, 4)
    newest, damages = sound_checkpoint(tmp_path)
    assert (newest, list(damages)) == (2, [4])


def test_a_checkpoint_that_may_not_be_looked_into_is_named_and_an_older_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder belongs to another user; tests may run as one that is let in everywhere."""
    write_checkpoints(tmp_path, 2, 4)

    def closed(method: str) -> Callable[[Path], object]:
        before = getattr(Path, method)

        def call(path: Path) -> object:
            if step_directory(tmp_path, 4) in path.parents:
                raise PermissionError(13, "Permission denied", str(path))
            return before(path)

        return call

    for method in ("exists", "read_bytes"):
        monkeypatch.setattr(Path, method, closed(method))
    assert complete_checkpoints(tmp_path) == [2, 4]
    newest, damages = sound_checkpoint(tmp_path)
    assert newest == 2
    assert damages[4].startswith(f"[Errno 13] Permission denied: '{step_directory(tmp_path, 4)}/")


def test_a_layer_that_may_not_be_listed_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoints(tmp_path, 4)
    scandir, layer = os.scandir, layer_directory(tmp_path, 4, 0)

    def closed(path: Any) -> Any:
        if Path(path) == layer:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(PermissionError):
        require_sound(tmp_path, 4)


def test_a_removal_that_is_interrupted_leaves_no_complete_checkpoint(tmp_path: Path) -> None:
    class Interrupted(Directory):
        def remove(self, name: str) -> None:
            if name == "step-00000002":
                raise OSError
            super().remove(name)

    write_checkpoints(tmp_path, 2, 4, 6)
    prune_checkpoints(Interrupted(tmp_path), keep=2)
    assert complete_checkpoints(tmp_path) == [4, 6]


def test_a_pinned_checkpoint_is_kept_until_it_is_unpinned(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 2, 4, 6, 8)
    pin_checkpoint(tmp_path, 4)
    assert pinned_checkpoints(tmp_path) == [4]
    assert prune_checkpoints(tmp_path, keep=1) == {2, 6}
    assert complete_checkpoints(tmp_path) == [4, 8]
    with refused(CheckpointError):
        pin_checkpoint(tmp_path, 6)
    pin_checkpoint(tmp_path, 4, is_pinned=False)
    assert prune_checkpoints(tmp_path, keep=1) == {4}


def test_every_kth_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 2, 4, 6, 8, 10)
    assert prune_checkpoints(tmp_path, keep=1, every=4) == {2, 6}
    assert complete_checkpoints(tmp_path) == [4, 8, 10]


def test_superseded_checkpoints_are_not_read_and_come_back_if_nothing_was_trained(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 2, 4, 6)
    assert supersede_checkpoints(tmp_path, after=2) == (4, 6)
    assert sound_checkpoint(tmp_path) == (2, {})
    restore_checkpoints(tmp_path, [4, 6])
    assert complete_checkpoints(tmp_path) == [2, 4, 6]
    supersede_checkpoints(tmp_path, after=4)
    mark_complete(tmp_path, 6, model="a model", num_layers=0)
    assert supersede_checkpoints(tmp_path, after=6) == ()
    assert complete_checkpoints(tmp_path) == [2, 4, 6]


def test_the_best_checkpoint_stays_and_is_that_of_the_checkpoints_that_there_are(tmp_path: Path) -> None:
    losses = {2: 3.0, 4: 1.0, 6: 1.0, 8: 2.0, 10: 4.0}
    with pytest.raises(CheckpointError):
        named_step(tmp_path, "best", criterion="")
    for step, loss in losses.items():
        write_checkpoints(tmp_path, step)
        note_evaluation(tmp_path, step, {"loss": loss, "accuracy": -loss})
    for criterion, best in (("", 4), ("loss", 4), ("min loss", 4), ("max loss", 10), ("max accuracy", 4)):
        assert named_step(tmp_path, "best", criterion=criterion) == best
    assert best_checkpoint(tmp_path, "recall") is None
    assert prune_checkpoints(tmp_path, keep=1, best="loss") == {2, 6, 8}
    # After a return to step 4, a later checkpoint is written again.
    assert supersede_checkpoints(tmp_path, after=4) == (10,)
    note_evaluation(tmp_path, 4, {"loss": 9.0})
    mark_complete(tmp_path, 10, model="a model", num_layers=0)
    assert best_checkpoint(tmp_path, "loss") == 4, "the state of step 10 is another, which was not evaluated"
    note_evaluation(tmp_path, 10, {"loss": 8.0})
    assert best_checkpoint(tmp_path, "loss") == 10
