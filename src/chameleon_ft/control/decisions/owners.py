"""The owners of slices of the optimizer's state under the next plan; see `plan.shards`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.decisions.transition import plan_transition
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.plan import Placement
from chameleon_ft.plan.shards import Sharding, shard_optimizer
from chameleon_ft.quantities import counted
from chameleon_ft.workload import LayerCost

__all__ = ["lacks_copies", "restoring_copies", "with_owners", "with_owners_after"]


def with_owners(plan: RecoveryPlan, left: Sharding | None, hosts: Mapping[int, str], redundancy: int) -> RecoveryPlan:
    """Return the plan after a loss, or the first one, with its owners.

    If no layers move, the owners that are left go on. Otherwise slices move with the layers.

    Args:
        left: the owners that are left; unused unless the plan continues from the workers' state.
        hosts: worker -> host.
    """
    placement, transition = plan.plan.placement, plan.transition
    if plan.load != "keep" or left is None:
        return replace(plan, sharding=shard_optimizer(placement, hosts, redundancy))
    if transition is None:
        # Training does not wait for other owners: they get their slices by a switch.
        return replace(plan, sharding=left, is_hasty=plan.is_hasty or lacks_copies(left, redundancy))
    after = shard_optimizer(placement, hosts, redundancy, left)
    return replace(plan, sharding=after, transition=replace(transition, sharding=left))


def with_owners_after(
    plan: RecoveryPlan,
    active: ActivePlan,
    hosts: Mapping[int, str],
    redundancy: int,
    *,
    live: Collection[int],
    layers: Sequence[LayerCost],
) -> RecoveryPlan:
    """Return a plan to switch to from the one in force, with its owners, and with a transition if they differ."""
    before, placement = active.sharding, active.plan.placement
    assert before is not None
    held = {worker: _layers_of(placement, worker) for worker in live}
    after = shard_optimizer(plan.plan.placement, hosts, redundancy, before)
    if after == before:
        return replace(plan, sharding=before)
    transition = plan.transition or plan_transition(
        placement, plan.plan.placement, held=held, layers=layers, moves_slices=True
    )
    assert transition is not None
    return replace(plan, sharding=after, transition=replace(transition, sharding=before))


def lacks_copies(sharding: Sharding, redundancy: int) -> bool:
    """Return whether slices have fewer owners than they should and could have."""
    return any(len(each.owners) < min(redundancy, len(own.holders)) for own in sharding.layers for each in own.slices)


def restoring_copies(active: ActivePlan, redundancy: int) -> RecoveryPlan:
    """Return the plan in force, as one to switch to by which its slices get more owners."""
    copies = counted(redundancy, "owner")
    return RecoveryPlan(
        plan=active.plan,
        in_flight_limits=active.in_flight_limits,
        first_step=0,
        load="keep",
        roll_forward=None,
        policy="redundancy",
        action=f"slices of the optimizer's state that have lost an owner get {copies} again",
    )


def _layers_of(placement: Placement, worker: int) -> tuple[int, ...]:
    return tuple(layer for layers in placement.ranges_of(worker) for layer in layers)
