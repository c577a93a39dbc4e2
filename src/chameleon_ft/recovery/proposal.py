"""A proposal of a policy, and the plans of a search on the workers that hold most of what they need already."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from chameleon_ft.errors import NoHolderError, PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.schedule import InFlightLimit, PipelineSchedule
from chameleon_ft.search import FoundPlan, pareto_front
from chameleon_ft.transfer import (
    Holding,
    assign_roles,
    holdings_of,
    min_moved_bytes,
    moved_bytes,
    remap_placement,
    remap_plan,
    worker_kinds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan to continue with, or why there is none of its kind.

    Attributes:
        name: the kind of plan; different for every proposal of a policy.
        plan: the plan, on live workers; None if there is none.
        in_flight_limits: the most that its workers can keep; workers that are left out are not bounded.
        from_checkpoint: True if the state comes from a checkpoint, and not from other workers.
        reason: why there is no plan; None if there is one.
        schedules: The schedules of its pipelines, if a search has found them already, for `best_parts`.

    Raises:
        PlanError: both a plan and a reason, or neither.
    """

    name: str
    plan: Plan | None = None
    in_flight_limits: Mapping[int, InFlightLimit] = field(default_factory=lambda: FrozenMap({}))
    from_checkpoint: bool = False
    reason: str | None = None
    schedules: tuple[PipelineSchedule, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))
        if (self.plan is None) == (self.reason is None):
            raise PlanError(f"proposal {self.name!r} needs either a plan or a reason why there is none")

    @classmethod
    def of(cls, name: str, found: FoundPlan, *, from_checkpoint: bool = False) -> Proposal:
        """Propose a plan of a search."""
        return cls(
            name=name,
            plan=found.plan,
            in_flight_limits=found.in_flight_limits,
            from_checkpoint=from_checkpoint,
            schedules=found.schedules,
        )


def remap_workers(name: str, plans: Sequence[FoundPlan], context: DecisionContext) -> list[Proposal]:
    """Propose each plan with its workers exchanged for others of their kind, named `name`, `name`-2 and so on.

    Workers take each other's places on their own host, where that makes no difference to the step; and on any host if
    less has to move then, which may cost time in every step. Plans that another one equals or beats in everything are
    left out.
    """
    held, layers, cluster = context.held, context.costs.workload.layers, context.costs.cluster
    if plans and (unheld := held.unheld_layers):
        return [Proposal(name=name, reason=str(NoHolderError(unheld)))]
    kinds, kinds_on_hosts = worker_kinds(cluster), _kinds_on_hosts(context)
    found: list[tuple[tuple[float, ...], FoundPlan, Mapping[int, int]]] = []

    def add(plan: FoundPlan, kinds: Mapping[int, Hashable], *, any_host: bool) -> int:
        roles = assign_roles(holdings_of(held, kinds), _wanted(plan.plan, kinds), layers)
        placement = remap_placement(plan.plan.placement, roles)
        num_bytes = moved_bytes(held, placement, layers)
        hosts = len(placement.single_points_of_failure(cluster.hosts))
        # More than two holders make the next loss cheaper if the interrupted step is completed.
        holders = placement.fewest_holders if context.salvages else min(2, placement.fewest_holders)
        figures = plan.step_s, any_host, num_bytes, hosts, -holders
        found.append((figures, plan, roles))
        return num_bytes

    # A search may have found the plan with other workers already.
    min_bytes = min((each.moved_bytes for each in plans), default=0)
    for each in plans:
        on_hosts_bytes = add(each, kinds_on_hosts, any_host=False)
        anywhere_bytes = min_moved_bytes(holdings_of(held, kinds), _wanted(each.plan, kinds), layers)
        if anywhere_bytes < min(on_hosts_bytes, min_bytes):
            add(each, kinds, any_host=True)
    return [
        Proposal(
            name=numbered(name, number),
            plan=remap_plan(each.plan, roles),
            in_flight_limits={roles[place]: limit for place, limit in each.in_flight_limits.items()},
            schedules=each.schedules,
        )
        for number, (_, each, roles) in enumerate(pareto_front(found, itemgetter(0)), start=1)
    ]


def on_holders(plan: Plan, context: DecisionContext) -> Plan:
    """Return the plan with workers of a kind exchanged within hosts, so that the least has to move."""
    kinds = _kinds_on_hosts(context)
    layers = context.costs.workload.layers
    return remap_plan(plan, assign_roles(holdings_of(context.held, kinds), _wanted(plan, kinds), layers))


def numbered(name: str, number: int) -> str:
    """Return the name of the proposal with this number, counted from 1, among those of a kind."""
    return name if number == 1 else f"{name}-{number}"


def _kinds_on_hosts(context: DecisionContext) -> dict[int, Hashable]:
    """Return the host and kind of each worker."""
    cluster = context.costs.cluster
    kinds = worker_kinds(cluster)
    return {worker.id: (worker.host, kinds[worker.id]) for worker in cluster.workers}


def _wanted(plan: Plan, kinds: Mapping[int, Hashable]) -> dict[int, Holding]:
    """Return the holding that each place of a plan needs."""
    return {place: Holding(ranges, kinds[place]) for place, ranges in plan.placement.ranges.items()}
