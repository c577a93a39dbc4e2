"""Checks of a job's source of weights before a run, by the headers of its files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from torch import Tensor

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import build_on_meta, state_tensors
from chameleon_ft.weights import (
    INDEX,
    TYPES,
    StoredName,
    StoredTensor,
    Weights,
    files_of,
    header_of,
    names_of,
    views_of,
)

_NAMED: Final = 3
# Types of safetensors that parameters are cast from.
_FLOATS: Final = ("F64", "F32", "F16", "BF16")


def check_weights(job: Job) -> None:
    """Compare the names and shapes of a job's weights with those of its layers, and with the headers of its files.

    Raises:
        ConfigError: a parameter has no name, a name has no parameter, or two have the same; or a file is missing or
            damaged, or lacks a tensor, or has one of another shape, or one that the model does not have.
    """
    weights = job.weights
    if weights is None:
        return
    headers = {} if weights.path is None else _headers(Path(weights.path))
    owners: dict[str, tuple[int, str]] = {}
    for layer in range(job.num_layers):
        for name, (stored, tensor) in _named(job, weights, layer).items():
            place = f"{name!r} of layer {layer}"
            first = next((copies[0] for copies in job.tied if (layer, name) in copies), (layer, name))
            for file_name, view in zip(names_of(stored), _views(stored, tensor, place), strict=True):
                if owners.setdefault(file_name, first) != first:
                    other = "{1!r} of layer {0}".format(*owners[file_name])
                    raise ConfigError(
                        f"`weights` gives {other} and {place} the name {file_name!r}: name them apart, or put them "
                        "into the job's `tied` if they are one parameter"
                    )
                if weights.path is not None and weights.is_read(stored):
                    _check_tensor(weights, file_name, headers, view, place)
    extra = [
        name
        for name in headers
        if name not in owners and not any(fnmatchcase(name, pattern) for pattern in weights.ignored)
    ]
    if extra:
        raise ConfigError(
            f"weights {weights.path}: have {_some(extra)}, which no layer has; name them in `names`, or if they are "
            "not to be read, in `ignored` of Weights"
        )


def _headers(path: Path) -> Mapping[str, StoredTensor]:
    """Return the shape and type of each tensor, by its name. Raises ConfigError if a file is missing or damaged."""
    found: dict[str, StoredTensor] = {}
    files = files_of(path)
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise ConfigError(
                f"weights {path}: {file.name} is missing, which {INDEX} names; copy all files of the model"
            )
        header, expected = header_of(file), {name for name, own in files.items() if own == file}
        if lacking := sorted(expected - header.keys()):
            raise ConfigError(
                f"weights {file}: has no tensor {lacking[0]!r}, which {INDEX} places there; copy all files of one "
                "version of the model"
            )
        found |= {name: each for name, each in header.items() if name in expected}
    return found


def _named(job: Job, weights: Weights, layer: int) -> dict[str, tuple[StoredName, Tensor]]:
    """Return the names of a layer's tensors in files, with the tensors on the meta device, by their names in it."""
    module = build_on_meta(job, layer)
    tensors, tied = state_tensors(module), job.tied_in(layer)
    stored = {name: job.stored_as(layer, name) for name in tensors}
    if missing := [name for name, _ in module.named_parameters() if stored[name] is None]:
        raise ConfigError(
            f"`weights` has no name for {_some(missing)} of layer {layer}: give the name in the files, also of what is "
            "not in them but initialised, and name that in `initialized` of Weights, too"
        )
    given: Collection[str] = () if weights.names is None else weights.names[layer]
    if unknown := [name for name in given if name not in tensors and name not in tied]:
        raise ConfigError(
            f"`weights` has names of {_some(unknown)} of layer {layer}, which has no such parameters; it has "
            f"{_some([*tensors])}"
        )
    return {name: (own, tensors[name]) for name, own in stored.items() if own is not None}


def _views(stored: StoredName, tensor: Tensor, place: str) -> Sequence[Tensor]:
    """Return the parts of a parameter that files have. Raises ConfigError unless they are all of it, once."""
    try:
        views = views_of(stored, tensor.detach())
        fits = len(views) == len(names_of(stored)) and sum(view.numel() for view in views) == tensor.numel()
        problem = "" if fits else f"{len(views)} views of {sum(view.numel() for view in views):,} elements"
    except Exception as error:  # noqa: BLE001 - of the user's function
        views, problem = [], f"{type(error).__name__}: {error}"
    if problem:
        raise ConfigError(
            f"the `views` of {place} gave {problem}: they take a tensor of the shape {tuple(tensor.shape)}, and return "
            f"one view of it for each of the {len(names_of(stored))} names, which together have all elements once"
        )
    return views


def _check_tensor(weights: Weights, name: str, headers: Mapping[str, StoredTensor], view: Tensor, place: str) -> None:
    if name not in headers:
        raise ConfigError(
            f"weights {weights.path}: have no tensor {name!r}, which is to be {place}; they have "
            f"{_some([*headers])}. Name the tensor as the files do, or put the name into `initialized` of Weights"
        )
    shape, kind = headers[name].shape, headers[name].kind
    if shape != tuple(view.shape):
        raise ConfigError(
            f"weights {weights.path}: {name!r} has the shape {shape}, and {place} has {tuple(view.shape)}; build "
            "the layers of the model that the files are of, or give Pieces with views of the files' shapes"
        )
    if kind not in TYPES or (view.is_floating_point() and kind not in _FLOATS):
        raise ConfigError(
            f"weights {weights.path}: {name!r} has the type {kind}, as of quantised models; give files in one of "
            f"{', '.join(_FLOATS)}"
        )


def _some(names: Sequence[str]) -> str:
    """Name some of many."""
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")
