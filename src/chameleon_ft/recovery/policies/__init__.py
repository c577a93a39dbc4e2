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
    oobleck,
    paper,
    recycle,
    repair,
    repartition,
    reroute,
    restart,
)
from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICIES", "current_name", "policy_named"]

POLICIES: Final[Mapping[str, Policy]] = FrozenMap(
    {
        "chameleon": chameleon.POLICY,
        "reroute": reroute.POLICY,
        "repair": repair.POLICY,
        "repartition": repartition.POLICY,
        "recycle": recycle.POLICY,
        "oobleck": oobleck.POLICY,
        "paper": paper.POLICY,
        "drop-replica": drop_replica.POLICY,
        "restart": restart.POLICY,
    }
)
"""Every policy by its name."""

_RENAMED: Final[Mapping[str, str]] = FrozenMap({"mend": "repair"})


def current_name(name: str) -> str:
    """Return the present name of a policy for a deprecated one, and any other name as it is."""
    return _RENAMED.get(name, name)


def policy_named(name: str) -> Policy:
    """Return the policy of this name, which may be a deprecated one. Raises ConfigError if there is none."""
    try:
        return POLICIES[current_name(name)]
    except KeyError:
        near = get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(POLICIES)}"
        raise ConfigError(f"there is no policy {name!r}; {hint}") from None
