"""Peers of the lost workers do their share, until idle workers take the places of these."""

from __future__ import annotations

from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICY"]

POLICY = Policy(
    propose=lambda proposer: [*proposer.reroute("reroute"), *proposer.rejoin("reroute-rejoin")], starts="several"
)
