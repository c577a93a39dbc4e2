"""The state in a checkpoint, whole, whatever the layout of the workers was."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.job.stored import read_frozen
from chameleon_ft.storage.checkpoints import layer_part, read_mark, slice_part
from chameleon_ft.storage.stores import Storage
from chameleon_ft.weights import FROZEN

_SLICE: Final = re.compile(r"(?P<name>.*)\[(?P<first>\d+):\d+\]")


def stored_weights(config: RunConfig, checkpoints: Storage, step: int, average: str = "") -> dict[str, torch.Tensor]:
    """Return the parameters, or their masters, and buffers of a checkpoint, by the names of `nn.Sequential(*layers)`.

    The job of `config` is loaded if some are in its files of weights alone. `average` names what the optimizer keeps of
    each parameter to return instead. Raises ConfigError if they cannot be read, or no parameter has that.
    """
    job = cache(partial(load_job, config.job, config))
    found = dict[str, torch.Tensor]()
    kept = set[str]()
    for layer in range(read_mark(checkpoints, step)["layers"]):
        module, optimizer, _ = stored_layer(job, checkpoints, step, layer)
        kept.update(*optimizer.values())
        averages = {name: own[average] for name, own in optimizer.items() if average in own}
        found |= {f"{layer}.{name}": averages.get(name, value) for name, value in module.items()}
    if average and average not in kept:
        raise ConfigError(
            f"the optimizer keeps no {average!r} of parameters, but {', '.join(sorted(kept)) or 'nothing'}; average "
            "them by chameleon_ft.optim.ema"
        )
    return found


def stored_layer(
    job: Callable[[], Job], checkpoints: Storage, step: int, layer: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], bool]:
    """Return parameters, or their masters, and buffers of a layer by name, and the optimizer's state by parameter.

    Also returns whether the optimizer keeps anything else. Raises ConfigError if they cannot be read.
    """
    whole = read_part(checkpoints, layer_part(step, layer))
    frozen = whole.get(FROZEN, "")
    module: dict[str, Any] = {**read_frozen(job(), layer, frozen)} if frozen else {}
    # The slices of a parameter by their first elements, for each key of the optimizer, which is empty for a master.
    pieces = dict[tuple[str, str], dict[int, Any]]()
    slices = read_mark(checkpoints, step).get("slices", ())
    parts = (read_part(checkpoints, slice_part(step, *place)) for place in slices if place[0] == layer)
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
    return module, optimizer, "values" in whole


def read_part(checkpoints: Storage, part: str) -> dict[str, Any]:
    """Return the entries of a folder of a checkpoint. Raises ConfigError if they cannot be read."""
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
