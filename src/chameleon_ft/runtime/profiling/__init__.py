"""Measuring what a job's layers, and the links between workers, cost on the device at hand."""

from __future__ import annotations

from chameleon_ft.runtime.profiling.link_peer import serve_link
from chameleon_ft.runtime.profiling.measure import Measuring, measure_profile

__all__ = ["Measuring", "measure_profile", "serve_link"]
