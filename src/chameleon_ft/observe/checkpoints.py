"""The checkpoints of a run directory: which are complete, and whether their files are as they were written.

docs/files.md describes the files. This module reads and writes all but the tensors, so it needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from chameleon_ft.errors import DamagedCheckpointError
from chameleon_ft.observe.files import replace_file

__all__ = [
    "checked_files",
    "checkpoint_model",
    "complete_checkpoints",
    "damage_of",
    "discard_checkpoint",
    "has_checksums",
    "incomplete_checkpoints",
    "layer_directory",
    "link_checkpoint",
    "mark_complete",
    "mark_damaged",
    "prune_checkpoints",
    "seal_layer",
    "slice_directory",
    "slices_of",
    "sound_checkpoint",
    "step_directory",
]

_COMPLETE: Final = "complete.json"
_DAMAGED: Final = "damaged.json"
_CHECKSUMS: Final = "checksums.json"
_STEP: Final = "step-"
_STEP_DIGITS: Final = 8
_CHUNK_BYTES: Final = 1 << 22
_WITHOUT_CHECKSUMS: Final = {"step", "model"}
"""Keys of `complete.json` in a checkpoint of an earlier version, which has no checksums."""


def step_directory(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint from which training resumes at `step`."""
    return checkpoints / f"{_STEP}{step:0{_STEP_DIGITS}d}"


def layer_directory(checkpoints: Path, step: int, layer: int) -> Path:
    """Return the folder of one layer of a checkpoint."""
    return step_directory(checkpoints, step) / f"layer-{layer:04d}"


def slice_directory(checkpoints: Path, step: int, layer: int, start: int, stop: int) -> Path:
    """Return the folder of the optimizer's state of a slice of a layer, between two units; see `plan.shards`."""
    return step_directory(checkpoints, step) / f"layer-{layer:04d}.{start:05d}-{stop:05d}"


def slices_of(checkpoints: Path, step: int) -> list[tuple[int, int, int]]:
    """Return (layer, first unit, unit after the last) of the slices of a checkpoint; none if it is not marked.

    Raises DamagedCheckpointError, or OSError.
    """
    try:
        return [(layer, start, stop) for layer, start, stop in _mark_of(checkpoints, step).get("slices", ())]
    except FileNotFoundError:
        return []


def mark_complete(
    checkpoints: Path, step: int, *, model: str, num_layers: int, slices: Collection[tuple[int, int, int]] = ()
) -> None:
    """Mark a checkpoint whose layers and slices are all on disk; `model` is the fingerprint of its model.

    Only marked checkpoints are read. All of it has reached the disk when this returns.
    """
    directory = step_directory(checkpoints, step)
    for folder in (*directory.glob("layer-*"), directory):
        _sync(folder)
    content: dict[str, Any] = {"step": step, "model": model, "layers": num_layers}
    if slices:
        content["slices"] = [list(each) for each in sorted(slices)]
    _seal(directory / _COMPLETE, content)
    (directory / _DAMAGED).unlink(missing_ok=True)  # of an earlier checkpoint of this step
    for folder in (directory, checkpoints):
        _sync(folder)


def mark_damaged(checkpoints: Path, step: int) -> None:
    """Take the mark of a complete checkpoint away, so that it is neither read nor counted any more.

    That has reached the disk when this returns.
    """
    directory = step_directory(checkpoints, step)
    (directory / _COMPLETE).replace(directory / _DAMAGED)
    _sync(directory)


def checkpoint_model(checkpoints: Path, step: int) -> str:
    """Return the fingerprint of the model of a complete checkpoint. Raises DamagedCheckpointError, or OSError."""
    return str(_mark_of(checkpoints, step)["model"])


def has_checksums(checkpoints: Path, step: int) -> bool:
    """Return whether a complete checkpoint has checksums, unlike those of earlier versions.

    Raises DamagedCheckpointError, or OSError.
    """
    return _mark_of(checkpoints, step).keys() > _WITHOUT_CHECKSUMS


def complete_checkpoints(checkpoints: Path) -> list[int]:
    """Return the steps of the complete checkpoints, ascending."""
    return sorted(step for directory, step in _step_directories(checkpoints) if (directory / _COMPLETE).exists())


def incomplete_checkpoints(checkpoints: Path) -> list[int]:
    """Return the steps of checkpoints that are neither complete nor marked as damaged, ascending."""
    marks = (_COMPLETE, _DAMAGED)
    return sorted(
        step
        for directory, step in _step_directories(checkpoints)
        if not any((directory / mark).exists() for mark in marks)
    )


def sound_checkpoint(checkpoints: Path) -> tuple[int | None, dict[int, str]]:
    """Return the step of the newest complete checkpoint without visible damage, and the damage of newer ones."""
    damages: dict[int, str] = {}
    for step in reversed(complete_checkpoints(checkpoints)):
        damage = damage_of(checkpoints, step)
        if damage is None:
            return step, damages
        damages[step] = damage
    return None, damages


