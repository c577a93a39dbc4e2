"""What plans are chosen by, whether they have been made in full or not."""

from __future__ import annotations

from chameleon_ft.search._placed import Candidate
from chameleon_ft.search.result import FoundPlan


def made(found: Candidate | FoundPlan) -> FoundPlan:
    """The plan in full."""
    return found.found() if isinstance(found, Candidate) else found


def figures(found: Candidate | FoundPlan) -> tuple[float, ...]:
    """What plans are chosen by, the first of them first."""
    return found.step_s, found.moved_bytes, found.last_hosts


def has_two_holders(found: Candidate | FoundPlan) -> bool:
    """Whether every layer has."""
    placement = found.placement if isinstance(found, Candidate) else found.plan.placement
    return all(len(placement.holders(layer)) > 1 for layer in range(placement.num_layers))
