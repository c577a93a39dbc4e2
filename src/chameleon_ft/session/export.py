"""The weights of a checkpoint in files of other programs, under the names that the job gives them.

A checkpoint has the layers one by one, so they are written as they are read: of safetensors, only as much as one file
gets is in memory at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.job.stored import read_frozen
from chameleon_ft.models.adapters import merge_adapters
from chameleon_ft.session.configuration import NamedStep, checkpoint_of
from chameleon_ft.storage.checkpoints import read_mark
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import Directory, Storage
from chameleon_ft.verify.stored_state import stored_weights
from chameleon_ft.weights import ADAPTERS, FROZEN, INDEX, SINGLE, Weights, frozen_names, names_of, views_of
from chameleon_ft.worker.checkpoint import read_layer, single_process
from chameleon_ft.worker.inspection import users_errors

ExportFormat: TypeAlias = Literal["safetensors", "dcp", "state_dict"]
ExportType: TypeAlias = Literal["float32", "bfloat16", "float16"]

STATE_DICT: Final = "pytorch_model.bin"
ADAPTER_FILE: Final = "adapter_model.safetensors"
_FILE_BYTES: Final = 5 << 30
_STATE: Final = "module/"


@dataclass(frozen=True, slots=True)
class Export:
    """A written folder, with the weights with which training would resume at `step`."""

    folder: Path
    step: int
    tensors: int
    num_bytes: int


def export_weights(
    run: RunDirectory,
    to: Path,
    *,
    step: NamedStep = None,
    form: ExportFormat = "safetensors",
    dtype: ExportType | None = None,
    adapters: bool = False,
    merge: bool = False,
    average: str = "",
    file_bytes: int = _FILE_BYTES,
) -> Export:
    """Write the weights of a checkpoint into a new folder, which appears once it is complete.

    Args:
        adapters: those alone.
        merge: the model with the adapters in it.
        average: names what the optimizer keeps of each parameter to write instead, such as "ema".

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: the folder is not empty, or the job has no names for what the checkpoint has.
    """
    for name, value, known in (("format", form, get_args(ExportFormat)), ("dtype", dtype, get_args(ExportType))):
        if value is not None and value not in known:
            raise ConfigError.unknown_name(f"{name} of an export", value, known)
    to = to.absolute()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to}: exists already; name a new folder for the export")
    config = run.config()
    checkpoints, number = checkpoint_of(run, step)
    with users_errors(config):
        job = load_job(config.job, config)
    weights = job.weights or Weights()
    has_adapters = weights.save_adapters is not None
    if adapters + merge != has_adapters:
        raise ConfigError(
            "the job has adapters: export either these alone by --adapters, or the model with them in it by --merge"
            if has_adapters
            else "--adapters, --merge: the job has no adapters; leave it out, or give it some by Job.with_adapters"
        )
    if adapters and form != "safetensors":
        raise ConfigError(f"--adapters: peft reads adapters from safetensors alone, not from {form}")
    count = Counted(None if dtype is None else getattr(torch, dtype))
    averages = stored_weights(config, checkpoints, number, average) if average else {}
    found = stored_tensors(job, checkpoints, number, averages, adapters=adapters, merge=merge)
    tensors = count.of(found)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with Directory(to.parent).writing(to.name) as draft:
            draft.mkdir()
            if adapters:
                save_file(dict(tensors), draft / ADAPTER_FILE, metadata={"format": "pt"})
            elif form == "safetensors":
                write_safetensors(tensors, draft, file_bytes=file_bytes)
            elif form == "dcp":
                with single_process():
                    save(dict(tensors), storage_writer=FileSystemWriter(draft), no_dist=True)
            else:
                torch.save(dict(tensors), draft / STATE_DICT)
            if (save_beside := weights.save_adapters if adapters else weights.save_config) is not None:
                with users_errors(config):
                    save_beside(draft)
            _sync(draft)
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written ({error.strerror}); name another folder") from None
    return Export(to, number, count.tensors, count.num_bytes)


@dataclass
class Counted:
    """Casts tensors on their way, and counts them."""

    dtype: torch.dtype | None
    tensors: int = 0
    num_bytes: int = 0

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            made = tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor
            self.tensors, self.num_bytes = self.tensors + 1, self.num_bytes + made.nbytes
            yield name, made


def stored_tensors(
    job: Job,
    checkpoints: Storage,
    step: int,
    averages: Mapping[str, Tensor],
    *,
    adapters: bool = False,
    merge: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, or their masters, and the buffers of a checkpoint, by their names in files, layer by layer.

    Those in `averages`, by the names of `nn.Sequential(*layers)`, take the place of others. Of `adapters`, these alone;
    or they are merged into the rest. Raises ConfigError if the job has no name for one, or CheckpointError.
    """
    num_layers = read_mark(checkpoints, step)["layers"]
    if num_layers != job.num_layers:
        raise ConfigError(
            f"the checkpoint of step {step} has {num_layers} layers, and the job has {job.num_layers} now: export with "
            "the job that wrote it"
        )
    written = set[str]()
    for layer in range(num_layers):
        state = read_layer(checkpoints, step, layer)
        tensors = {key.removeprefix(_STATE): each for key, each in state.items() if key.startswith(_STATE)}
        frozen = state.get(FROZEN, "")
        if lacking := sorted(_named(job, layer) - tensors.keys() - set(frozen_names(frozen))):
            raise ConfigError(
                f"layer {layer} of the checkpoint of step {step} has no {lacking[0]!r}, which `weights` names: export "
                "with the job that wrote it"
            )
        if not adapters:
            tensors |= read_frozen(job, layer, frozen)
        tensors |= {name: averages[f"{layer}.{name}"] for name in tensors if f"{layer}.{name}" in averages}
        if merge:
            tensors = merge_adapters(job, layer, tensors)
        for own, tensor in tensors.items():
            # Buffers may have no name, and a parameter that is used in two places has one.
            stored = job.stored_as(layer, own) if isinstance(tensor, Tensor) else None
            if stored is None:
                continue
            for name, view in zip(names_of(stored), views_of(stored, tensor), strict=True):
                # Tied parameters, which are equal, have one name.
                if name not in written and (name.startswith(ADAPTERS) == adapters):
                    written.add(name)
                    yield name, view.contiguous()


def _named(job: Job, layer: int) -> set[str]:
    names = None if job.weights is None else job.weights.names
    return set() if names is None else names[layer].keys() - job.tied_in(layer)


def write_safetensors(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, file_bytes: int) -> None:
    """Write one file, or several with an index, each of at most so many bytes unless one tensor has more."""
    files = list[list[str]]()
    pending = dict[str, Tensor]()
    total = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files)}", metadata={"format": "pt"})
        files.append([*pending])
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(each.nbytes for each in pending.values()) + tensor.nbytes > file_bytes:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "0").rename(folder / SINGLE)
        return
    index = dict[str, str]()
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}").rename(folder / file)
        index |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
