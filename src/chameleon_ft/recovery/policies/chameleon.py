"""Weigh everything: nothing moves, a little does, or all that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chameleon_ft.recovery.policy import Policy, Proposer

__all__ = ["POLICY"]


def _propose(proposer: Proposer[Any]) -> Sequence[Any]:
    # Searched first, because the search finds recut plans for a repair as well.
    anew = proposer.repartition("repartition")
    kept = [*proposer.reroute("reroute"), *proposer.rejoin("rejoin"), *proposer.repair("repair")]
    return [*kept, *anew, *proposer.begin_anew("anew")]


POLICY = Policy(propose=_propose, replans=True)
