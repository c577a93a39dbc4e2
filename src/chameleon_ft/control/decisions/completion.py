"""The owners of slices and the keepers of snapshots under plans to switch to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.config import RunConfig
from chameleon_ft.control.decisions.keepers import with_keepers
from chameleon_ft.control.decisions.owners import lacks_copies, restoring_copies, with_owners_between
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.schedule import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Gives plans to switch to their owners and keepers, which takes seconds for thousands of workers.

    Attributes:
        active: the plan in force.
        hosts: worker -> host.
        live: the workers that stay.
        host_memory: host -> bytes available for its workers, as far as known.
        migrates: whether anything moves during training.
    """

    config: RunConfig
    costs: CostModel
    active: ActivePlan
    hosts: Mapping[int, str]
    live: tuple[int, ...]
    host_memory: Mapping[str, int]
    migrates: bool

    def __call__(self, plans: Sequence[RecoveryPlan]) -> tuple[RecoveryPlan, ...]:
        """Return the plans with owners and keepers.

        If there is no plan but slices have lost owners, the one in force, in which they get others.
        """
        active, redundancy = self.active, self.config.owners
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
        return tuple(
            with_keepers(plan, self.hosts, self.config, lambda _: self.costs, self.host_memory) for plan in plans
        )
