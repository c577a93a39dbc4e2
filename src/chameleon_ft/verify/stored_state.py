"""The state of a layer in a checkpoint, read as docs/files.md describes it and with nothing of what wrote it."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import Storage, layer_part, slice_part, slices_of

__all__ = ["stored_layer"]

_SLICE = re.compile(r"(?P<name>.*)\[(?P<first>\d+):\d+\]")


def stored_layer(checkpoints: Storage, step: int, layer: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return parameters, or their masters, and buffers of a layer by name, and the optimizer's state by parameter.

    Raises ConfigError if they cannot be read.
    """
    module = dict[str, Any]()
    pieces = dict[tuple[str, str], dict[int, Any]]()  # by parameter and key of the optimizer, empty for a master
    whole = _read(checkpoints, layer_part(step, layer))
    if "values" in whole:
        place = checkpoints.place(layer_part(step, layer))
        raise ConfigError(
            f"{place}: the optimizer keeps more than the state of parameters, with which a plain loop cannot begin; "
            "verify a run that is not forked"
        )
    parts = (
        _read(checkpoints, slice_part(step, *place)) for place in slices_of(checkpoints, step) if place[0] == layer
    )
    for entries in (whole, *parts):
        for entry, value in entries.items():
            kind, _, place = entry.partition("/")
            name, _, key = (place, "", "") if kind == "module" else place.rpartition("/")
            if match := _SLICE.fullmatch(name):
                pieces.setdefault((match["name"], key), {})[int(match["first"])] = value
            elif kind == "module":
                module[name] = value
            elif kind == "optimizer":
                pieces.setdefault((name, key), {})[0] = value
    optimizer = dict[str, dict[str, Any]]()
    for (name, key), by_start in pieces.items():
        first, *others = (by_start[start] for start in sorted(by_start))
        if isinstance(first, torch.Tensor) and first.ndim and (others or not key):
            first = torch.cat([each.reshape(-1) for each in (first, *others)]).view(module[name].shape)
        if key:
            optimizer.setdefault(name, {})[key] = first
        else:
            module[name] = first
    return module, optimizer


def _read(checkpoints: Storage, part: str) -> dict[str, Any]:
    try:
        with checkpoints.reading(part) as files:
            stored = FileSystemReader(files).read_metadata().state_dict_metadata
            state: dict[str, Any] = {
                key: torch.empty(entry.size, dtype=entry.properties.dtype)
                if isinstance(entry, TensorStorageMetadata)
                else None
                for key, entry in stored.items()
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group
                load(state, checkpoint_id=files, no_dist=True)
    except (OSError, CheckpointException) as error:
        raise ConfigError(f"{checkpoints.place(part)}: its state cannot be read: {error}") from None
    return state
