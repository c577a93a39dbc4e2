"""Starts the processes of a run: coordinator, agents and ranks."""

from __future__ import annotations

from chameleon_ft.launch.agent import run_agent
from chameleon_ft.launch.coordinator import coordinate
from chameleon_ft.launch.local import train
from chameleon_ft.launch.standby import stand_by, take_over
from chameleon_ft.launch.worker import work

__all__ = ["coordinate", "run_agent", "stand_by", "take_over", "train", "work"]
