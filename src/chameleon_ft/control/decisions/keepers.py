"""The keepers of snapshots under the next plan, and the cost of a return to one; see `plan.snapshots`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from chameleon_ft.config import RunConfig
from chameleon_ft.config import Snapshots as SnapshotsConfig
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.state.state import State
from chameleon_ft.estimate import SnapshotRule, choose_snapshots, state_bytes
from chameleon_ft.recovery import LONGEST_BETWEEN_SNAPSHOTS_S, Checkpoints, DecisionContext, without_shadow_holders
from chameleon_ft.recovery import Snapshots as ExpectedSnapshots
from chameleon_ft.schedule import CostModel


def with_keepers(
    plan: RecoveryPlan,
    hosts: Mapping[int, str],
    config: RunConfig,
    costs_of: Callable[[Mapping[int, str]], CostModel],
    host_memory: Mapping[str, int],
) -> RecoveryPlan:
    """Return the plan with the layout of snapshots that are taken under it, if any are.

    See `SnapshotRule` for when none are, if the run chooses by itself.

    Args:
        host_memory: host -> bytes available for its workers, as far as known.
    """
    snapshots, plan = config.snapshots, replace(plan, snapshots=None, no_snapshots="")
    if not snapshots.every:
        return plan
    if not config.receives_block:
        return replace(plan, no_snapshots=f"they are not sent over {config.backend} yet")
    placement, costs = plan.plan.placement, costs_of(hosts)
    if plan.migration is not None:
        placement = without_shadow_holders(placement, plan.migration)
    rule = snapshot_rule(snapshots, host_memory)
    chosen = choose_snapshots(placement, costs.workload, costs.cluster.hosts, rule, plan.sharding)
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
    step_s, cost_s = state.detectors.watchdog.step_s, snapshots.schedule.cost_s
    saved = 0 if snapshots.restorable is None else snapshots.restorable.step
    layers, cluster = context.costs.workload.layers, context.costs.cluster
    placement = context.plan.placement
    most_bytes = max(
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
        return_s=context.phases.total_s + link.message_s(most_bytes) * context.transfer_factor,
        rule=snapshot_rule(state.settings.snapshots, state.members.host_memory()),
    )
