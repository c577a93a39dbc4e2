"""Plans on the workers for which least has to move."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import Plan
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.schedule import InFlightLimit
from chameleon_ft.search import FoundPlan, pareto_front
from chameleon_ft.transfer import Transfer, plan_in_roles, plan_transfer, worker_kinds


def in_roles(name: str, plans: Sequence[FoundPlan], situation: Situation) -> list[Proposal]:
    """Proposals with each plan, its workers exchanged for others of their kind, named `name`, `name`-2 and so on.

    Workers take each other's places on their own host, where that makes no difference to the step; and on any host if
    less has to move then, which may cost time in every step. Left out is what another one beats in everything.
    """
    hosts = situation.costs.cluster.hosts
    # A search may have found the same plan with other workers already.
    least_bytes = min((each.moved_bytes for each in plans), default=0)
    found: list[_InRoles] = []
    for each in plans:
        try:
            transfers = _transfers(each, situation, least_bytes)
        except NoHolderError as error:
            return [Proposal(name=name, reason=str(error))]
        for elsewhere, transfer in enumerate(transfers):
            plan = plan_in_roles(each.plan, transfer.roles)
            ceiling = {transfer.roles[place]: limit for place, limit in each.ceiling.items()}
            last_hosts = len(plan.placement.indispensable(hosts))
            found.append(_InRoles(plan, ceiling, (each.step_s, elsewhere, transfer.total_bytes, last_hosts)))
    return [
        Proposal(name=numbered(name, number), plan=each.plan, ceiling=each.ceiling)
        for number, each in enumerate(pareto_front(found, lambda each: each.figures), start=1)
    ]


@dataclass(frozen=True, slots=True)
class _InRoles:
    """A plan on its workers.

    Its figures are the step time, whether workers of any host were exchanged, so that a step may take longer than that,
    bytes to move, and hosts that have all holders of some layer.
    """

    plan: Plan
    ceiling: Mapping[int, InFlightLimit]
    figures: tuple[float, ...]


def numbered(name: str, number: int) -> str:
    """The name of the first, second and so on of its kind, counted from 1."""
    return name if number == 1 else f"{name}-{number}"


def _transfers(found: FoundPlan, situation: Situation, least_bytes: int) -> list[Transfer]:
    cluster, layers = situation.costs.cluster, situation.costs.workload.layers
    kinds: dict[int, Hashable] = worker_kinds(cluster)
    at_home = {worker.id: (worker.host, kinds[worker.id]) for worker in cluster.workers}
    near, anywhere = (
        plan_transfer(situation.held, found.plan.placement, kinds=kinds_of, layers=layers)
        for kinds_of in (at_home, kinds)
    )
    return [near, anywhere] if anywhere.total_bytes < min(near.total_bytes, least_bytes) else [near]
