"""The datasets and streams of samples that a job reads, for training and evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    import torch

    TensorPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
    Collate: TypeAlias = Callable[[list[Any]], Any]

RESERVED_METRICS: Final = ("loss", "perplexity")
"""Names of what an evaluation has beside the job's own metrics."""


class Dataset(Protocol):
    """A map-style dataset: sample `i` is the same (input, target) in every process, at any time.

    What it draws from the global generators of Python, NumPy and torch is; see `chameleon_ft.data.read_sample`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TensorPair: ...


class Stream(Protocol):
    """A dataset that is read from its beginning on: iterating it gives one epoch of (input, target).

    It, or its iterator, has ``state_dict()`` and ``load_state_dict(state)``, or ``get_state()`` and
    ``set_state(state)``, so that reading can continue at a position. Without them, all before it is read again.
    """

    def __iter__(self) -> Iterator[TensorPair]: ...


def is_stream(dataset: object) -> bool:
    """Return whether a dataset is read as a `Stream`, and not by the numbers of its samples.

    That is what can be iterated and is not map-style, or has a state although it is.
    """
    bases = {f"{each.__module__}.{each.__name__}" for each in type(dataset).__mro__}
    # Torch's base class has a `__getitem__` that only raises an error.
    has_numbers = hasattr(dataset, "__getitem__") and not any(
        base.startswith("torch.") and base.endswith(".IterableDataset") for base in bases
    )
    is_map_style = has_numbers and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and (not is_map_style or hasattr(dataset, "state_dict"))


def check_dataset(dataset: Any) -> None:
    if is_stream(dataset):
        if getattr(dataset, "batch_size", None) is not None and hasattr(dataset, "collate_fn"):
            raise ConfigError(
                f"`dataset` is a loader of batches of {dataset.batch_size}, but a micro-batch is stacked from samples; "
                "give the loader batch_size=None, and set the sizes in [batch]"
            )
        if hasattr(dataset, "__next__") and not hasattr(dataset, "state_dict") and not hasattr(dataset, "get_state"):
            raise ConfigError(
                f"`dataset` is {type(dataset).__name__}, which can be read only once: no other worker could read on "
                "after a failure; give an object whose __iter__ begins again, with state_dict() and load_state_dict()"
            )
        return
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            "`dataset` must be map-style, with __len__ and __getitem__(i) -> (input, target), or a stream, with "
            "__iter__, state_dict() and load_state_dict()"
        )
    if len(dataset) < 1:
        raise ConfigError("`dataset` is empty: training needs at least one sample")


def check_evaluation(dataset: Any, metrics: Mapping[str, Any]) -> None:
    if dataset is None:
        if metrics:
            raise ConfigError("`metrics` are computed in evaluations: give `evaluation`, a dataset of held-out samples")
        return
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError("`evaluation` must be map-style: give it __len__ and __getitem__(i) -> (input, target)")
    if len(dataset) < 1:
        raise ConfigError("`evaluation` is empty: give it at least one sample, or leave it out")
    for name, metric in metrics.items():
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", name) or name in RESERVED_METRICS:
            raise ConfigError(
                f"`metrics` has the name {name!r}: a name begins with a letter, has no blanks, and is none of "
                f"{', '.join(RESERVED_METRICS)}"
            )
        require_callable(f"metrics[{name!r}]", metric)


def require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise ConfigError(f"`{name}` is {type(value).__name__}: it must be a function")
