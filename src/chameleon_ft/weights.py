"""Weights in safetensors files: which of their tensors each parameter is, and reading them into parameters.

Importing this module loads no torch. A worker reads the tensors of its own layers, some rows at a time, straight into
the memory of their parameters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Pieces", "Weights"]

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
ADAPTERS: Final = "base_model.model."
"""The beginning of the names that peft gives to parameters of adapters."""
FROZEN: Final = "frozen"
"""In the state of a layer: what `job.stored.frozen_in` says of parameters that are in the job's files, and maybe not in
the state. Snapshots and checkpoints do not have them."""
TYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The types of the format that can be read, to those of torch."""
_CHUNK_BYTES: Final = 1 << 23
# Of a fingerprint: the bytes of a tensor that count, and how many tensors at least, if there are so many.
_SAMPLE_BYTES: Final = 4096
_SAMPLED: Final = 1000


@dataclass(frozen=True, slots=True)
class Pieces:
    """A parameter that files hold in other shapes: transposed, or as several tensors.

        Pieces(("proj.weight",), lambda weight: [weight.T])
        Pieces(("gate.weight", "up.weight"), lambda weight: weight.chunk(2))

    Attributes:
        names: the names of the tensors in the files.
        views: parameter -> views of its memory, one for each of `names`. Together they have each element once. Reading
            fills the views, and an export writes them.
    """

    names: tuple[str, ...]
    views: Callable[[Tensor], Sequence[Tensor]]


StoredName: TypeAlias = "str | Pieces"


