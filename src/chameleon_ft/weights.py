"""Weights in safetensors files: which of their tensors each parameter is, and reading them into parameters.

Importing this module loads no torch. What it reads goes straight into the memory of parameters, so that a worker reads
and holds only the layers it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Pieces", "Weights"]

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
# A file is mapped for so many bytes at a time, which then count as memory of the process.
_CHUNK_BYTES: Final = 1 << 25


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
    """

    path: str | Path | None = None
    names: Sequence[Mapping[str, StoredName]] | None = None
    initialized: Sequence[str] = ()
    ignored: Sequence[str] = ()
    save_config: Callable[[Path], object] | None = None

    def stored_as(self, layer: int, name: str) -> StoredName | None:
        """Return the name of a tensor of a layer in the files; None if it has none."""
        return f"layers.{layer}.{name}" if self.names is None else self.names[layer].get(name)

    def is_read(self, stored: StoredName) -> bool:
        """Return whether what has this name is read from the files, and not initialised."""
        return self.path is not None and not any(
            fnmatchcase(name, pattern) for name in names_of(stored) for pattern in self.initialized
        )

    def read(self, tensors: Iterable[tuple[StoredName, Tensor]]) -> None:
        """Read tensors of the files into others, cast to the types of those.

        Raises ConfigError if a file cannot be read, or does not have them.
        """
        assert self.path is not None
        path = Path(self.path)
        files = files_of(path)
        for stored, tensor in tensors:
            for name, view in zip(names_of(stored), views_of(stored, tensor.detach()), strict=True):
                if name not in files:
                    raise ConfigError(f"weights {path}: have no tensor {name!r}, which they had when the run started")
                _read(files[name], name, view)


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


def header_of(file: Path) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the type, such as "F32", of each tensor of a file. Raises ConfigError if it is damaged."""
    with _opened(file) as opened:
        slices = {str(name): opened.get_slice(name) for name in sorted(opened.keys())}
        return {name: (tuple(each.get_shape()), str(each.get_dtype())) for name, each in slices.items()}


def _read(file: Path, name: str, into: Tensor) -> None:
    if not (into.ndim and into.numel()):
        with _opened(file) as opened:
            into.copy_(opened.get_tensor(name))
        return
    rows = max(1, _CHUNK_BYTES * len(into) // into.nbytes)
    for first in range(0, len(into), rows):
        with _opened(file) as opened:
            into[first : first + rows].copy_(opened.get_slice(name)[first : first + rows])


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"weights {file}: cannot be read ({error}); it is missing, not safetensors, or was not copied as a whole"
        ) from None
