"""Recovery: how to go on after a loss."""

from __future__ import annotations

from chameleon_ft.recovery.checkpoints import Checkpoints
from chameleon_ft.recovery.decision import STAY, Candidate, Course, Decision, decide
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.recovery.layout import in_flight_ceiling, largest_symmetric_layout
from chameleon_ft.recovery.loss_risk import HolderSets, LossRisk, risk_of
from chameleon_ft.recovery.policies import POLICIES
from chameleon_ft.recovery.policy import Policy, Proposer
from chameleon_ft.recovery.precompute import PreparedDecisions, decide_on_class, exchanged, prepare_decisions
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals.paper import PaperRepartition
from chameleon_ft.recovery.prospect import Prospect
from chameleon_ft.recovery.refresh import refreshed
from chameleon_ft.recovery.scoring import best_of, score
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.recovery.warm_up import warm_up
from chameleon_ft.search.detours import reroute

__all__ = [
    "POLICIES",
    "STAY",
    "Candidate",
    "Checkpoints",
    "Course",
    "Decision",
    "FailureModel",
    "HolderSets",
    "LossRisk",
    "PaperRepartition",
    "Policy",
    "PreparedDecisions",
    "Proposal",
    "Proposer",
    "Prospect",
    "Situation",
    "best_of",
    "decide",
    "decide_on_class",
    "exchanged",
    "in_flight_ceiling",
    "largest_symmetric_layout",
    "prepare_decisions",
    "refreshed",
    "reroute",
    "risk_of",
    "score",
    "warm_up",
]
