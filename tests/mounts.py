"""File systems of a few megabytes, which tests can fill and freeze."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path, *, megabytes: int) -> Iterator[Path]:
    """Mount a file system in memory; skips the test if that is not permitted."""
    directory.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory))
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def freezable_disk(directory: Path, *, megabytes: int) -> Iterator[Path]:
    """Mount an ext4 file system from a file; skips the test if that is not permitted."""
    image = directory.with_suffix(".image")
    directory.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mkfs.ext4")
    _mount("-o", "loop", str(image), str(directory))
    try:
        yield directory
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(directory)], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def freeze(directory: Path) -> None:
    """Have all writes to a `freezable_disk` wait."""
    subprocess.run(["fsfreeze", "--freeze", str(directory)], check=True)


def thaw(directory: Path) -> None:
    """Have them go on."""
    subprocess.run(["fsfreeze", "--unfreeze", str(directory)], check=True)


def fill(directory: Path, *, leaving: int = 0) -> Path:
    """Write a file until no room is left but for so many bytes; return its path."""
    path = directory / "ballast"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for num_bytes in (1 << 16, 1):
            try:
                while os.write(descriptor, bytes(num_bytes)):
                    pass
            except OSError:
                continue
        os.truncate(descriptor, os.fstat(descriptor).st_size - leaving)
    finally:
        os.close(descriptor)
    return path


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
