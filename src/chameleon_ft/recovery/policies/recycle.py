"""ReCycle (Gandhi et al., SOSP 2024): always reroute."""

from __future__ import annotations

from chameleon_ft.recovery.policies import reroute
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation

__all__ = ["propose"]


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """What `reroute` proposes, under this name. Backward is split if it was in the plan, which ReCycle does."""
    return reroute.propose(situation, horizon_s, name="recycle")
