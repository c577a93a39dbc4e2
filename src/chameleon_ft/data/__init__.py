"""Data: where tokens come from, which samples make up a step, and how they become tensors.

Checking data needs no torch: `check_data`, `prepare_data` and `SampleOrder` are here. What makes tensors is in
`chameleon_ft.data.batch` and `chameleon_ft.data.windows`.
"""

from __future__ import annotations

from chameleon_ft.data.corpus import DataSummary, check_data, load_tokens, prepare_data
from chameleon_ft.data.order import SampleOrder
from chameleon_ft.data.text import SkippedFile

__all__ = ["DataSummary", "SampleOrder", "SkippedFile", "check_data", "load_tokens", "prepare_data"]
