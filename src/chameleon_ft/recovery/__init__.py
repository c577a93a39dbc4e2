"""Recovery: how to go on after a loss."""

from __future__ import annotations

from chameleon_ft.recovery.decision import STAY, Candidate, Course, Decision, decide
from chameleon_ft.recovery.failure_rate import FailureRate
from chameleon_ft.recovery.layout import in_flight_ceiling, largest_symmetric_layout
from chameleon_ft.recovery.policies import POLICIES
from chameleon_ft.recovery.precompute import PreparedDecisions, decide_on_class, exchanged, prepare_decisions
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.refresh import refreshed
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.recovery.warm_up import warm_up
from chameleon_ft.search.detours import reroute

__all__ = [
    "POLICIES",
    "STAY",
    "Candidate",
    "Course",
    "Decision",
    "FailureRate",
    "PreparedDecisions",
    "Proposal",
    "Situation",
    "decide",
    "decide_on_class",
    "exchanged",
    "in_flight_ceiling",
    "largest_symmetric_layout",
    "prepare_decisions",
    "refreshed",
    "reroute",
    "warm_up",
]
