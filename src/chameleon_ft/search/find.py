"""The plan of least step time for the live workers, with a proven bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.shards import owned_share
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.search.infeasible import InfeasibleError, infeasible_error
from chameleon_ft.search.placement import evaluated, figures, predicted
from chameleon_ft.search.plan_search import PlanSearch, bound_of_best_workers_s
from chameleon_ft.search.result import DEFAULT_EFFORT, FoundPlan, SearchOptions, SearchResult, SizeFigures, pareto_front
from chameleon_ft.search.worker_classes import merged_clusters

# The largest share of the workers that a plan leaves idle because they are slow.
_FEW_SLOW: Final = 1 / 8


def find_plan(
    costs: CostModel,
    *,
    current: Placement | None = None,
    others: Mapping[str, Plan] | None = None,
    others_in_flight_limits: Mapping[int, InFlightLimit] | None = None,
    min_holders: int = 1,
    effort: int | None = DEFAULT_EFFORT,
) -> SearchResult:
    """Return the fastest plan found for the workers of `costs.cluster`: pipelines, or one of `others`.

    Pipelines run side by side with any depths, cuts and shares of the micro-batches; stages may recompute any number of
    their layers, and workers may stay idle. With `effort` None the search continues until no such plan can be faster
    (see `SearchResult.exhaustive`), which is impractical on large instances. Deterministic.

    Args:
        costs: costs of the workload on the live workers.
        current: layers that the live workers hold now; None if they hold none, so that all layers have to move.
        others: plans to compare with, by name, such as a rerouted one.
        others_in_flight_limits: in-flight limits under `others`, if a run imposes them. By default memory alone limits
            them, or `default_limits` where memory does not suffice for that.
        min_holders: least number of holders of every layer. With two, the plan survives the loss of any one worker;
            the more there are, the less of its work each of its peers takes over. Bounds cover all plans.
        effort: approximate number of operations to schedule before the search stops; None for no limit. A complete
            search follows if the model and the cluster are small. Bounds take additional time.

    Raises:
        InfeasibleError: neither pipelines nor `others` fit the memory of the workers, or none with so many holders.
        PlanError: no worker is left.
        ConfigError: a plan of `others` has a worker outside the cluster.
    """
    _require_workers(costs)
    others_found, too_large = evaluated(others or {}, costs, current, others_in_flight_limits)
    options = SearchOptions.of(effort, min_holders=min_holders)
    search = _search(costs, current, options)
    plans = search.plans
    found = [*plans, *_without_slow_workers(costs, current, options), *others_found]
    if min_holders > 1:
        found = [each for each in found if each.plan.placement.fewest_holders >= min_holders]
        if plans and not found:
            raise InfeasibleError(f"no plan was found in which every layer has {min_holders} holders")
    if not found:
        raise infeasible_error(search.costs)
    best, *alternatives = pareto_front(found, figures)
    return SearchResult(
        best=best,
        bound_s=search.bound_s,
        exhaustive=search.exhaustive,
        mixes=search.mixes,
        alternatives=tuple(alternatives),
        recuts=tuple(each for each in plans if each.name == "recut"),
        too_large=FrozenMap(too_large),
    )


@dataclass(frozen=True, slots=True)
class _Searched:
    """The plans that a search has found, and its certificate; `costs` are those it has searched with."""

    plans: Sequence[FoundPlan]
    bound_s: float
    exhaustive: bool
    mixes: int
    costs: CostModel


def _search(costs: CostModel, current: Placement | None, options: SearchOptions) -> _Searched:
    """Search among pipelines.

    If holders share the optimizer's state, a worker needs the less memory, the more pipelines there are. A first search
    assumes the least memory, for its bound. If its best plan does not fit, others assume that of a number of pipelines,
    and find plans with at least as many.
    """
    workload, workers = costs.workload, costs.cluster.workers
    if workload.owners is None or all(worker.memory_bytes is None for worker in workers):
        return _search_all(costs, current, options)
    first = _search_all(with_shares(costs), current, options)
    plans = _fitting(first.plans, costs, current)
    if not first.plans or (plans and plans[0].step_s <= first.plans[0].step_s):
        return replace(first, plans=plans)
    holders, mixes = first.plans[0].plan.placement.fewest_holders, first.mixes
    while holders:
        least = replace(options, min_holders=max(options.min_holders, holders))
        other = _search_all(with_shares(costs, holders), current, least)
        plans += _fitting(other.plans, costs, current)
        mixes += other.mixes
        # As many owners as holders have all of the state each.
        holders = holders // 2 if holders > 2 * workload.owners else int(holders > 1)
    plans.sort(key=lambda each: each.step_s)
    return replace(first, plans=plans, exhaustive=False, mixes=mixes)


def _search_all(costs: CostModel, current: Placement | None, options: SearchOptions) -> _Searched:
    for cluster in merged_clusters(costs.cluster):
        search = PlanSearch(costs, cluster, current, options)
        if plans := search.plans():
            break
    return _Searched(plans, search.bound_s, search.exhaustive, search.mixes, CostModel(costs.workload, cluster))


def with_shares(costs: CostModel, holders: int | None = None) -> CostModel:
    """Return costs in which each layer has the bytes of one of so many holders; of the most that can be, if None."""
    workload = costs.workload
    if workload.owners is None:
        return costs
    most = min(len(costs.cluster.workers), workload.micro_batches) if holders is None else holders
    layers = tuple(
        replace(
            layer,
            optimizer_bytes=layer.optimizer_bytes - divided + owned_share(divided, most, workload.owners),
        )
        for layer, divided in zip(workload.layers, workload.divided_bytes, strict=True)
    )
    return CostModel(replace(workload, layers=layers, owners=None), costs.cluster)


def _fitting(plans: Sequence[FoundPlan], costs: CostModel, current: Placement | None) -> list[FoundPlan]:
    """Return the plans that fit the memory of their workers, with their predictions for `costs`."""
    found = [(each, *predicted(each.name, each.plan, costs, current, each.in_flight_limits)) for each in plans]
    return [replace(own, schedules=each.schedules) for each, own, missing in found if not missing]


def _without_slow_workers(costs: CostModel, current: Placement | None, options: SearchOptions) -> list[FoundPlan]:
    """Return plans that leave a few slow workers idle.

    Each of their speeds is a class of workers to the search, and the more classes there are, the less of all mixes it
    covers. Without these workers it covers more, and that is often worth more than the work that they would do.
    """
    cluster = costs.cluster
    fastest = max(worker.speed for worker in cluster.workers)
    slow = [worker.id for worker in cluster.workers if worker.speed < fastest]
    if not 0 < len(slow) <= len(cluster.workers) * _FEW_SLOW:
        return []
    left = CostModel(costs.workload, cluster.without(slow))
    held = None if current is None else current.without(slow)
    return list(_search(left, held, options).plans)


def find_plan_of_sizes(costs: Sequence[CostModel], *, effort: int | None = DEFAULT_EFFORT) -> SearchResult:
    """Return the fastest plan found over several micro-batch sizes of one global batch.

    `find_plan` searches the size of least bound first. A size is ruled out if its bound is not below the best step
    found so far.

    Args:
        costs: costs of the workload at each micro-batch size, on the same live workers.
        effort: effort of `find_plan` for each size.

    Raises:
        InfeasibleError: no plan of any size fits the memory of the workers; the message is about the smallest size.
        PlanError: no worker is left.
        ConfigError: no costs, two of one size, or costs that differ in model, global batch or workers.
    """
    workloads = [each.workload for each in costs]
    by_size = {each.workload.micro_batch_size: each for each in costs}
    # Links may be measured anew for each size.
    common = {
        (own.samples, tuple(each.cluster.hosts.items()), tuple(layer.param_bytes for layer in own.layers))
        for each, own in zip(costs, workloads, strict=True)
    }
    if len(common) != 1 or len(by_size) < len(costs):
        raise ConfigError(
            "micro-batch sizes are compared for one model, the same workers and the same samples in a step, each size "
            f"once; got {', '.join(f'{own.micro_batch_size} of {own.samples}' for own in workloads) or 'none'}"
        )
    _require_workers(costs[0])
    bounds_s = {size: bound_of_best_workers_s(with_shares(each)) for size, each in sorted(by_size.items())}
    found: dict[int, SearchResult] = {}
    best_s = math.inf
    for size in sorted(bounds_s, key=bounds_s.__getitem__):
        if bounds_s[size] < best_s:
            try:
                found[size] = find_plan(by_size[size], effort=effort)
            except InfeasibleError:
                bounds_s[size] = math.inf
                continue
            bounds_s[size] = found[size].bound_s
            best_s = min(best_s, found[size].best.step_s)
    if not found:
        # This raises InfeasibleError again.
        return find_plan(by_size[min(by_size)], effort=effort)
    return replace(
        min(found.values(), key=lambda each: each.best.step_s),
        bound_s=min(bounds_s.values()),
        exhaustive=all(each.exhaustive for each in found.values()),
        mixes=sum(each.mixes for each in found.values()),
        sizes=tuple(
            SizeFigures(size, bound_s, found[size].best.step_s if size in found else None)
            for size, bound_s in bounds_s.items()
        ),
    )


def _require_workers(costs: CostModel) -> None:
    if not costs.cluster.workers:
        raise PlanError("no worker is left to plan for; start at least one")
