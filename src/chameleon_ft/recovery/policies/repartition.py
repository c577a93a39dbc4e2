"""The fastest pipelines of all live workers, whatever has to move for them."""

from __future__ import annotations

from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICY"]

POLICY = Policy(propose=lambda proposer: proposer.repartition("repartition"), replans=True)
