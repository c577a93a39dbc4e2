"""The run directory on Ray: a copy on nodes that do not share it, their checkpoints, and notes of spare nodes."""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import shutil
import tarfile
from pathlib import Path
from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory, replace_file

_MARK: Final = ".mark"
_SPARES: Final = ".spare-nodes"
_COPY: Final = ".copy"  # in directories that `copy_to` has made


def mark(run: RunDirectory) -> str:
    """Write a mark into a run directory, and return it, by which another node tells that it is this directory."""
    found = secrets.token_hex(8)
    replace_file(run.path / _MARK, found, mode=0o644)
    return found


def sees(run: RunDirectory, expected: str) -> bool:
    """Return whether this node sees the run directory with that mark."""
    with contextlib.suppress(OSError):
        return (run.path / _MARK).read_text(encoding="utf-8") == expected
    return False


def keep_spares(run: RunDirectory, nodes: list[str]) -> None:
    """Note the ids of the nodes that were there when the run began, and that it does not need."""
    replace_file(run.path / _SPARES, json.dumps(nodes), mode=0o644)


def spares(run: RunDirectory) -> set[str]:
    """Return the ids of the nodes that were there when the run began, and that it did not need."""
    with contextlib.suppress(OSError, ValueError):
        return set(json.loads((run.path / _SPARES).read_text(encoding="utf-8")))
    return set()


def packed(run: RunDirectory) -> bytes:
    """Return an archive of the files that ranks read."""
    return _archive(run, [run.config_file, run.start_plan_file, run.profile_file, run.path / "data", run.tls])


def copy_to(run: RunDirectory, archive: bytes) -> None:
    """Make the run directory on this node, from an archive of it.

    Raises:
        ConfigError: the path is taken by something else, or cannot be written.
    """
    copy = run.path / _COPY
    if run.path.exists() and not copy.exists():
        raise ConfigError(f"{run.path}: exists on a node that does not share it with the others; take another one")
    try:
        shutil.rmtree(run.path, ignore_errors=True)
        for directory in (run.path, run.checkpoints, run.logs):
            directory.mkdir(parents=True)
        copy.touch()
        _extract(run.path, archive)
    except OSError as error:
        raise ConfigError(f"{run.path}: cannot be made on a node: {error.strerror or error}") from None


def packed_checkpoints(run: RunDirectory) -> bytes | None:
    """Return an archive of the parts of checkpoints that were written to a copy of the run directory.

    None if this is no copy, or has none.
    """
    if not (run.path / _COPY).exists() or not any(run.checkpoints.iterdir()):
        return None
    return _archive(run, [run.checkpoints])


def keep_checkpoints(run: RunDirectory, archive: bytes) -> None:
    """Add the parts of checkpoints of another node."""
    _extract(run.path, archive)


def _archive(run: RunDirectory, paths: list[Path]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in paths:
            if path.exists():
                archive.add(path, arcname=path.relative_to(run.path))
    return content.getvalue()


def _extract(directory: Path, content: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(directory, filter="data")
