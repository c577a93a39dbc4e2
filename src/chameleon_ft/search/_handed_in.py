"""Plans that a search is handed to compare with its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chameleon_ft.estimate import estimate_parts
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, default_limits
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.transfer import moved_bytes


def weighed(
    others: Mapping[str, Plan],
    costs: CostModel,
    current: Placement | None,
    given: Mapping[int, InFlightLimit] | None,
) -> tuple[list[FoundPlan], dict[str, int]]:
    """The plans handed in, and the bytes that are missing where one does not fit even with the fewest in flight.

    Or with those of the `given` ceiling.
    """
    found: list[FoundPlan] = []
    too_large: dict[str, int] = {}
    for name, plan in others.items():
        for ceiling in (None, default_limits(plan)) if given is None else (_of_workers(given, plan.workers),):
            estimate = estimate_parts(plan, best_parts(plan, costs, ceiling=ceiling), costs)
            missing = estimate.over_capacity(costs)
            if not missing:
                found.append(
                    FoundPlan(
                        name=name,
                        plan=plan,
                        ceiling=FrozenMap(ceiling or {}),
                        step_s=estimate.step_s,
                        program_s=estimate.program_s,
                        peak_bytes=max(estimate.peak_bytes.values()),
                        moved_bytes=moved_bytes(current, plan.placement, costs.workload.layers),
                        last_hosts=len(plan.placement.indispensable(costs.cluster.hosts)),
                    )
                )
                break
            too_large[name] = max(missing.values())
    return found, {name: missing for name, missing in too_large.items() if name not in {each.name for each in found}}


def _of_workers(ceiling: Mapping[int, InFlightLimit], workers: Iterable[int]) -> dict[int, InFlightLimit]:
    return {worker: ceiling[worker] for worker in workers if worker in ceiling}
