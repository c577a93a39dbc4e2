"""The checkpoints of a run: which are complete, and whether their files are as they were written.

docs/files.md describes the files. This module reads and writes all but the tensors, so it needs no torch. The place of
checkpoints is a directory, given by its path, or another `Storage`.

Seals of the files of a checkpoint: their checksums, and of which run, step and layer each part is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import xxhash

from chameleon_ft.errors import CheckpointError, DamagedCheckpointError, StoreError
from chameleon_ft.job_record import JobRecord
from chameleon_ft.storage.files import replace_file
from chameleon_ft.storage.stores import ARCHIVE, Directory, Storage, storage_of

CHECKSUMS: Final = "checksums.json"
"""Name of the file with the checksums of a part."""
_CHUNK_BYTES: Final = 1 << 22


def seal_layer(directory: Path, tensors: Mapping[str, Sequence[int]], *, part: str = "", run: str = "") -> str:
    """Write the checksums of a layer's files, which are all in its folder, and of its `tensors`, by their keys.

    Returns a digest of the tensors and of where they belong: the `part`, a name with the step and the layer, of `run`.
    """
    files = {path.name: [path.stat().st_size, _checksum_of(path)] for path in sorted(directory.iterdir())}
    values = {key: list(each) for key, each in tensors.items()}
    content = {"run": run, "part": part, "files": files, "tensors": values}
    replace_file(directory / CHECKSUMS, sealed(content), mode=0o644, is_synced=True)
    return _seal_of(content)


def require_own(checksums: Mapping[str, Any], part: str, mark: Mapping[str, Any], *, place: str) -> None:
    """Raise DamagedCheckpointError if a part is sound, but of another layer, checkpoint or run."""
    found, seals = checksums.get("part") or part, mark.get("seals", {})
    if found != part:
        raise DamagedCheckpointError(f"{place} is of another checkpoint or layer: it was written as {found}")
    if "run" in mark and checksums.get("run", mark["run"]) != mark["run"]:
        raise DamagedCheckpointError(f"{place} is of another run")
    if seals and seals.get(part.partition("/")[2]) != _seal_of(checksums):
        raise DamagedCheckpointError(f"{place} is not the one that this checkpoint was completed with")


def checked_files(
    directory: Path, *, part: str = "", mark: Mapping[str, Any] = MappingProxyType({}), place: str = ""
) -> tuple[dict[str, list[int]], Path | None]:
    """Read all files of a layer; return the checksums of its tensors, and the first file that is damaged, if any.

    Args:
        part: the name of the layer, with the step.
        mark: The mark of its checkpoint; see `read_mark`.
        place: where it is kept, for messages.

    Raises:
        DamagedCheckpointError: the checksums themselves are damaged or of another layer, or a file is missing.
        OSError: a file cannot be read.
    """
    checksums = unsealed(Directory(directory), CHECKSUMS)
    require_own(checksums, part or checksums.get("part", ""), mark, place=place)
    for name, expected in checksums["files"].items():
        path = directory / name
        if not path.exists():
            raise DamagedCheckpointError(f"{path} is missing")
        if [path.stat().st_size, _checksum_of(path)] != expected:
            return checksums["tensors"], path
    return checksums["tensors"], None


def _seal_of(checksums: Mapping[str, Any]) -> str:
    # Not of the files: two holders write equal tensors, but maybe not equal files.
    own = {key: checksums.get(key, "") for key in ("run", "part", "tensors")}
    return xxhash.xxh3_64_hexdigest(json.dumps(own, sort_keys=True).encode())


def sealed(content: Mapping[str, Any]) -> str:
    """Return a JSON object with its own checksum."""
    return json.dumps({**content, "checksum": xxhash.xxh3_64_intdigest(json.dumps(content).encode())}) + "\n"


def unsealed(storage: Storage, name: str) -> dict[str, Any]:
    """Read a sealed file. Raises DamagedCheckpointError if a byte of it has changed, or OSError."""
    text = storage.read(name)
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        content: dict[str, Any] = json.loads(text)
        del content["checksum"]
        if text == sealed(content).encode():
            return content
    raise DamagedCheckpointError(f"{storage.place(name)} is not as it was written")


def _checksum_of(path: Path) -> int:
    """Return the XXH3 checksum of a file."""
    checksum = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.intdigest()


_COMPLETE: Final = "complete.json"
_DAMAGED: Final = "damaged.json"
_PINNED: Final = "pinned.json"
_SUPERSEDED: Final = "superseded.json"
_EVALUATION: Final = "evaluation.json"
BEST: Final = "best"
"""Names the step of the best checkpoint."""
_STEP: Final = "step-"
_STEP_DIGITS: Final = 8


def layer_part(step: int, layer: int) -> str:
    """Return the name of one layer of the checkpoint from which training resumes at `step`."""
    return f"{_folder(step)}/layer-{layer:04d}"


def slice_part(step: int, layer: int, start: int, stop: int) -> str:
    """Return the name of the optimizer's state of a slice of a layer, between two units; see `plan.shards`."""
    return f"{_folder(step)}/layer-{layer:04d}.{start:05d}-{stop:05d}"


