"""Gradient sync: which layers are reduced together, by which workers, and in which order."""

from __future__ import annotations

from chameleon_ft.sync.segments import (
    Segment,
    SyncRounds,
    gradient_rounds,
    gradient_segments,
    issue_points,
    segment_bytes,
    tied_segments,
)

__all__ = [
    "Segment",
    "SyncRounds",
    "gradient_rounds",
    "gradient_segments",
    "issue_points",
    "segment_bytes",
    "tied_segments",
]
