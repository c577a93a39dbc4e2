"""Writing and reading the layers of a checkpoint, with torch.distributed.checkpoint.

A checkpoint has a folder for each layer, written by one of the layer's holders alone. No rank waits for another, a
failure spoils only the unfinished layers of the lost rank, and any other placement can read the layers it needs.
Beside the files of a layer are checksums of them and of its tensors, which are checked when the layer is read.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from chameleon_ft.errors import CheckpointError, DamagedCheckpointError
from chameleon_ft.protocol.messages import CheckpointSaved
from chameleon_ft.storage.checkpoints import checked_files, is_complete, layer_part, read_mark, seal_layer, slice_part
from chameleon_ft.storage.stores import Storage, storage_of
from chameleon_ft.worker.execution.layers import LayerState
from chameleon_ft.worker.execution.optimizer import joined_masters
from chameleon_ft.worker.state_transfer.layer_messages import layer_checksums

_Slice = tuple[int, int, int]

_POLL_S = 0.005
_CPU = torch.device("cpu")


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one after the other, while training continues.

    Args:
        checkpoints: The place where the run has its checkpoints.
        saved: It is called in that thread when a checkpoint's layers are written or could not be.
        before_write: It is called in that thread before a checkpoint is written.

    Attributes:
        left_out: The resume step of the checkpoint that this votes against although it is due; 0 if there is none.
        answered: The newest request of the coordinator that a checkpoint was begun for; see `BeginCheckpoint`.
    """

    def __init__(
        self,
        checkpoints: Path | Storage,
        *,
        saved: Callable[[CheckpointSaved], None],
        before_write: Callable[[int], None],
    ) -> None:
        self._checkpoints = storage_of(checkpoints)
        self._saved = saved
        self._before_write = before_write
        self.answered = 0
        self.left_out = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._newest: Future[None] | None = None

    def submit(
        self,
        generation: int,
        step: int,
        layers: Mapping[int, LayerState],
        *,
        copy_s: float,
        slices: Mapping[_Slice, LayerState] = MappingProxyType({}),
    ) -> None:
        """Write these layers, as they are in `generation`, as part of the checkpoint that resumes at `step`.

        They must not change afterwards. `copy_s` is the time in seconds that their copy took, for the report.

        Args:
            slices: Slices of the optimizer's state, by (layer, first unit, unit after the last).
        """
        self._newest = self._thread.submit(self._write, generation, step, layers, slices, copy_s)

    @property
    def is_busy(self) -> bool:
        """Whether a submitted checkpoint is not written yet."""
        return self._newest is not None and not self._newest.done()

    def votes_for(self, step: int, *, is_due: bool, request: int) -> bool:
        """Return whether this worker votes for the checkpoint that resumes at `step`, after the step before it.

        Not while the one before is being written: copies of the model must not pile up when the disk is slower than
        training. No other worker begins it then, because workers that took turns in being busy would never write the
        same one.
        """
        is_busy = self.is_busy
        self.left_out = step if is_busy and is_due else 0
        return not is_busy and (is_due or request > self.answered)

    def join(self, *, unless: Callable[[], bool]) -> bool:
        """Wait until everything submitted is written and return True, or False as soon as `unless` is true."""
        while self.is_busy:
            if unless():
                return False
            time.sleep(_POLL_S)
        return True

    def _write(
        self,
        generation: int,
        step: int,
        layers: Mapping[int, LayerState],
        slices: Mapping[_Slice, LayerState],
        copy_s: float,
    ) -> None:
        started, error, seals = time.perf_counter(), None, dict[str, str]()
        try:
            self._before_write(step)
            # After a failure workers may repeat this step. A complete checkpoint never changes.
            if not is_complete(self._checkpoints, step):
                parts = {layer_part(step, layer): state for layer, state in layers.items()}
                parts |= {slice_part(step, *place): state for place, state in slices.items()}
                for part, state in parts.items():
                    seals[part.partition("/")[2]] = _write_part(self._checkpoints, step, part, state)
        except (Exception, CheckpointException) as failure:  # noqa: BLE001
            # The disk is full, or the folder is gone: training continues, and the user is warned.
            error = _describe(failure)
        self._saved(
            CheckpointSaved(
                generation=generation,
                step=step,
                layers=tuple(layers),
                slices=tuple(slices),
                seals=tuple(seals.items()),
                copy_s=copy_s,
                write_s=time.perf_counter() - started,
                error=error,
            )
        )


