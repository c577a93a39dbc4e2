"""Recovery: how to go on after a loss."""

from __future__ import annotations

from chameleon_ft.recovery.layout import in_flight_ceiling, largest_symmetric_layout
from chameleon_ft.search.detours import reroute

__all__ = ["in_flight_ceiling", "largest_symmetric_layout", "reroute"]
