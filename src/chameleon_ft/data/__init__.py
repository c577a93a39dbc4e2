"""Data: sources of tokens, the samples of a step, and their tensors.

The names exported here load no torch; `chameleon_ft.data.samples` does.
"""

from __future__ import annotations

from chameleon_ft.data.corpus import DataSummary, check_data, load_tokens, prepare_data
from chameleon_ft.data.order import SampleOrder, read_sample

__all__ = [
    "DataSummary",
    "SampleOrder",
    "check_data",
    "load_tokens",
    "prepare_data",
    "read_sample",
]