def _write_part(checkpoints: Storage, step: int, part: str, state: LayerState) -> str:
    """Write a layer, or a slice of one, and its checksums; return its seal."""
    with checkpoints.writing(part) as draft:
        with single_process():
            save(dict(state), storage_writer=FileSystemWriter(draft), no_dist=True)
        tensors = {key: layer_checksums({key: each}, _CPU) for key, each in _tensors_of(state).items()}
        return seal_layer(draft, tensors, part=part, run=checkpoints.run_of(step) or "")


def read_layer(checkpoints: Path | Storage, step: int, layer: int) -> dict[str, Any]:
    """Read a layer's state, as `HeldLayers.snapshot` gave it, and check it.

    The slices of its optimizer's state are part of it, and parameters are in the type in which they are updated.

    Raises:
        DamagedCheckpointError: the layer is not as it was written; the message names the file, and the tensors.
        CheckpointError: it cannot be read here.
    """
    storage = storage_of(checkpoints)
    try:
        mark = read_mark(storage, step)
    except OSError as error:
        raise CheckpointError(f"layer {layer}: {error}") from None
    state = _read(storage, layer, layer_part(step, layer), mark)
    for place in mark.get("slices", ()):
        if place[0] == layer:
            state |= _read(storage, layer, slice_part(step, *place), mark)
    try:
        return joined_masters(state)
    except ValueError as error:
        raise DamagedCheckpointError(f"layer {layer}: {error}") from None


def _read(storage: Storage, layer: int, part: str, mark: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with storage.reading(part) as path:
            return _checked(storage, part, path, mark)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"layer {layer}: {error}") from None
    except (Exception, CheckpointException) as error:
        cause = _cause_of(error)
        kind = CheckpointError if isinstance(cause, OSError) else DamagedCheckpointError
        raise kind(f"layer {layer} cannot be read from {storage.place(part)}: {_describe(error)}") from error


def _checked(storage: Storage, part: str, path: Path, mark: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state in the files of a part, and check them. `path` is where they can be read."""
    checksums, damaged = checked_files(path, part=part, mark=mark, place=storage.place(part))
    if damaged is not None:
        place, tensors = storage.place(f"{part}/{damaged.name}"), _describe_damage(damaged, checksums)
        raise DamagedCheckpointError(f"{place} is not as it was written{tensors}")
    state = _load(path)
    if changed := _changed(state, checksums):
        place = storage.place(part)
        raise DamagedCheckpointError(f"{place} was written with other values of {', '.join(changed)} than it has")
    return state


def _load(path: Path, only: str | None = None) -> dict[str, Any]:
    """Load a layer, or one entry of it, from its folder."""
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in stored.items()
        if only in (None, key)
    }
    with single_process():
        load(state, storage_reader=reader, no_dist=True)
    return state


def _tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: each for key, each in state.items() if isinstance(each, torch.Tensor)}


def _changed(state: Mapping[str, Any], checksums: Mapping[str, list[int]]) -> list[str]:
    """Return the keys of tensors whose checksums differ."""
    found = {key: layer_checksums({key: each}, _CPU) for key, each in _tensors_of(state).items()}
    return sorted(key for key in found.keys() | checksums.keys() if found.get(key) != checksums.get(key))


def _describe_damage(damaged: Path, checksums: Mapping[str, list[int]]) -> str:
    """Name the tensors that are damaged with a file, as far as they can be identified."""

    def is_changed(key: str) -> bool:
        try:
            return bool(_changed(_load(damaged.parent, only=key), {key: checksums[key]}))
        except (Exception, CheckpointException):  # noqa: BLE001
            return True

    if damaged.name == ".metadata":
        # A damaged pickle must not be loaded.
        return ""
    changed = [key for key in sorted(checksums) if is_changed(key)]
    return f", in {', '.join(changed)}" if changed else ""


def _cause_of(error: BaseException) -> BaseException:
    # Torch's error is not an Exception; it holds the errors of all participating processes. Here that is one.
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _describe(error: BaseException) -> str:
    cause = _cause_of(error)
    # Torch's writer of archives does not tell why a write was cut short.
    remark = ", as on a full disk" if "unexpected pos" in str(cause) else ""
    return f"{type(cause).__name__}: {cause}{remark}"


@contextmanager
def single_process() -> Iterator[None]:
    """Silence torch's warning about the missing process group, which is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
