"""The unit of loss is a whole pipeline, as in per-replica fault tolerance."""

from __future__ import annotations

from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICY"]

POLICY = Policy(propose=lambda proposer: proposer.drop_pipelines("drop-replica"), starts="several")
