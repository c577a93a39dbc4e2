"""Policies of the simulator by class of pipelines: each says which ways there are to go on. One file for a few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.simulate.policies.planned import chameleon, mend, repartition
from chameleon_ft.simulate.policies.proposer import Proposer
from chameleon_ft.simulate.policies.published import oobleck, paper
from chameleon_ft.simulate.policies.standing import drop_replica, recycle, reroute
from chameleon_ft.simulate.policies.symmetric import redundant, restart

__all__ = ["CLASS_POLICIES", "FIXED_DEPTH", "Proposer"]

CLASS_POLICIES: Final[Mapping[str, Proposer]] = FrozenMap(
    {
        "chameleon": chameleon,
        "reroute": reroute,
        "mend": mend,
        "repartition": repartition,
        "recycle": recycle,
        "oobleck": oobleck,
        "paper": paper,
        "drop-replica": drop_replica,
        "redundant": redundant,
        "restart": restart,
    }
)
"""Every policy by its name."""

FIXED_DEPTH: Final = frozenset({"reroute", "mend", "recycle", "drop-replica"})
"""Those that never leave the depth that they start with, and so begin with the better of two."""
