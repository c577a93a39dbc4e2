"""What a policy of the simulator is: a function from what is in force to the ways to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from chameleon_ft.simulate.fleet import Fleet
from chameleon_ft.simulate.planner import Option, Outlook
from chameleon_ft.simulate.world import World

__all__ = ["Proposer"]

Proposer: TypeAlias = Callable[[World, Fleet, Outlook], Sequence[Option]]
"""From the fleet in force, gaps where workers are lost, to options; what cannot be done is left out."""
