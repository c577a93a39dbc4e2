"""Writing and reading the layers of a checkpoint, with torch.distributed.checkpoint.

A checkpoint is a folder for each layer, written by one of the layer's holders alone. No rank waits for another one, a
failure spoils only what the lost rank had not finished, and any other placement can read what it needs.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from chameleon_ft.errors import CheckpointError
from chameleon_ft.observe import layer_directory
from chameleon_ft.runtime.layers import LayerState

__all__ = ["CheckpointWriter", "read_layer"]


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one after the other, while training goes on.

    Args:
        checkpoints: the run's folder of checkpoints.
        saved: called in that thread with (step, layers, error) when a checkpoint's layers are written or could not be.
        before_write: called in that thread before a checkpoint is written.
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        saved: Callable[[int, tuple[int, ...], str | None], None],
        before_write: Callable[[int], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._saved = saved
        self._before_write = before_write
        self._jobs: queue.Queue[tuple[int, Mapping[int, LayerState]]] = queue.Queue()
        threading.Thread(target=self._work, name="checkpoint", daemon=True).start()

    def submit(self, step: int, layers: Mapping[int, LayerState]) -> None:
        """Write these layers as part of the checkpoint that resumes at `step`; the state must not be changed after."""
        self._jobs.put((step, layers))

    def join(self) -> None:
        """Wait until everything submitted is written."""
        self._jobs.join()

    def _work(self) -> None:
        while True:
            step, layers = self._jobs.get()
            error = None
            try:
                self._before_write(step)
                for layer, state in layers.items():
                    _write_layer(layer_directory(self._checkpoints, step, layer), state)
            except Exception as failure:  # noqa: BLE001  disk full, folder gone: training goes on, and the user is told
                error = f"{type(failure).__name__}: {failure}"
            self._saved(step, tuple(layers), error)
            self._jobs.task_done()


def read_layer(checkpoints: Path, step: int, layer: int) -> dict[str, Any]:
    """Read what `HeldLayers.snapshot` gave. Raises CheckpointError."""
    path = layer_directory(checkpoints, step, layer)
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for key, entry in stored.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no process group is used is what is meant
            load(state, checkpoint_id=path, no_dist=True)
    except Exception as error:
        raise CheckpointError(
            f"layer {layer} cannot be read from {path}: {type(error).__name__}: {error}; "
            "remove that checkpoint's folder to fall back to an older one"
        ) from error
    return state


def _write_layer(path: Path, state: LayerState) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(dict(state), checkpoint_id=path, no_dist=True)
