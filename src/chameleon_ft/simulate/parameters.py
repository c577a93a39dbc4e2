"""Assumptions of the simulator: every figure is a parameter, with its source."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

from chameleon_ft.cost.snapshots import SnapshotRule
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery import LONGEST_BETWEEN_SNAPSHOTS_S, Checkpoints, FailureModel, Snapshots

_MAY_BE_INFINITE: Final = ("checkpoint_interval_s", "host_memory_bytes")
_POSITIVE: Final = (
    "worker_mtbf_s",
    "prior_failures",
    "checkpoint_interval_s",
    "host_memory_bytes",
    "migration_factor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Costs of failures and of the reactions to them, for all policies alike unless stated otherwise.

    Attributes:
        detect_s: seconds until a loss is detected; the runtime's median on eight workers, docs/benchmarks.md.
        stop_s: seconds until the last survivor has left its operation; likewise.
        decide_s: seconds of a decision that was prepared, or of rerouting alone; a guess.
        search_s: seconds of any other decision, which does not stop a policy that salvages, and of the preparation for
            each class of losses (by class: for all of them): on 32 workers with two cores; see
            docs/simulator-internals.md.
        regroup_s: seconds until new communicators are formed; a guess for some thousand ranks, 0.015 s for eight.
        migration_factor: seconds of a migration over those that messages and links explain.
        weigh_s: seconds from the return of workers until the decision about them, while training continues.
        step_overhead_s: seconds that a step takes beyond its estimate: vote, update, and overhead of the host.
        worker_mtbf_s: prior mean time between two failures of a worker: 5,000 hours in `[recovery]`.
        prior_failures: number of failures that the prior counts for: 1 in `[recovery]`.
        host_failure_fraction: prior share of failures that take all workers of a host: a quarter in `[recovery]`.
        restart_cost_s: seconds from a failure until a restarted job runs, reading of the checkpoint included but not
            repeated steps: the 5 minutes of `[recovery] restart_cost_s`.
        checkpoint_write_s: seconds that training stands still for a checkpoint: a copy to the host's memory, with the
            rest in the background as in CheckFreq (Mohan et al., FAST 2021). The duration is a guess.
        checkpoint_interval_s: most seconds of steps between two checkpoints; see `recovery.Checkpoints`. If infinite,
            only `restart` has checkpoints, and a policy that needs one ends.
        snapshot_every: steps between two snapshots in the memory of workers, under policies that salvage; 0 for none.
            None: as runs choose it, at the interval that loses least, and none under plans for which a host lacks the
            memory. They take the place of checkpoints as long as some plan fits the live workers.
        snapshot_cost_s: seconds by which a snapshot makes steps longer, all together.
        host_memory_bytes: The memory of each host that is available for its workers; see `SnapshotRule`.
        snapshot_return_s: seconds in which the state of a snapshot moves to where it is needed, after the phases of the
            stall; a guess for a worker's share over a fast link.
        redundant_forward: share of a stage's forward that its neighbour computes again under `redundant`: all of it in
            Bamboo (Thorpe et al., NSDI 2023), which hides it in the bubbles. The part that does not fit into them makes
            the step longer, and nothing else: a loss costs the phases above, and the remaining workers have the fastest
            equal pipelines. So it is an upper bound for Bamboo.
        salvage: True if interrupted steps are completed and layers move during training, under policies that do so.
        exact_up_to: most workers for which decisions are those of `recovery.decide`; above, plans are by class.

    Raises:
        ConfigError: a figure is negative or not finite, or zero where it must be positive.
    """

    detect_s: float = 0.045
    stop_s: float = 0.034
    decide_s: float = 0.05
    search_s: float = 1.0
    regroup_s: float = 1.0
    migration_factor: float = 1.0
    weigh_s: float = 0.0
    step_overhead_s: float = 0.0
    worker_mtbf_s: float = 5_000 * 3_600.0
    prior_failures: float = 1.0
    host_failure_fraction: float = 0.25
    restart_cost_s: float = 300.0
    checkpoint_write_s: float = 1.0
    checkpoint_interval_s: float = 3_600.0
    snapshot_every: int | None = 0
    snapshot_cost_s: float = 0.0
    host_memory_bytes: float = math.inf
    snapshot_return_s: float = 1.0
    redundant_forward: float = 1.0
    salvage: bool = True
    exact_up_to: int = 32

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            finite = math.isfinite(value) or (each.name in _MAY_BE_INFINITE and value == math.inf)
            if not (finite and value >= 0):
                raise ConfigError(f"{each.name} must be zero or a positive number; got {value}")
            if not value and each.name in _POSITIVE:
                raise ConfigError(f"{each.name} must be a positive number; got 0")
        if self.host_failure_fraction > 1:
            raise ConfigError(f"host_failure_fraction must be between 0 and 1; got {self.host_failure_fraction}")

    @property
    def has_checkpoints(self) -> bool:
        """Whether checkpoints are written."""
        return math.isfinite(self.checkpoint_interval_s)

    @property
    def takes_snapshots(self) -> bool:
        """Whether snapshots are taken, under policies that salvage."""
        return self.snapshot_every != 0

    def snapshots(self, *, unsaved_s: float, step_s: float, rule: SnapshotRule) -> Snapshots:
        """Return what decisions count on.

        Args:
            unsaved_s: seconds of steps since the last snapshot.
            step_s: seconds of a step.
            rule: under which plans they are taken.
        """
        if self.snapshot_every is None:
            longest_s = LONGEST_BETWEEN_SNAPSHOTS_S
            taken = Checkpoints(unsaved_s=unsaved_s, longest_s=longest_s, write_s=self.snapshot_cost_s)
        else:
            taken = Checkpoints(unsaved_s=unsaved_s, longest_s=self.snapshot_every * step_s)
        return Snapshots(taken=taken, return_s=self.after_loss.total_s + self.snapshot_return_s, rule=rule)

    def steps_between_snapshots(self, *, step_s: float, return_gap_s: float) -> int:
        """Return the interval under a plan that has snapshots.

        Args:
            step_s: seconds of a step.
            return_gap_s: mean seconds between two returns to a snapshot; infinite if there are none.
        """
        if self.snapshot_every is not None:
            return self.snapshot_every
        taken = self.snapshots(unsaved_s=0.0, step_s=step_s, rule=SnapshotRule()).taken
        return max(1, round(taken.interval_s(step_s=step_s, return_gap_s=return_gap_s) / step_s))

    def snapshot_rule(self, hosts: Iterable[str]) -> SnapshotRule:
        """Return under which plans on these hosts snapshots are taken."""
        if self.snapshot_every is not None or self.host_memory_bytes == math.inf:
            return SnapshotRule(at_any_size=self.snapshot_every is not None)
        return SnapshotRule(host_memory=dict.fromkeys(hosts, round(self.host_memory_bytes)))

    @property
    def rate(self) -> FailureModel:
        """The prior failure model."""
        return FailureModel(
            worker_mtbf_s=self.worker_mtbf_s,
            prior_failures=self.prior_failures,
            prior_host_failure_fraction=self.host_failure_fraction,
        )

    @property
    def after_loss(self) -> StallModel:
        """The phases of a stall after a loss whose decision was prepared."""
        return StallModel(detect_s=self.detect_s, stop_s=self.stop_s, decide_s=self.decide_s, regroup_s=self.regroup_s)

    @property
    def after_surprise(self) -> StallModel:
        """The phases of a stall after a loss whose decision was not prepared."""
        return replace(self.after_loss, decide_s=self.search_s)

    @property
    def after_switch(self) -> StallModel:
        """The phases of a stall if the change was prepared during training: none."""
        return StallModel(detect_s=0.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0)

    @property
    def after_change(self) -> StallModel:
        """The phases of a stall without a loss: nothing has to be detected, and the step is finished first."""
        return replace(self.after_loss, detect_s=0.0, stop_s=0.0)
