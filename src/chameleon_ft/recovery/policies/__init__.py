"""Policies: each proposes plans, in runs and in simulations. One file for each, and one line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.policies import (
    chameleon,
    drop_replica,
    mend,
    oobleck,
    paper,
    recycle,
    repartition,
    reroute,
    restart,
)
from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICIES", "policy_named"]

POLICIES: Final[Mapping[str, Policy]] = FrozenMap(
    {
        "chameleon": chameleon.POLICY,
        "reroute": reroute.POLICY,
        "mend": mend.POLICY,
        "repartition": repartition.POLICY,
        "recycle": recycle.POLICY,
        "oobleck": oobleck.POLICY,
        "paper": paper.POLICY,
        "drop-replica": drop_replica.POLICY,
        "restart": restart.POLICY,
    }
)
"""Every policy by its name."""


def policy_named(name: str) -> Policy:
    """The policy of this name. Raises ConfigError if there is none."""
    try:
        return POLICIES[name]
    except KeyError:
        near = get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(POLICIES)}"
        raise ConfigError(f"there is no policy {name!r}; {hint}") from None
