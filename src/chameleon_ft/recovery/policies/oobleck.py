"""Oobleck (Jang et al., SOSP 2023): always its templates."""

from __future__ import annotations

from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICY"]

POLICY = Policy(propose=lambda proposer: proposer.oobleck("oobleck"))
