"""The owners of slices of the optimizer's state under the next plan; see `plan.shards`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.decisions.transition import PlannedTransition, plan_transition
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.plan.shards import Sharding, shard_optimizer
from chameleon_ft.quantities import counted
from chameleon_ft.transfer import Transfer
from chameleon_ft.workload import LayerCost


def with_owners(plan: RecoveryPlan, left: Sharding | None, hosts: Mapping[int, str], redundancy: int) -> RecoveryPlan:
    """Return the plan after a loss, or the first one, with its owners.

    If no layers move, the remaining owners stay. Otherwise slices move with the layers.

    Args:
        left: the owners that are left, or those of the snapshot that the plan begins with; unused if workers load
            their layers anew.
        hosts: worker -> host.
    """
    placement, transition = plan.plan.placement, plan.transition
    if plan.load not in ("keep", "snapshot") or left is None:
        return replace(plan, sharding=shard_optimizer(placement, hosts, redundancy))
    # Layers that have migrated, and that a worker drops at once, are not exchanged any more.
    if transition is None:
        left = left.left_to({worker: placement.layers_of(worker) for worker in placement.workers})
        # Training does not wait for other owners: they get their slices by a switch.
        return replace(plan, sharding=left, is_provisional=plan.is_provisional or lacks_copies(left, redundancy))
    left = left.left_to(transition.keep)
    after = shard_optimizer(placement, hosts, redundancy, left)
    return replace(plan, sharding=after, transition=replace(transition, sharding=left))


def with_owners_between(
    plans: Sequence[RecoveryPlan],
    active: ActivePlan,
    hosts: Mapping[int, str],
    redundancy: int,
    *,
    migrates: bool,
    live: Collection[int],
    layers: Sequence[LayerCost],
) -> tuple[RecoveryPlan, ...]:
    """Return plans to switch to one after the other, with the owners of slices under each.

    Where owners change, their slices move while the plan before trains, with its layers if it has a migration.

    Args:
        active: the plan in force.
        migrates: whether anything moves during training; otherwise there is a transition.
        live, layers: the workers that stay, and the costs of all layers, for a transition.
    """
    present, before = active, active.sharding
    assert before is not None
    found: list[RecoveryPlan] = []
    for number, plan in enumerate(plans):
        target = plans[number + 1] if plan.migration is not None else plan
        after = shard_optimizer(target.plan.placement, hosts, redundancy, before)
        if plan.migration is not None:
            found.append(replace(plan, sharding=before, next_sharding=after))
            present = plan
            continue
        if after != before and present.migration is None:
            if migrates and plan.transition is None:
                found.append(_moving_slices(present, before, after))
            else:
                plan = replace(plan, transition=_with_slices(plan, present, before, live=live, layers=layers))
        found.append(replace(plan, sharding=after))
        present, before = plan, after
    return tuple(found)


def _moving_slices(present: ActivePlan, before: Sharding, after: Sharding) -> RecoveryPlan:
    """Return the present plan, as one under which slices move and no layers."""
    plan = RecoveryPlan.kept(present, None)
    return replace(
        plan,
        policy="migration",
        action="slices of the optimizer's state move during training",
        transition=None,
        rest=None,
        migration=Transfer(placement=present.plan.placement, roles={}, rounds=()),
        sharding=before,
        next_sharding=after,
    )


def _with_slices(
    plan: RecoveryPlan,
    present: ActivePlan,
    before: Sharding,
    *,
    live: Collection[int],
    layers: Sequence[LayerCost],
) -> PlannedTransition:
    placement = present.plan.placement
    held = {worker: placement.layers_of(worker) for worker in live}
    transition = plan.transition or plan_transition(
        placement, plan.plan.placement, held=held, layers=layers, moves_slices=True
    )
    assert transition is not None
    return replace(transition, sharding=before)


def lacks_copies(sharding: Sharding, redundancy: int) -> bool:
    """Return whether slices have fewer owners than they should and could have."""
    return any(len(each.owners) < min(redundancy, len(own.holders)) for own in sharding.layers for each in own.slices)


def restoring_copies(active: ActivePlan, redundancy: int) -> RecoveryPlan:
    """Return the plan in force as a plan to switch to, in which its slices get more owners."""
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
