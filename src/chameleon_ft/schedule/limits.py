"""How many micro-batches a worker may hold on to at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Hop, Plan

__all__ = ["InFlightLimit", "default_limits"]


@dataclass(frozen=True, slots=True)
class InFlightLimit:
    """Bounds on what a worker keeps in memory between operations, counted in hops of micro-batches.

    Attributes:
        in_flight: hops forwarded whose B or I has not run yet.
        kept: those, and the ones whose W has not run yet. Without split backward it equals what is in flight.

    Raises:
        PlanError: unless 1 <= in_flight <= kept.
    """

    in_flight: int
    kept: int

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= self.kept:
            raise PlanError(f"a limit needs 1 <= in_flight <= kept; got in_flight {self.in_flight}, kept {self.kept}")


def default_limits(plan: Plan) -> Mapping[int, InFlightLimit]:
    """The limits under which the list scheduler makes 1F1B, and with split backward ZB-H1.

    In flight: the worker's largest distance from the end of a route, which is p - i at stage i of a plain pipeline of
    depth p. Kept: the length of the longest route through the worker, which is what stage 0 of 1F1B keeps, and ZB-H1
    (Qi et al., Zero Bubble Pipeline Parallelism, 2023) lets every stage keep.
    """
    return limits_of_routes(plan.workers, (route.hops for route in plan.routes))


def limits_of_routes(workers: Iterable[int], routes: Iterable[tuple[Hop, ...]]) -> dict[int, InFlightLimit]:
    """`default_limits` of these workers and routes, the latter given by their hops."""
    in_flight = dict.fromkeys(workers, 1)
    kept = dict(in_flight)
    # By identity, for hops are slow to hash, and most routes share theirs.
    for hops in {id(hops): hops for hops in routes}.values():
        depth = len(hops)
        for position, hop in enumerate(hops):
            in_flight[hop.worker] = max(in_flight[hop.worker], depth - position)
            kept[hop.worker] = max(kept[hop.worker], depth)
    return {worker: InFlightLimit(in_flight[worker], kept[worker]) for worker in in_flight}