def read_mark(checkpoints: Path | Storage, step: int) -> dict[str, Any]:
    """Return the content of the mark of a checkpoint; nothing if it is not marked.

    Raises DamagedCheckpointError, or OSError.
    """
    try:
        return _mark_of(storage_of(checkpoints), step)
    except FileNotFoundError:
        return {}


def mark_complete(
    checkpoints: Path | Storage,
    step: int,
    *,
    model: str,
    num_layers: int,
    slices: Collection[tuple[int, int, int]] = (),
    seals: Mapping[str, str] = MappingProxyType({}),
    job: JobRecord | None = None,
) -> None:
    """Mark a checkpoint whose layers and slices are all stored. All of it is safe when this returns.

    Only marked checkpoints are read.

    Args:
        model: the fingerprint of its model.
        seals: what `seal_layer` returned for each layer and slice, by the names of their parts.
        job: by which it was written.
    """
    storage = storage_of(checkpoints)
    content: dict[str, Any] = {"step": step, "model": model, "layers": num_layers}
    if (run := storage.run_of(step)) is not None:
        content["run"] = run
    if slices:
        content["slices"] = [list(each) for each in sorted(slices)]
    if seals:
        content["seals"] = dict(sorted(seals.items()))
    if job is not None:
        content["job"] = job.to_json()
    _mark(storage, step, content)


def _mark(storage: Storage, step: int, content: dict[str, Any]) -> None:
    folder = _folder(step)
    names = storage.names(folder)
    storage.sync(*(f"{folder}/{name}" for name in names if name.startswith("layer-")), folder)
    if any(name.endswith(ARCHIVE) for name in names):
        sizes = sorted(storage.sizes(folder).items())
        content["archives"] = {name: size for name, size in sizes if name.endswith(ARCHIVE)}
    # An earlier checkpoint of this step may have been damaged.
    storage.remove(f"{folder}/{_DAMAGED}")
    storage.remove(f"{folder}/{_SUPERSEDED}")
    storage.remove(f"{folder}/{_EVALUATION}")
    # Last, because the checkpoint is complete from then on.
    storage.write(f"{folder}/{_COMPLETE}", sealed(content))
    storage.sync(folder, "")


def mark_damaged(checkpoints: Path | Storage, step: int) -> None:
    """Take the mark of a complete checkpoint away, so that it is neither read nor counted any more.

    That is safe when this returns.
    """
    storage_of(checkpoints).rename(f"{_folder(step)}/{_COMPLETE}", f"{_folder(step)}/{_DAMAGED}")


def pin_checkpoint(checkpoints: Path | Storage, step: int, *, is_pinned: bool = True) -> None:
    """Keep a complete checkpoint until it is unpinned. Raises CheckpointError that names those that there are."""
    storage = storage_of(checkpoints)
    require_complete(storage, step)
    if is_pinned:
        storage.write(f"{_folder(step)}/{_PINNED}", "{}\n")
    else:
        storage.remove(f"{_folder(step)}/{_PINNED}")


def pinned_checkpoints(checkpoints: Path | Storage) -> list[int]:
    """Return the steps of the checkpoints that are pinned, ascending."""
    storage = storage_of(checkpoints)
    return [step for step in _steps(storage) if storage.exists(f"{_folder(step)}/{_PINNED}")]


def note_evaluation(checkpoints: Path | Storage, step: int, values: Mapping[str, float]) -> None:
    """Keep the results of an evaluation with the complete checkpoint of its state."""
    storage_of(checkpoints).write(f"{_folder(step)}/{_EVALUATION}", sealed(dict(values)))


def sign_and_name(criterion: str) -> tuple[int, str]:
    """Return 1 if the least result is the best, or -1 if the greatest is, and its name; see `checkpoint.keep_best`."""
    direction, _, name = criterion.rpartition(" ")
    return -1 if direction == "max" else 1, name


def best_checkpoint(checkpoints: Path | Storage, criterion: str) -> int | None:
    """Return the step of the best complete checkpoint, the earliest if several are; None if none was evaluated.

    Args:
        criterion: the name of a result of evaluations, maybe after "min" or "max"; see `checkpoint.keep_best`.
    """
    storage = storage_of(checkpoints)
    sign, name = sign_and_name(criterion)
    found = dict[int, float]()
    for step in complete_checkpoints(storage):
        # One that cannot be read counts as not evaluated.
        with contextlib.suppress(FileNotFoundError, DamagedCheckpointError, KeyError):
            found[step] = unsealed(storage, f"{_folder(step)}/{_EVALUATION}")[name]
    return min(found, key=lambda step: (sign * found[step], step), default=None)


