"""All workers start again from a checkpoint, with equal pipelines."""

from __future__ import annotations

from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICY"]

POLICY = Policy(propose=lambda proposer: proposer.restart("restart"), starts="equal", restarts=True)