@dataclass(frozen=True, slots=True)
class Weights:
    """The source of a job's initial weights, and the names that they have there and in an export.

    Attributes:
        path: a safetensors file, or a folder with model.safetensors, or with model.safetensors.index.json and the files
            that it names. None: nothing is read, and the names are only those of an export.
        names: for each layer, the names of its parameters, and of persistent buffers, to their names in the files. A
            parameter that files hold in another shape has `Pieces` instead. Buffers without a name stay as they are
            built. Of tied parameters the first copy counts, and others need no name. None: tensor NAME of layer N is
            "layers.N.NAME".
        initialized: patterns of names in the files, such as "score.*", of what is not read but initialised.
        ignored: patterns of the names of tensors in the files that the model does not have.
        save_config: folder -> nothing: writes what belongs beside the weights of an export, such as config.json.
        save_adapters: likewise, beside adapters; `Job.with_adapters` sets it.
    """

    path: str | Path | None = None
    names: Sequence[Mapping[str, StoredName]] | None = None
    initialized: Sequence[str] = ()
    ignored: Sequence[str] = ()
    save_config: Callable[[Path], object] | None = None
    save_adapters: Callable[[Path], object] | None = None

    def stored_as(self, layer: int, name: str) -> StoredName | None:
        """Return the name of a tensor of a layer in the files; None if it has none."""
        return f"layers.{layer}.{name}" if self.names is None else self.names[layer].get(name)

    def is_read(self, stored: StoredName) -> bool:
        """Return whether what has this name is read from the files, and not initialised."""
        return self.path is not None and not any(
            fnmatchcase(name, pattern) for name in names_of(stored) for pattern in self.initialized
        )

    def fingerprint(self) -> str:
        """Return a digest of the names, shapes and types of the files' tensors, and of some bytes of each.

        Of very many tensors only some count. Raises ConfigError if a file cannot be read.
        """
        assert self.path is not None
        try:
            found = {file: file.stat() for file in sorted(set(files_of(Path(self.path)).values()))}
        except OSError as error:
            raise ConfigError(f"weights {self.path}: cannot be read ({error})") from None
        return _fingerprint(tuple((file, each.st_size, each.st_mtime_ns) for file, each in found.items()))

    def read(self, tensors: Iterable[tuple[StoredName, Tensor]]) -> None:
        """Read tensors of the files into others, cast to the types of those.

        Raises ConfigError if a file cannot be read, or does not have them.
        """
        assert self.path is not None
        files, headers = files_of(Path(self.path)), dict[Path, Mapping[str, StoredTensor]]()
        for stored, tensor in tensors:
            for name, view in zip(names_of(stored), views_of(stored, tensor.detach()), strict=True):
                file = files.get(name)
                if file is not None and file not in headers:
                    headers[file] = header_of(file)
                if file is None or name not in headers[file] or headers[file][name].shape != tuple(view.shape):
                    raise ConfigError(
                        f"weights {self.path}: have no tensor {name!r} of shape {tuple(view.shape)}, which they had "
                        "on the host that started the run; give all hosts the same files"
                    )
                headers[file][name].read_into(view)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: its shape, its type as "F32", and its place in bytes."""

    file: Path
    shape: tuple[int, ...]
    kind: str
    start: int
    stop: int

    def read_into(self, tensor: Tensor) -> None:
        """Read the values, some rows at a time. Raises ConfigError if they cannot be read.

        They are not mapped into memory, as the library of safetensors would: the kernel would read more around them,
        and a file that is cut short meanwhile would kill the process.
        """
        import torch

        kind, flat = getattr(torch, TYPES[self.kind]), tensor if self.shape else tensor.unsqueeze(0)
        rows = max(1, _CHUNK_BYTES * len(flat) // max(1, self.stop - self.start))
        position = self.start
        try:
            with self.file.open("rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for part in flat.split(rows) if flat.numel() else ():
                    is_alike = part.dtype == kind and part.is_contiguous() and part.device.type == "cpu"
                    values = part if is_alike else torch.empty(part.shape, dtype=kind)
                    position += _fill(opened, position, values.view(-1).view(torch.uint8).numpy())
                    if not is_alike:
                        part.copy_(values)
        except OSError as error:
            raise ConfigError(f"weights {self.file}: cannot be read ({error})") from None


def _fill(file: Any, position: int, buffer: Any) -> int:
    """Read the bytes from a position on that a buffer has room for; return their number."""
    done, view = 0, memoryview(buffer)
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], position + done)
        if not count:
            raise OSError(f"it ends after {position + done:,} bytes")
        done += count
    return done


@lru_cache(maxsize=4)
def _fingerprint(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Return a digest of files of these sizes and times of change, in whichever of them a tensor is."""
    found = sorted((name, each) for file, *_ in files for name, each in header_of(file).items())
    digest = blake2b(repr([(name, each.shape, each.kind) for name, each in found]).encode(), digest_size=16)
    for _, each in found[:: max(1, len(found) // _SAMPLED)]:
        size = min(_SAMPLE_BYTES, each.stop - each.start)
        try:
            with each.file.open("rb", buffering=0) as opened:
                digest.update(os.pread(opened.fileno(), size, (each.start + each.stop - size) // 2))
        except OSError as error:
            raise ConfigError(f"weights {each.file}: cannot be read ({error})") from None
    return digest.hexdigest()


def frozen_names(described: str) -> Collection[str]:
    """Return the names of the parameters that `chameleon_ft.job.stored.frozen_in` describes."""
    return json.loads(described)["parameters"].keys() if described else ()


def names_of(stored: StoredName) -> tuple[str, ...]:
    """Return the names of the tensors in the files."""
    return (stored,) if isinstance(stored, str) else tuple(stored.names)


def views_of(stored: StoredName, tensor: Tensor) -> Sequence[Tensor]:
    """Return a parameter as the tensors that files have of it, without copying."""
    return [tensor] if isinstance(stored, str) else list(stored.views(tensor))


def files_of(path: Path) -> Mapping[str, Path]:
    """Return the file of each tensor, by its name. Raises ConfigError if there are no such files."""
    if (path / INDEX).is_file():
        try:
            index: Mapping[str, Any] = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): path / str(file) for name, file in index.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"weights {path / INDEX}: is no index of safetensors files ({type(error).__name__}: {error}); write "
                "them again, such as by `save_pretrained`"
            ) from None
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"weights {file}: there is no such file; give a safetensors file, or a folder with {SINGLE} or {INDEX}"
        )
    return dict.fromkeys(header_of(file), file)


def header_of(file: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a file by their names. Raises ConfigError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"), file.open("rb") as opened:
            begin = 8 + (length := int.from_bytes(opened.read(8), "little"))
            header = json.loads(opened.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"weights {file}: cannot be read ({error}); it is missing, not safetensors, or was not copied as a whole"
        ) from None
    return {
        name: StoredTensor(file, tuple(each["shape"]), each["dtype"], *(begin + at for at in each["data_offsets"]))
        for name, each in sorted(header.items())
        if name != "__metadata__"
    }
