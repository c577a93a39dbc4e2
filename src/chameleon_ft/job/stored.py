"""The tensors of a job's layers in its files of weights: reading them, and describing those that are not trained."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from chameleon_ft.errors import ConfigError
from chameleon_ft.weights import StoredName, Weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from chameleon_ft.job.job import Job


def names_read(job: Job, layer: int, names: Iterable[str]) -> dict[str, StoredName]:
    """Return those of a layer's tensors that are read from the job's files, with their names there."""
    weights, stored = job.weights or Weights(), {name: job.stored_as(layer, name) for name in names}
    return {name: each for name, each in stored.items() if each is not None and weights.is_read(each)}


def read_weights(job: Job, layer: int, module: nn.Module) -> None:
    """Read the tensors of a layer that the job's files have into it. Raises ConfigError if they cannot be read."""
    tensors = {**dict(module.named_parameters()), **module.state_dict(keep_vars=True)}
    if job.weights is not None and (stored := names_read(job, layer, tensors)):
        job.weights.read((each, tensors[name]) for name, each in stored.items())


def frozen_in(job: Job, layer: int, module: nn.Module) -> str:
    """Describe the parameters of a layer that are not trained, and that `read_frozen` reads from the job's files.

    Empty if there are none.
    """
    frozen = {
        name: [str(each.dtype).removeprefix("torch."), list(each.shape)]
        for name, each in module.named_parameters()
        if not each.requires_grad
    }
    stored = names_read(job, layer, frozen)
    if job.weights is None or not stored:
        return ""
    return json.dumps({"files": job.weights.fingerprint(), "parameters": {name: frozen[name] for name in stored}})


def read_frozen(job: Job, layer: int, described: str) -> dict[str, torch.Tensor]:
    """Read the parameters of a layer that `frozen_in` described, by name; none if that is empty.

    Raises ConfigError if they cannot be read, or the files are others now.
    """
    if not described:
        return {}
    import torch

    content, weights = json.loads(described), job.weights
    if weights is None or weights.path is None or weights.fingerprint() != content["files"]:
        now = "has none now" if weights is None or weights.path is None else f"has others now, {weights.path}"
        raise ConfigError(
            f"the frozen parameters of layer {layer} are in the files of weights that the run was begun with, and "
            f"the job {now}; give it the files of before"
        )
    found = {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in content["parameters"].items()
    }
    stored = names_read(job, layer, found)
    if lacking := [name for name in found if name not in stored]:
        raise ConfigError(
            f"`weights` has no name in its files for the frozen parameter {lacking[0]!r} of layer {layer}, which "
            "it had when the run began; give it the names of before"
        )
    weights.read((each, found[name]) for name, each in stored.items())
    return found
