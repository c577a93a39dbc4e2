"""Writing and reading the layers of a checkpoint, with torch.distributed.checkpoint.

A checkpoint has a folder for each layer, written by one of the layer's holders alone. No rank waits for another, a
failure spoils only the unfinished layers of the lost rank, and any other placement can read the layers it needs.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from chameleon_ft.control.wire.messages import CheckpointSaved
from chameleon_ft.errors import CheckpointError
from chameleon_ft.observe import complete_checkpoints, layer_directory
from chameleon_ft.runtime.execution.layers import LayerState

__all__ = ["CheckpointWriter", "read_layer"]

_POLL_S = 0.005


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one after the other, while training goes on.

    Args:
        checkpoints: the run's folder of checkpoints.
        saved: called in that thread when a checkpoint's layers are written or could not be.
        before_write: called in that thread before a checkpoint is written.
    """

    def __init__(
        self, checkpoints: Path, *, saved: Callable[[CheckpointSaved], None], before_write: Callable[[int], None]
    ) -> None:
        self._checkpoints = checkpoints
        self._saved = saved
        self._before_write = before_write
        self._jobs: queue.Queue[tuple[int, int, Mapping[int, LayerState], float]] = queue.Queue()
        threading.Thread(target=self._work, name="checkpoint", daemon=True).start()

    def submit(self, generation: int, step: int, layers: Mapping[int, LayerState], *, copy_s: float) -> None:
        """Write these layers, as they are in `generation`, as part of the checkpoint that resumes at `step`.

        The layers must not change afterwards. `copy_s` is the time in seconds that their copy took, for the report.
        """
        self._jobs.put((generation, step, layers, copy_s))

    @property
    def is_busy(self) -> bool:
        """Whether a submitted checkpoint is not written yet."""
        return self._jobs.unfinished_tasks > 0

    def join(self, *, unless: Callable[[], bool]) -> bool:
        """Wait until everything submitted is written and return True, or False as soon as `unless` is true."""
        while self.is_busy:
            if unless():
                return False
            time.sleep(_POLL_S)
        return True

    def _work(self) -> None:
        while True:
            generation, step, layers, copy_s = self._jobs.get()
            started, error = time.perf_counter(), None
            try:
                self._before_write(step)
                # After a failure workers may repeat this step. A complete checkpoint never changes.
                if step not in complete_checkpoints(self._checkpoints):
                    for layer, state in layers.items():
                        with _single_process():
                            save(
                                dict(state), checkpoint_id=layer_directory(self._checkpoints, step, layer), no_dist=True
                            )
            except (Exception, CheckpointException) as failure:  # noqa: BLE001
                error = _describe(failure)  # disk full, folder gone: training continues, and the user is warned
            self._saved(
                CheckpointSaved(
                    generation=generation,
                    step=step,
                    layers=tuple(layers),
                    copy_s=copy_s,
                    write_s=time.perf_counter() - started,
                    error=error,
                )
            )
            self._jobs.task_done()


def read_layer(checkpoints: Path, step: int, layer: int) -> dict[str, Any]:
    """Read a layer's state, as `HeldLayers.snapshot` gave it. Raises CheckpointError."""
    path = layer_directory(checkpoints, step, layer)
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for key, entry in stored.items()
        }
        with _single_process():
            load(state, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"layer {layer} cannot be read from {path}: {_describe(error)}; "
            "remove that checkpoint's folder to fall back to an older one"
        ) from error
    return state


def _describe(error: BaseException) -> str:
    # Torch's error is not an Exception; it holds the errors of all participating processes. Here that is one.
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


@contextmanager
def _single_process() -> Iterator[None]:
    """Silence torch's warning about the missing process group, which is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