def named_step(checkpoints: Path | Storage, named: int | str | None, *, criterion: str) -> int | None:
    """Return the step of the checkpoint that a user names, which may be `BEST`; None names none.

    Raises CheckpointError if none is the best.
    """
    if named != BEST:
        return None if named is None else int(named)
    if (step := best_checkpoint(checkpoints, criterion or "loss")) is None:
        raise CheckpointError(
            f"{storage_of(checkpoints).place()}: no complete checkpoint is of an evaluated state; set "
            "checkpoint.keep_best, or name a step"
        )
    return step


def require_complete(checkpoints: Path | Storage, step: int) -> None:
    """Raise CheckpointError if there is no complete checkpoint of a step, or it is visibly damaged."""
    storage = storage_of(checkpoints)
    complete = complete_checkpoints(storage)
    if step not in complete:
        found = f"those of {', '.join(map(str, complete))}" if complete else "none"
        raise CheckpointError(f"{storage.place()}: has no complete checkpoint of step {step}, but {found}")
    if (damage := damage_of(storage, step)) is not None:
        raise CheckpointError(f"the checkpoint of step {step} cannot be used: {damage}")


def supersede_checkpoints(checkpoints: Path | Storage, *, after: int) -> tuple[int, ...]:
    """Take the marks of all complete checkpoints of later steps away, and return the steps; see `restore_checkpoints`.

    Training returns to an earlier one, and writes others of these steps.
    """
    storage = storage_of(checkpoints)
    later = tuple(step for step in complete_checkpoints(storage) if step > after)
    for step in later:
        storage.rename(f"{_folder(step)}/{_COMPLETE}", f"{_folder(step)}/{_SUPERSEDED}")
    return later


def restore_checkpoints(checkpoints: Path | Storage, steps: Collection[int]) -> None:
    """Give superseded checkpoints their marks back: nothing was trained from the earlier one."""
    storage = storage_of(checkpoints)
    for step in steps:
        storage.rename(f"{_folder(step)}/{_SUPERSEDED}", f"{_folder(step)}/{_COMPLETE}")


def is_complete(checkpoints: Path | Storage, step: int) -> bool:
    """Return whether there is a complete checkpoint of a step."""
    return storage_of(checkpoints).exists(f"{_folder(step)}/{_COMPLETE}")


def complete_checkpoints(checkpoints: Path | Storage) -> list[int]:
    """Return the steps of the complete checkpoints, ascending."""
    storage = storage_of(checkpoints)
    return [step for step in _steps(storage) if is_complete(storage, step)]


def incomplete_checkpoints(checkpoints: Path | Storage) -> list[int]:
    """Return the steps of checkpoints that are neither complete nor marked as damaged, ascending."""
    storage = storage_of(checkpoints)
    return [
        step
        for step in _steps(storage)
        if not any(storage.exists(f"{_folder(step)}/{mark}") for mark in (_COMPLETE, _DAMAGED, _SUPERSEDED))
    ]


def sound_checkpoint(checkpoints: Path | Storage) -> tuple[int | None, dict[int, str]]:
    """Return the step of the newest complete checkpoint without visible damage, and the damage of newer ones.

    Raises StoreError, or CheckpointError if the directory cannot be read.
    """
    damages: dict[int, str] = {}
    try:
        complete = complete_checkpoints(checkpoints)
    except StoreError:
        raise
    except OSError as error:
        raise CheckpointError(f"{storage_of(checkpoints).place()}: cannot be read: {error.strerror}") from None
    for step in reversed(complete):
        damage = damage_of(checkpoints, step)
        if damage is None:
            return step, damages
        damages[step] = damage
    return None, damages


def damage_of(checkpoints: Path | Storage, step: int) -> str | None:
    """Return why `require_sound` rejects a complete checkpoint; None if it does not.

    Raises StoreError if an object store does not answer, or refuses: then nothing is known.
    """
    try:
        require_sound(checkpoints, step)
    except StoreError:
        raise
    except (DamagedCheckpointError, OSError) as error:
        return str(error)
    return None


def require_sound(checkpoints: Path | Storage, step: int) -> None:
    """Look for damage of a complete checkpoint that shows without reading its tensors.

    Raises:
        DamagedCheckpointError: a file is missing, of another size, or describes others and is not as it was written.
        OSError: a file cannot be read here, and maybe elsewhere, or later.
    """
    storage, folder = storage_of(checkpoints), _folder(step)
    try:
        found, expected = storage.sizes(folder), _sizes_of_files(storage, step)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{error.filename} is missing") from None
    for name, num_bytes in expected.items():
        if name not in found:
            raise DamagedCheckpointError(f"{storage.place(f'{folder}/{name}')} is missing")
        if found[name] != num_bytes:
            place = storage.place(f"{folder}/{name}")
            raise DamagedCheckpointError(f"{place} has {found[name]:,} bytes instead of {num_bytes:,}")


