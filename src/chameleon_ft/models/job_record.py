"""The facts of a job that its checkpoints record; see `chameleon_ft.job_record`."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import chameleon_ft
from chameleon_ft.config import RunConfig
from chameleon_ft.job.job import Job
from chameleon_ft.job_record import FROZEN_FILES, Fact, JobRecord
from chameleon_ft.models.build import build_on_meta, frozen_bytes
from chameleon_ft.models.optimizer import ModelOptimizer, names_of_state

# Steps whose rates are recorded.
_RATES: Final = (0, 1, 10, 100, 1_000, 10_000, 100_000)
# Largest number of elements in a sketch of numbers.
_LONGEST: Final = 1 << 20
_PROJECTIONS: Final = 8
# Entries of a group that are parameters, or their names.
_UNNAMED: Final = ("params", "param_names")
_NOT_OWN: Final = (Path(sysconfig.get_path("stdlib")).resolve(), Path(chameleon_ft.__file__).resolve().parent)


def record_of(
    job: Job, config: RunConfig, *, samples: Mapping[str, Fact], outputs: Mapping[str, Fact], device: torch.device
) -> JobRecord:
    """Return the record of a job that has been loaded by `config`.

    Args:
        samples: number of samples, and sketches of some.
        outputs: sketches of what its layers and its loss returned on `device`.
    """
    numpy = str(np.__version__)
    versions = {"chameleon_ft": chameleon_ft.__version__, "torch": str(torch.__version__), "numpy": numpy}
    return JobRecord(
        data=samples,
        layers={"number of layers": job.num_layers, **_layers(job)},
        outputs=outputs,
        conditions={"device": device.type, "samples": config.batch.micro_batch_size, "torch": versions["torch"]},
        settings=_settings(job, config),
        sources=_sources(config.job),
        versions={f"version of {name}": version for name, version in versions.items()},
    )


def sketch(tensor: torch.Tensor) -> list[str | float]:
    """Return the type and shape of a tensor, and a digest of integers, or numbers that change little with rounding.

    They are the root of the mean square, and projections. Of long tensors of floats only some elements count.
    """
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    if not flat.is_floating_point():
        return [kind, blake2b(flat.cpu().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()]
    flat = flat[:: max(1, flat.numel() // _LONGEST)].cpu().double()
    scale = max(1, flat.numel()) ** 0.5
    places = torch.arange(flat.numel(), dtype=torch.float64)
    projections = (flat @ torch.cos(places * (number + 2) ** 0.5) / scale for number in range(_PROJECTIONS))
    return [kind, float(torch.linalg.vector_norm(flat)) / scale, *map(float, projections)]


def _layers(job: Job) -> dict[str, Fact]:
    # The blocks of a model mostly share one factory.
    described: dict[int, str] = {}
    for layer, factory in enumerate(job.layers):
        if id(factory) not in described:
            module = build_on_meta(job, layer)
            tensors = [(name, str(each.dtype), list(each.shape)) for name, each in module.state_dict().items()]
            digest = blake2b(repr(tensors).encode(), digest_size=4).hexdigest()
            size = sum(parameter.numel() for parameter in module.parameters())
            described[id(factory)] = f"{type(module).__qualname__} with {size:,} parameters ({digest})"
    return {f"layer {layer}": described[id(factory)] for layer, factory in enumerate(job.layers)}


def _settings(job: Job, config: RunConfig) -> dict[str, Fact]:
    optimizer = ModelOptimizer(job)
    groups = [optimizer.group_of(place) for place in optimizer.parameters]
    found: dict[str, Fact] = {"clip_norm": job.clip_norm, "precision": job.precision.name}
    if job.clip_value is not None:
        found["clip_value"] = job.clip_value
    found |= {f"argument {name}": value for name, value in job.arguments.items()}
    if job.weights is not None and any(frozen_bytes(job)):
        found[FROZEN_FILES] = job.weights.fingerprint()
    found["optimizer"] = type(optimizer.torch).__qualname__
    found["state of the optimizer"] = ", ".join(sorted(names_of_state(job)))
    found["number of the optimizer's groups"] = len(optimizer.torch.param_groups)
    for number, group in enumerate(optimizer.torch.param_groups):
        place = f"of the optimizer, group {number}" if number else "of the optimizer"
        found[f"number of parameters {place}"] = sum(each is group for each in groups)
        found |= {f"{name} {place}": _plain(value) for name, value in group.items() if name not in _UNNAMED}
    if job.learning_rate is not None or job.schedule is not None:
        # Another horizon is recorded by itself.
        horizon, steps = config.horizon, [step for step in _RATES if step < config.steps]
        found |= {f"learning_rate of step {step} to {horizon}": optimizer.learning_rate(step) for step in steps}
    return found


def _plain(value: Any) -> str | float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value if isinstance(value, int | float | None) else str(value)
    return repr([_plain(each) for each in value]) if isinstance(value, list | tuple) else type(value).__qualname__


def _sources(reference: str) -> dict[str, Fact]:
    """Return digests of the files of the job's module and of those that have been imported from beside it."""
    modules = {name: path for name, module in list(sys.modules.items()) if (path := _file_of(module)) is not None}
    location = reference.rpartition(":")[0] or reference
    own = Path(location).resolve() if location.endswith(".py") else modules.get(location)
    if own is None:
        return {}
    depth = 0 if location.endswith(".py") else location.count(".") + (own.name == "__init__.py")
    return {
        str(path.relative_to(own.parents[depth])): blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in sorted(set(modules.values()))
        if path.is_relative_to(own.parents[depth]) and _is_own(path)
    }


def _is_own(path: Path) -> bool:
    installed = any(part.endswith("-packages") for part in path.parts) or any(map(path.is_relative_to, _NOT_OWN))
    return path.is_file() and not installed


def _file_of(module: object) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) and file.endswith(".py") else None
