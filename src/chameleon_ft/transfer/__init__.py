"""How state moves from one placement to another: roles, sources and rounds."""

from __future__ import annotations

from chameleon_ft.transfer.roles import (
    Holding,
    assign_roles,
    holdings_of,
    min_moved_bytes,
    missing_between,
    moved_bytes,
    remap_placement,
    remap_plan,
    worker_kinds,
)
from chameleon_ft.transfer.sources import Message, choose_sources
from chameleon_ft.transfer.transfer import (
    Transfer,
    message_rounds,
    plan_transfer,
    pull_s,
    sums_s,
    transfer_s,
    transfer_to,
)

__all__ = [
    "Holding",
    "Message",
    "Transfer",
    "assign_roles",
    "choose_sources",
    "holdings_of",
    "message_rounds",
    "min_moved_bytes",
    "missing_between",
    "moved_bytes",
    "plan_transfer",
    "pull_s",
    "remap_placement",
    "remap_plan",
    "sums_s",
    "transfer_s",
    "transfer_to",
    "worker_kinds",
]
