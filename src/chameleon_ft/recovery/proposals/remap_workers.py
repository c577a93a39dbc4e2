"""Plans on the workers for which least has to move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import FoundPlan, pareto_front
from chameleon_ft.transfer import (
    Holding,
    assign_roles,
    holdings_of,
    least_moved_bytes,
    moved_bytes,
    remap_placement,
    remap_plan,
    worker_kinds,
)

__all__ = ["fewest_holders", "numbered", "on_holders", "remap_workers"]


def remap_workers(name: str, plans: Sequence[FoundPlan], context: DecisionContext) -> list[Proposal]:
    """Proposals with each plan, its workers exchanged for others of their kind, named `name`, `name`-2 and so on.

    Workers take each other's places on their own host, where that makes no difference to the step; and on any host if
    less has to move then, which may cost time in every step. Left out is what another one beats in everything.
    """
    held = context.held
    if plans and (unheld := held.unheld_layers):
        return [Proposal(name=name, reason=str(NoHolderError(unheld)))]
    roles = _Roles(held, context.costs)
    # A search may have found the same plan with other workers already.
    least_bytes = min((each.moved_bytes for each in plans), default=0)
    found = [on_workers for each in plans for on_workers in roles.of(each, least_bytes)]
    return [
        Proposal(
            name=numbered(name, number),
            plan=remap_plan(each.found.plan, each.roles),
            in_flight_limits={each.roles[place]: limit for place, limit in each.found.in_flight_limits.items()},
            schedules=each.found.schedules,
        )
        for number, each in enumerate(pareto_front(found, lambda each: each.figures), start=1)
    ]


def on_holders(plan: Plan, context: DecisionContext) -> Plan:
    """Return the plan with workers of a kind exchanged within hosts, so that the least has to move."""
    layers, cluster = context.costs.workload.layers, context.costs.cluster
    kinds = worker_kinds(cluster)
    at_home = {worker.id: (worker.host, kinds[worker.id]) for worker in cluster.workers}
    wanted = {place: Holding(own, at_home[place]) for place, own in plan.placement.ranges.items()}
    return remap_plan(plan, assign_roles(holdings_of(context.held, at_home), wanted, layers))


def fewest_holders(placement: Placement) -> int:
    """Return how many workers hold the layer that the fewest hold."""
    return min(len(placement.holders(layer)) for layer in range(placement.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemappedPlan:
    """A plan on its workers.

    Attributes:
        found: the plan.
        roles: the worker that takes each place in it.
        elsewhere: whether workers of any host were exchanged, so that a step may take longer.
        moved_bytes: what moves then.
        host_single_points_of_failure: hosts that have all holders of some layer then.
        holders: workers that hold the layer with the fewest, up to two.
    """

    found: FoundPlan
    roles: Mapping[int, int]
    elsewhere: bool
    moved_bytes: int
    host_single_points_of_failure: int
    holders: int

    @property
    def figures(self) -> tuple[float, ...]:
        """What another one may beat."""
        return self.found.step_s, self.elsewhere, self.moved_bytes, self.host_single_points_of_failure, -self.holders


class _Roles:
    """Who takes which place of plans, of those who hold this now."""

    def __init__(self, held: Placement, costs: CostModel) -> None:
        self._current = held
        cluster = costs.cluster
        self._hosts = cluster.hosts
        self._layers = costs.workload.layers
        self._kinds = worker_kinds(cluster)
        self._at_home = {worker.id: (worker.host, self._kinds[worker.id]) for worker in cluster.workers}
        self._held, self._held_at_home = (holdings_of(held, kinds) for kinds in (self._kinds, self._at_home))

    def of(self, found: FoundPlan, least_bytes: int) -> Iterator[_RemappedPlan]:
        """On their own hosts, and on any if less has to move then than that, and than `least_bytes`."""
        ranges = found.plan.placement.ranges
        at_home = {place: Holding(own, self._at_home[place]) for place, own in ranges.items()}
        near = self._remap(found, elsewhere=False, roles=assign_roles(self._held_at_home, at_home, self._layers))
        yield near
        anywhere = {place: Holding(own, self._kinds[place]) for place, own in ranges.items()}
        if least_moved_bytes(self._held, anywhere, self._layers) < min(near.moved_bytes, least_bytes):
            yield self._remap(found, elsewhere=True, roles=assign_roles(self._held, anywhere, self._layers))

    def _remap(self, found: FoundPlan, *, elsewhere: bool, roles: Mapping[int, int]) -> _RemappedPlan:
        placement = remap_placement(found.plan.placement, roles)
        return _RemappedPlan(
            found=found,
            roles=roles,
            elsewhere=elsewhere,
            moved_bytes=moved_bytes(self._current, placement, self._layers),
            host_single_points_of_failure=len(placement.single_points_of_failure(self._hosts)),
            holders=min(2, fewest_holders(placement)),
        )


def numbered(name: str, number: int) -> str:
    """The name of the first, second and so on of its kind, counted from 1."""
    return name if number == 1 else f"{name}-{number}"
