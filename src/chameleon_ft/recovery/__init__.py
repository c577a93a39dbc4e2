"""Recovery: how to go on after a loss."""

from __future__ import annotations

from chameleon_ft.recovery.checkpoints import Checkpoints
from chameleon_ft.recovery.decision import STAY, Candidate, Course, Decision, decide
from chameleon_ft.recovery.decision_cache import DecisionCache, build_decision_cache, decide_on_class, remap_decision
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.recovery.layout import largest_symmetric_layout, uniform_limits
from chameleon_ft.recovery.loss_risk import HolderSets, LossRisk, risk_of
from chameleon_ft.recovery.policies import POLICIES
from chameleon_ft.recovery.policy import Policy, Proposer
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals.paper import PaperRepartition
from chameleon_ft.recovery.prospect import Prospect
from chameleon_ft.recovery.rescoring import rescore
from chameleon_ft.recovery.scoring import best_of, score
from chameleon_ft.recovery.warm_up import warm_up
from chameleon_ft.search.detours import reroute

__all__ = [
    "POLICIES",
    "STAY",
    "Candidate",
    "Checkpoints",
    "Course",
    "Decision",
    "DecisionCache",
    "DecisionContext",
    "FailureModel",
    "HolderSets",
    "LossRisk",
    "PaperRepartition",
    "Policy",
    "Proposal",
    "Proposer",
    "Prospect",
    "best_of",
    "build_decision_cache",
    "decide",
    "decide_on_class",
    "largest_symmetric_layout",
    "remap_decision",
    "reroute",
    "rescore",
    "risk_of",
    "score",
    "uniform_limits",
    "warm_up",
]