def damage_of(checkpoints: Path, step: int) -> str | None:
    """Return the damage of a complete checkpoint that shows without reading its tensors; None if there is none.

    These are files that are missing, of another size, or that describe others and are not as they were written.
    """
    try:
        mark = _mark_of(checkpoints, step)
        parts = [layer_directory(checkpoints, step, layer) for layer in range(mark.get("layers", 0))]
        parts += [slice_directory(checkpoints, step, *place) for place in mark.get("slices", ())]
        for directory in parts:
            for name, (num_bytes, _) in _checksums_of(directory)["files"].items():
                if (found := (directory / name).stat().st_size) != num_bytes:
                    return f"{directory / name} has {found:,} bytes instead of {num_bytes:,}"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (DamagedCheckpointError, OSError) as error:
        return str(error)
    return None


def seal_layer(directory: Path, tensors: Mapping[str, Sequence[int]]) -> None:
    """Write the checksums of a layer's files, which are all in its folder, and of its `tensors`, by their keys."""
    files = {path.name: [path.stat().st_size, _checksum_of(path)] for path in sorted(directory.iterdir())}
    _seal(directory / _CHECKSUMS, {"files": files, "tensors": {key: list(each) for key, each in tensors.items()}})


def checked_files(directory: Path) -> tuple[dict[str, list[int]], Path | None]:
    """Read all files of a layer; return the checksums of its tensors, and the first file that is damaged, if any.

    Raises:
        DamagedCheckpointError: the checksums themselves are damaged, or a file is missing.
        OSError: a file cannot be read.
    """
    checksums = _checksums_of(directory)
    for name, expected in checksums["files"].items():
        path = directory / name
        if not path.exists():
            raise DamagedCheckpointError(f"{path} is missing")
        if [path.stat().st_size, _checksum_of(path)] != expected:
            return checksums["tensors"], path
    return checksums["tensors"], None


def prune_checkpoints(checkpoints: Path, *, keep: int, agreed: int | None = None, base: int | None = None) -> None:
    """Remove all checkpoints, complete or not, that are older than the newest `keep` complete ones.

    Args:
        agreed: the newest complete one up to this step stays, too.
        base: that of this step stays, too.
    """
    complete = complete_checkpoints(checkpoints)
    if len(complete) < keep:
        return
    known = None if agreed is None else max((step for step in complete if step <= agreed), default=None)
    for directory, step in _step_directories(checkpoints):
        if step < complete[-keep] and step not in (known, base):
            # The mark first, so that no interrupted removal leaves an incomplete checkpoint that is marked complete.
            (directory / _COMPLETE).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)


def link_checkpoint(checkpoints: Path, step: int, target: Path) -> None:
    """Give another folder of checkpoints a complete one of these, whose files are the same on disk if they can be.

    Raises OSError.
    """
    source, draft = step_directory(checkpoints, step), step_directory(target, step)
    ignore = shutil.ignore_patterns(_COMPLETE)
    shutil.copytree(source, draft, ignore=ignore, copy_function=_link_or_copy)
    _link_or_copy(source / _COMPLETE, draft / _COMPLETE)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system, or one that has no links
        shutil.copy2(source, target)


def discard_checkpoint(checkpoints: Path, step: int) -> None:
    """Remove what was written of a checkpoint, unless it is complete."""
    directory = step_directory(checkpoints, step)
    if not (directory / _COMPLETE).exists():
        shutil.rmtree(directory, ignore_errors=True)  # another rank may still write some of it


def _step_directories(checkpoints: Path) -> list[tuple[Path, int]]:
    """Return the folders of checkpoints with their steps, and no other files that a user keeps beside them."""
    names = ((entry, entry.name.removeprefix(_STEP)) for entry in checkpoints.glob(f"{_STEP}*"))
    return [(entry, int(name)) for entry, name in names if len(name) == _STEP_DIGITS and name.isdecimal()]


def _mark_of(checkpoints: Path, step: int) -> dict[str, Any]:
    path = step_directory(checkpoints, step) / _COMPLETE
    text = path.read_bytes()
    with contextlib.suppress(ValueError):
        if isinstance(mark := json.loads(text), dict) and mark.keys() == _WITHOUT_CHECKSUMS:
            return mark
    return _unsealed(path)


def _checksums_of(directory: Path) -> dict[str, Any]:
    return _unsealed(directory / _CHECKSUMS)


def _seal(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its own checksum."""
    replace_file(path, _sealed(content), mode=0o644, is_synced=True)


def _sealed(content: Mapping[str, Any]) -> str:
    return json.dumps({**content, "checksum": xxhash.xxh3_64_intdigest(json.dumps(content).encode())}) + "\n"


def _unsealed(path: Path) -> dict[str, Any]:
    """Read what `_seal` wrote. Raises DamagedCheckpointError if a byte of it has changed, or OSError."""
    text = path.read_bytes()
    with contextlib.suppress(ValueError, TypeError, KeyError):
        content: dict[str, Any] = json.loads(text)
        del content["checksum"]
        if text == _sealed(content).encode():
            return content
    raise DamagedCheckpointError(f"{path} is not as it was written")


def _sync(directory: Path) -> None:
    """Have the names of a folder's files reach the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum_of(path: Path) -> int:
    """Return the XXH3 checksum of a file."""
    checksum = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.intdigest()
