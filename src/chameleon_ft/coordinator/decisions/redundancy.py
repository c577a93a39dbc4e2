"""Who owns the slices of the optimizer's state and who keeps snapshots under the next plans, and what a return to a
snapshot costs; see `plan.shards` and `plan.snapshots`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from chameleon_ft.config import RunConfig
from chameleon_ft.config import Snapshots as SnapshotsConfig
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.cost.snapshots import SnapshotRule, choose_snapshots
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.plan.shards import Sharding, shard_optimizer
from chameleon_ft.quantities import counted
from chameleon_ft.recovery import LONGEST_BETWEEN_SNAPSHOTS_S, Checkpoints, DecisionContext
from chameleon_ft.recovery import Snapshots as ExpectedSnapshots
from chameleon_ft.recovery.generation import CostsFrom, GenerationSpec
from chameleon_ft.recovery.transition import PlannedTransition, plan_transition
from chameleon_ft.schedule import CostModel
from chameleon_ft.transfer import Transfer
from chameleon_ft.workload import LayerCost


def with_owners(
    plan: GenerationSpec, left: Sharding | None, hosts: Mapping[int, str], redundancy: int
) -> GenerationSpec:
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
        return replace(plan, sharding=left)
    left = left.left_to(transition.keep)
    after = shard_optimizer(placement, hosts, redundancy, left)
    return replace(plan, sharding=after, transition=replace(transition, sharding=left))


def with_owners_between(
    plans: Sequence[GenerationSpec],
    active: GenerationSpec,
    hosts: Mapping[int, str],
    redundancy: int,
    *,
    migrates: bool,
    live: Collection[int],
    layers: Sequence[LayerCost],
) -> tuple[GenerationSpec, ...]:
    """Return plans to switch to one after the other, with the owners of slices under each.

    Where owners change, their slices move while the plan before trains, with its layers if it has a migration.

    Args:
        active: the plan in force.
        migrates: True if anything moves during training; otherwise there is a transition.
        live, layers: the workers that stay, and the costs of all layers, for a transition.
    """
    present, before = active, active.sharding
    assert before is not None
    found: list[GenerationSpec] = []
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


def _moving_slices(present: GenerationSpec, before: Sharding, after: Sharding) -> GenerationSpec:
    """Return the present plan, as one under which slices move and no layers."""
    return present.followed_by(
        policy="migration",
        action="slices of the optimizer's state move during training",
        migration=Transfer(placement=present.plan.placement, roles={}, rounds=()),
        sharding=before,
        next_sharding=after,
    )


def _with_slices(
    plan: GenerationSpec,
    present: GenerationSpec,
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


def restoring_copies(active: GenerationSpec, redundancy: int) -> GenerationSpec:
    """Return the plan in force as a plan to switch to, in which its slices get more owners."""
    copies = counted(redundancy, "owner")
    return active.followed_by(
        policy="redundancy",
        action=f"slices of the optimizer's state that have lost an owner get {copies} again",
    )


def with_keepers(plan: GenerationSpec, config: RunConfig, host_memory: Mapping[str, int]) -> GenerationSpec:
    """Return the plan with the layout of snapshots that are taken under it, if any are.

    See `SnapshotRule` for when none are, if the run chooses by itself.

    Args:
        host_memory: host -> bytes available for its workers, as far as known.
    """
    snapshots, plan = config.snapshots, replace(plan, snapshots=None, no_snapshots="")
    if not snapshots.every:
        return plan
    rule = snapshot_rule(snapshots, host_memory)
    costs = plan.costs
    chosen = choose_snapshots(plan.trained_plan.placement, costs.workload, costs.cluster.hosts, rule, plan.sharding)
    return replace(plan, snapshots=chosen.layout, no_snapshots=chosen.refusal)


def snapshot_rule(snapshots: SnapshotsConfig, host_memory: Mapping[str, int]) -> SnapshotRule:
    """Return the rule by which a run with these settings decides whether snapshots are taken under a plan."""
    return SnapshotRule(group=snapshots.parts, at_any_size=snapshots.every != "auto", host_memory=host_memory)


def expected_snapshots(state: State, context: DecisionContext, *, has_reports: bool) -> ExpectedSnapshots | None:
    """Return the snapshots that a decision counts on; None if there is none to go back to.

    The way back takes the phases of a stall, and the time in which the state of the worker that holds most crosses the
    slowest link.

    Args:
        has_reports: whether all workers have quiesced, so that the steps since the last snapshot are known.
    """
    every, snapshots = state.settings.snapshots.every, state.snapshots
    if not every or (snapshots.restorable is None and not snapshots.is_fresh):
        return None
    step_s, cost_s = state.usual_step_s, snapshots.schedule.cost_s
    saved = 0 if snapshots.restorable is None else snapshots.restorable.step
    layers, cluster = context.costs.workload.layers, context.costs.cluster
    placement = context.plan.placement
    max_bytes = max(
        sum(state_bytes(layers[layer]) for layer in placement.layers_of(worker)) for worker in placement.workers
    )
    link = cluster.inter_host if len(set(cluster.hosts.values())) > 1 else cluster.intra_host
    unsaved_s = max(0, state.committed - saved) * step_s if has_reports else 0.0
    if every == "auto" and cost_s is not None:
        taken = Checkpoints(unsaved_s=unsaved_s, longest_s=LONGEST_BETWEEN_SNAPSHOTS_S, write_s=cost_s)
    else:
        taken = Checkpoints(unsaved_s=unsaved_s, longest_s=step_s if every == "auto" else every * step_s)
    return ExpectedSnapshots(
        taken=taken,
        return_s=context.phases.total_s + link.message_s(max_bytes) * context.transfer_factor,
        rule=snapshot_rule(state.settings.snapshots, state.members.host_memory()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Gives plans to switch to their owners, keepers and later plans, which takes seconds for thousands of workers.

    Attributes:
        active: the plan in force.
        hosts: worker -> host.
        live: the workers that stay.
        host_memory: host -> bytes available for its workers, as far as known.
        migrates: True if anything moves during training.
    """

    config: RunConfig
    costs: CostModel
    costs_from: CostsFrom
    active: GenerationSpec
    hosts: Mapping[int, str]
    live: tuple[int, ...]
    host_memory: Mapping[str, int]
    migrates: bool

    def __call__(self, plans: Sequence[GenerationSpec]) -> tuple[GenerationSpec, ...]:
        """Return the plans with owners and keepers.

        If there is no plan but slices have lost owners, the one in force, in which they get others.
        """
        active, redundancy = self.active, self.config.parallel.owners
        if redundancy is not None:
            if not plans and active.sharding is not None and lacks_copies(active.sharding, redundancy):
                plans = (restoring_copies(active, redundancy),)
            plans = with_owners_between(
                plans,
                active,
                self.hosts,
                redundancy,
                migrates=self.migrates,
                live=self.live,
                layers=self.costs.workload.layers,
            )
        # A switch may come in any later stage.
        stages = self.config.batch.stages_from(active.first_step)
        return tuple(
            with_keepers(
                replace(plan, costs=self.costs, costs_from=self.costs_from).along(stages), self.config, self.host_memory
            )
            for plan in plans
        )
