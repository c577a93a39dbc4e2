"""Data: sources of tokens, the samples of a step, and their tensors.

`open_corpus`, `Buckets` and `chameleon_ft.data.samples` load torch; no other name that is exported here does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chameleon_ft.data.corpus import DataSummary, check_data, load_sources, prepare_data
from chameleon_ft.data.mixture import Mixture, MixtureOrder, sample_order
from chameleon_ft.data.order import SampleOrder, read_sample

if TYPE_CHECKING:
    from chameleon_ft.data.buckets import Buckets
    from chameleon_ft.data.samples import open_corpus

__all__ = [
    "Buckets",
    "DataSummary",
    "Mixture",
    "MixtureOrder",
    "SampleOrder",
    "check_data",
    "load_sources",
    "open_corpus",
    "prepare_data",
    "read_sample",
    "sample_order",
]


def __getattr__(name: str) -> Any:
    if name == "open_corpus":
        from chameleon_ft.data.samples import open_corpus

        return open_corpus
    if name == "Buckets":
        from chameleon_ft.data.buckets import Buckets

        return Buckets
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
