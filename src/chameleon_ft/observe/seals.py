"""Seals of the files of a checkpoint: their checksums, and of which run, step and layer each part is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import xxhash

from chameleon_ft.errors import DamagedCheckpointError
from chameleon_ft.observe.files import replace_file
from chameleon_ft.observe.storage import Directory, Storage

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
        mark: of its checkpoint; see `read_mark`.
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
