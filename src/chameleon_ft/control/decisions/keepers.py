"""The keepers of snapshots under the next plan; see `plan.snapshots`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from chameleon_ft.config import Snapshots
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.estimate import state_bytes
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.plan.snapshots import Part, lay_out_snapshot
from chameleon_ft.recovery import without_shadow_holders
from chameleon_ft.schedule import CostModel

__all__ = ["with_keepers"]


def with_keepers(
    plan: RecoveryPlan,
    hosts: Mapping[int, str],
    snapshots: Snapshots,
    costs_of: Callable[[Mapping[int, str]], CostModel],
) -> RecoveryPlan:
    """Return the plan with the layout of snapshots that are taken under it, if any are."""
    if not snapshots.every:
        return plan
    placement, layers = plan.plan.placement, costs_of(hosts).workload.layers
    if plan.migration is not None:
        placement = without_shadow_holders(placement, plan.migration)

    def weight(part: Part) -> float:
        layer = layers[part.layer]
        sliced = 0 if plan.sharding is None else layer.optimizer_bytes - layer.master_bytes
        return sliced * (part.stop - part.start) / UNITS if part.stop else state_bytes(layer) - sliced

    layout = lay_out_snapshot(placement, hosts, plan.sharding, group=snapshots.parts, weight=weight)
    return replace(plan, snapshots=layout)
