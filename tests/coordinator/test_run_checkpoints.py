"""The checkpoints of a run as its coordinator uses them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from chameleon_ft.coordinator.run_files import RunCheckpoints
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.stores import Directory, Storage
from tests.golden import refused


class Afar:
    """An object store, which keeps its objects in a directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)


def test_an_error_in_the_code_of_a_store_is_raised(tmp_path: Path) -> None:
    def fail() -> None:
        raise TypeError("a mistake")

    with FileQueue() as files:
        checkpoints = RunCheckpoints(
            cast(Storage, Afar(Directory(tmp_path))),
            files,
            model="a model",
            num_layers=1,
            keep=2,
            base=None,
            not_marked=lambda step, reason: None,
            copy_records=fail,
            takes_over=False,
        )
        checkpoints.watch()
        checkpoints.complete(5, agreed=None)
        assert asyncio.run(checkpoints.why_unmarked(5, 30.0)) is None, "the store has answered"
        with refused(TypeError):
            checkpoints.watch()


def test_a_checkpoint_that_cannot_be_marked_is_reported(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    with FileQueue() as files:
        checkpoints = RunCheckpoints(
            Directory(tmp_path),
            files,
            model="a model",
            num_layers=1,
            keep=2,
            base=None,
            not_marked=lambda step, reason: told.append((step, reason)),
            copy_records=lambda: None,
            takes_over=False,
        )
        checkpoints.complete(5, agreed=None)
        why = asyncio.run(checkpoints.why_unmarked(5, 1.0))
        assert why is not None
        assert "No such file or directory" in why
        assert told == [(5, why)]
        assert checkpoints.steps() == []