def _sizes_of_files(storage: Storage, step: int) -> dict[str, int]:
    """Return the bytes that the files of a complete checkpoint had, by their names in its folder."""
    mark, folder = _mark_of(storage, step), _folder(step)
    if "archives" in mark:
        return dict(mark["archives"])
    sizes = {}
    for part in _parts_of(mark, step):
        file = f"{part}/{CHECKSUMS}"
        checksums = unsealed(storage, file)
        require_own(checksums, part, mark, place=storage.place(file))
        for name, (num_bytes, _) in checksums["files"].items():
            sizes[f"{part.removeprefix(f'{folder}/')}/{name}"] = num_bytes
    return sizes


def _parts_of(mark: Mapping[str, Any], step: int) -> list[str]:
    parts = [layer_part(step, layer) for layer in range(mark["layers"])]
    return parts + [slice_part(step, *place) for place in mark.get("slices", ())]


def prune_checkpoints(
    checkpoints: Path | Storage,
    *,
    keep: int,
    every: int = 0,
    best: str = "",
    agreed: int | None = None,
    base: int | None = None,
) -> set[int]:
    """Remove all checkpoints, complete or not, that are older than the newest `keep` complete ones; return their steps.

    Args:
        every: complete ones whose step this number divides stay, too; 0: none for that.
        best: the best one by this criterion stays, too; empty: none for that. See `best_checkpoint`.
        agreed: the newest complete one up to this step stays, too.
        base: The checkpoint of this step stays, too, as do those that are pinned.
    """
    storage = storage_of(checkpoints)
    complete = complete_checkpoints(storage)
    if len(complete) < keep:
        return set()
    known = None if agreed is None else max((step for step in complete if step <= agreed), default=None)
    first = best_checkpoint(storage, best) if best else None
    kept = {
        known,
        base,
        first,
        *pinned_checkpoints(storage),
        *(step for step in complete if every and step % every == 0),
    }
    old = {step for step in _steps(storage) if step < complete[-keep] and step not in kept}
    for step in sorted(old):
        # The mark first, so that no interrupted removal leaves an incomplete checkpoint that is marked complete.
        storage.remove(f"{_folder(step)}/{_COMPLETE}")
        with contextlib.suppress(OSError):
            storage.remove(_folder(step))
    return old


def link_checkpoint(checkpoints: Path | Storage, step: int, target: Path | Storage) -> None:
    """Give another place a complete checkpoint of this one; files are the same on disk if they can be.

    Raises OSError, or DamagedCheckpointError.
    """
    source, sink = storage_of(checkpoints), storage_of(target)
    if isinstance(source, Directory) and isinstance(sink, Directory):
        whole, draft = source.path / _folder(step), sink.path / _folder(step)
        shutil.copytree(whole, draft, ignore=shutil.ignore_patterns(_COMPLETE, _PINNED), copy_function=_link_or_copy)
        _link_or_copy(whole / _COMPLETE, draft / _COMPLETE)
        return
    mark = _mark_of(source, step)
    for part in _parts_of(mark, step):
        with source.reading(part) as files, sink.writing(part) as draft:
            shutil.copytree(files, draft)
    _mark(sink, step, {key: value for key, value in mark.items() if key != "archives"})


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system, or one that has no links
        shutil.copy2(source, target)


def discard_checkpoint(checkpoints: Path | Storage, step: int) -> None:
    """Remove what was written of a checkpoint, unless it is complete."""
    if not is_complete(checkpoints, step):
        with contextlib.suppress(OSError):  # another rank may still write some of it
            storage_of(checkpoints).remove(_folder(step))


def _folder(step: int) -> str:
    return f"{_STEP}{step:0{_STEP_DIGITS}d}"


def _steps(storage: Storage) -> list[int]:
    """Return the steps of all checkpoints, ascending; other files that a user keeps beside them do not count."""
    names = (name.removeprefix(_STEP) for name in storage.names() if name.startswith(_STEP))
    return sorted(int(name) for name in names if len(name) == _STEP_DIGITS and name.isdecimal())


def _mark_of(storage: Storage, step: int) -> dict[str, Any]:
    name = f"{_folder(step)}/{_COMPLETE}"
    mark, place = unsealed(storage, name), storage.place(name)
    if mark["step"] != step:
        raise DamagedCheckpointError(
            f"{place} was written for step {mark['step']}; if its folder was renamed, name it {_folder(mark['step'])}"
        )
    run = storage.run_of(step)
    if run is not None and mark.get("run", run) != run:
        raise DamagedCheckpointError(f"{place} is of another run")
    return mark
