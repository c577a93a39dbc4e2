"""Only pipelines that have lost a worker are cut anew: between rerouting and a re-partition."""

from __future__ import annotations

from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICY"]

POLICY = Policy(propose=lambda proposer: proposer.repair("repair"), starts="several")
