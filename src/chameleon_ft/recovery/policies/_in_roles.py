"""Plans on the workers for which least has to move."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import FoundPlan
from chameleon_ft.transfer import Transfer, plan_in_roles, plan_transfer, worker_kinds


def in_roles(name: str, plans: Sequence[FoundPlan], situation: Situation) -> list[Proposal]:
    """Proposals with each plan, its workers exchanged for others of their kind, named `name`, `name`-2 and so on.

    Workers take each other's places on their own host, where that makes no difference to the step; and on any host if
    less has to move then, which may cost time in every step.
    """
    found: list[Proposal] = []
    # A search may have found the same plan with other workers already.
    least_bytes = min((each.moved_bytes for each in plans), default=0)
    for each in plans:
        try:
            transfers = _transfers(each, situation, least_bytes)
        except NoHolderError as error:
            return [Proposal(name=name, reason=str(error))]
        for transfer in transfers:
            found.append(
                Proposal(
                    name=numbered(name, len(found) + 1),
                    plan=plan_in_roles(each.plan, transfer.roles),
                    ceiling={transfer.roles[place]: limit for place, limit in each.ceiling.items()},
                )
            )
    return found


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
