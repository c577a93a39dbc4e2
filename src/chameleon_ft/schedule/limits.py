"""How many micro-batches a worker may hold on to at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Hop, Plan
from chameleon_ft.schedule._records import Integers

__all__ = ["UNLIMITED", "InFlightLimit", "default_limits", "limits_array", "limits_of_array", "limits_of_routes"]


@dataclass(frozen=True, slots=True)
class InFlightLimit:
    """Bounds on what a worker keeps in memory between operations, counted in hops of micro-batches.

    Attributes:
        in_flight: hops forwarded whose B or I has not run yet.
        kept: those, and the ones whose W has not run yet. Without split backward it equals what is in flight.
        deferred: hops whose I has run and whose W has not; None where only `kept` bounds them. What I leaves for W can
            be many times what F keeps for a worker that recomputes.

    Raises:
        PlanError: unless 1 <= in_flight <= kept, and 1 <= deferred.
    """

    in_flight: int
    kept: int
    deferred: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= self.kept:
            raise PlanError(f"a limit needs 1 <= in_flight <= kept; got in_flight {self.in_flight}, kept {self.kept}")
        if self.deferred is not None and self.deferred < 1:
            raise PlanError(f"a limit needs 1 <= deferred; got deferred {self.deferred}")


UNLIMITED: Final = InFlightLimit(2**31, 2**31)
"""More than any program keeps."""


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
    # By identity: hashing hops is slow, and most routes share one tuple of hops.
    for hops in {id(hops): hops for hops in routes}.values():
        depth = len(hops)
        for position, hop in enumerate(hops):
            in_flight[hop.worker] = max(in_flight[hop.worker], depth - position)
            kept[hop.worker] = max(kept[hop.worker], depth)
    return {worker: InFlightLimit(in_flight[worker], kept[worker]) for worker in in_flight}


def limits_of_array(limits: Integers) -> list[InFlightLimit]:
    """The limits of the columns of an int64 [3, workers] array; `deferred` is None where `kept` bounds as much."""
    return [
        InFlightLimit(in_flight, kept, deferred if deferred < kept else None)
        for in_flight, kept, deferred in limits.T.tolist()
    ]


def limits_array(workers: Iterable[int], limits: Mapping[int, InFlightLimit]) -> Integers:
    """In flight, kept and deferred of these workers, `UNLIMITED` where `limits` lacks one; int64 [3, workers]."""
    own = [limits.get(worker, UNLIMITED) for worker in workers]
    deferred = [limit.kept if limit.deferred is None else limit.deferred for limit in own]
    return np.array([[limit.in_flight for limit in own], [limit.kept for limit in own], deferred], np.int64)
