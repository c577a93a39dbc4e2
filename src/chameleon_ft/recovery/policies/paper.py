"""The choice of the Chameleon paper (arXiv 2508.21613) by its own estimates: full reroute or full re-partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chameleon_ft.recovery.policy import Policy, Proposer

__all__ = ["POLICY"]


def _propose(proposer: Proposer[Any]) -> Sequence[Any]:
    """The one of both that trains more by (B / t_step) (D - t_transition) / D, rerouting if they are equal.

    If only one of both can be done, it is taken. The plan is scored by our predictions then, like any other.
    """
    moved = proposer.paper_repartition("paper-repartition")
    rate, rerouted_rate = moved.samples_per_s, moved.rerouted_samples_per_s
    if not rerouted_rate or (rate is not None and rate > rerouted_rate):
        return moved.proposals
    return proposer.reroute("paper-reroute")


POLICY = Policy(propose=_propose)
