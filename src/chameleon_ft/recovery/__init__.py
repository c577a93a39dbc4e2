"""Recovery: how to continue after a loss."""

from __future__ import annotations

from chameleon_ft.recovery.checkpoints import LONGEST_BETWEEN_SNAPSHOTS_S, Checkpoints, Snapshots, return_gap_s
from chameleon_ft.recovery.context import Course, DecisionContext
from chameleon_ft.recovery.decision import STAY, Decision, decide, rescore
from chameleon_ft.recovery.failure_model import FailureModel, HolderSets, LossRisk, risk_of
from chameleon_ft.recovery.layout import largest_symmetric_layout, uniform_limits
from chameleon_ft.recovery.migration import without_shadow_holders
from chameleon_ft.recovery.policies import POLICIES, Policy
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.salvage import SalvagedStep, complete_step
from chameleon_ft.recovery.scoring import Candidate, Prospect, best_of, score
from chameleon_ft.recovery.symmetry import LossClass, classes_to_prepare, decide_for_class, remap_decision
from chameleon_ft.recovery.warm_up import warm_up
from chameleon_ft.search import reroute

__all__ = [
    "LONGEST_BETWEEN_SNAPSHOTS_S",
    "POLICIES",
    "STAY",
    "Candidate",
    "Checkpoints",
    "Course",
    "Decision",
    "DecisionContext",
    "FailureModel",
    "HolderSets",
    "LossClass",
    "LossRisk",
    "Policy",
    "Proposal",
    "Prospect",
    "SalvagedStep",
    "Snapshots",
    "best_of",
    "classes_to_prepare",
    "complete_step",
    "decide",
    "decide_for_class",
    "largest_symmetric_layout",
    "remap_decision",
    "reroute",
    "rescore",
    "return_gap_s",
    "risk_of",
    "score",
    "uniform_limits",
    "warm_up",
    "without_shadow_holders",
]
