"""Layouts whose optimizer state is not shared, as tests have them that are about something else."""

from __future__ import annotations

from chameleon_ft.config import Parallel


def undivided(parallel: Parallel) -> Parallel:
    """Return the layout without shared optimizer state, unless it says how that is shared."""
    said = "optimizer_redundancy" in parallel.model_fields_set
    return parallel if said else parallel.model_copy(update={"optimizer_redundancy": "all"})
