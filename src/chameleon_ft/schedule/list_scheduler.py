"""List scheduling: programs from plans by one event loop, under limits and preferences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._network import Network, builder_of
from chameleon_ft.schedule._orders import build_program
from chameleon_ft.schedule._records import Floats, Integers
from chameleon_ft.schedule.components import Component, components
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit, default_limits, limits_array
from chameleon_ft.schedule.program import Program

__all__ = ["Preference", "Rules", "Schedule", "list_schedule", "replayed", "schedule", "schedule_under"]

# With this patience and free messages the split schedule of a plain pipeline under the default limits meets its bound
# for every ratio of F, I and W that the tests try.
_PATIENCE: Final = 0.75


class Preference(StrEnum):
    """What a worker runs first when a forward and a backward are both ready and its limits allow both.

    Forward first keeps as many micro-batches in flight as the limits allow, which is what 1F1B and ZB-H1 do, and is the
    better choice where limits are tight. Backward first frees memory as early as it can, and is often better where they
    are not.
    """

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """How workers choose among their ready operations.

    Attributes:
        limits: micro-batches in flight, kept and deferred by worker index, as in `InFlightLimit`; int64 [3, workers].
        forward_first: whether a forward goes before a backward when both are ready and the limits allow it.
        patience: a worker delays a W if a tensor for an F, B or I will arrive before this share of the W is done.
        gradients_only: whether only gradients may be sent ahead into a full channel. Then blocked sends can form
            cycles in one direction only: fewer choices, but hardly ever a dead end.
    """

    limits: Integers
    forward_first: bool
    patience: float = _PATIENCE
    gradients_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The order of operations on each worker, and the times that result.

    Attributes:
        network: the problem.
        rules: the rules that the schedule was made under; its limits are kept unless `beyond_limits`.
        codes: of all operations, worker by worker, each worker's in its order; int64 [operations].
        ends_s: end of each operation by its code, from the replay without blocking sends; float64 [operations].
        step_s: the latest of these.
        strained: whether a send that could close a cycle of blocked workers was denied, or a limit was exceeded, while
            activations too could be sent ahead: other rules with `gradients_only` may be better.
        beyond_limits: whether a limit was exceeded because no worker could run anything otherwise.
    """

    network: Network
    rules: Rules
    codes: Integers
    ends_s: Floats
    step_s: float
    strained: bool = False
    beyond_limits: bool = False

    @property
    def limits(self) -> Integers:
        """Micro-batches that each worker may have in flight, keep and defer; int64 [3, workers]."""
        return self.rules.limits

    @property
    def orders(self) -> list[Integers]:
        """Codes of operations by worker index, in order."""
        return [self.codes[start:stop] for start, stop in pairwise(self.network.first.tolist())]

    @property
    def last_s(self) -> list[float]:
        """By worker index, the end of its last operation; zero for a worker that has none."""
        ends = self.network.first
        last = self.ends_s[self.codes[np.maximum(ends[1:], 1) - 1]]
        found: list[float] = np.where(ends[1:] > ends[:-1], last, 0.0).tolist()
        return found


def list_schedule(
    plan: Plan,
    costs: CostModel,
    limits: Mapping[int, InFlightLimit] | None = None,
    *,
    prefer: Preference = Preference.FORWARD,
) -> Program:
    """A program that runs `plan`, made by letting every worker take what it can run as soon as it is free.

    On a pipeline of equal stages under `default_limits` the program is 1F1B, and with split backward ZB-H1. On any plan
    it is deterministic and passes `check_program`. Among ready operations of a kind a worker takes the micro-batch that
    is earliest in its own pipeline; a W is run when nothing else is ready or about to be, or to make room for an F.

    A limit is exceeded, by as little as possible, only if otherwise no worker could run anything: limits that are too
    tight for a worker on several stages of one route.

    Args:
        plan: what to run.
        costs: how long operations and messages take.
        limits: how much each worker may keep; `default_limits(plan)` when None.
        prefer: what goes first when a forward and a backward are both ready.

    Raises:
        PlanError: `limits` misses a worker of the plan, or the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    limits = default_limits(plan) if limits is None else limits
    if missing := [worker for worker in plan.workers if worker not in limits]:
        raise PlanError(f"the limits say nothing about worker {missing[0]}; give one for every worker of the plan")
    builder = builder_of(plan, costs)
    orders: list[tuple[Component, list[Integers]]] = []
    for component in components(plan.routes):
        own = builder.part(component.workers, split_backward=plan.splits(component.workers[0]))
        rules = Rules(limits=limits_array(own.workers, limits), forward_first=prefer is Preference.FORWARD)
        orders.append((component, schedule(own.network(component.ways, component.taken), rules).orders))
    return build_program(plan, orders)


def schedule(network: Network, rules: Rules, ways: Integers | None = None) -> Schedule:
    """The list schedule under `rules`; after a dead end, under `gradients_only`; then under smaller limits; in the end
    one micro-batch at a time, which cannot deadlock.

    Dead ends occur if routes share workers in many ways, or if a worker comes more than once in the order of the
    layers. `ways` are the first slots of the routes by priority; `network.ways` when None.
    """
    ways = network.ways if ways is None else ways
    while True:
        found = schedule_under(network, rules, ways)
        if found is None and not rules.gradients_only:
            found = schedule_under(network, replace(rules, gradients_only=True), ways)
        if found is not None:
            return found
        in_flight, *others = rules.limits
        if in_flight.max() == 1:
            return _one_by_one(network, rules)
        rules = replace(rules, limits=np.stack([np.maximum(1, in_flight // 2), *others]))


def schedule_under(network: Network, rules: Rules, ways: Integers) -> Schedule | None:
    """The list schedule under exactly these rules, or None at a dead end; see the kernel for both."""
    # Imported here, as everywhere: importing a kernel loads numba, and most users of this module run none.
    from chameleon_ft.schedule._kernels.list_scheduler import scheduled

    found = scheduled(
        network.slots,
        network.channels,
        ways,
        rules.limits,
        split=network.split_backward,
        forward_first=rules.forward_first,
        patience=rules.patience,
        gradients_only=rules.gradients_only,
    )
    if found is None:
        return None
    return replayed(network, rules, found.codes, strained=found.strained, beyond_limits=found.beyond_limits)


def replayed(
    network: Network, rules: Rules, codes: Integers, *, strained: bool = False, beyond_limits: bool = False
) -> Schedule:
    """The schedule with these codes of all operations, worker by worker; see `Schedule` for what is said of it."""
    from chameleon_ft.schedule._kernels.replay import longest_path

    ends_s = longest_path(network.operations, codes, network.first)[1]
    return Schedule(
        network=network,
        rules=rules,
        codes=codes,
        ends_s=ends_s,
        step_s=float(ends_s.max()),
        strained=strained,
        beyond_limits=beyond_limits,
    )


def _one_by_one(network: Network, rules: Rules) -> Schedule:
    """One micro-batch after the other through all its operations: slow, but it cannot deadlock."""
    count = len(network.slots)
    workers = network.slots["worker"].tolist()
    orders: list[list[int]] = [[] for _ in network.workers]
    for start, stop in pairwise([*sorted(network.ways.tolist()), count]):
        for slot in range(start, stop):
            orders[workers[slot]].append(slot)
        for slot in reversed(range(start, stop)):
            orders[workers[slot]].append(count + slot)
            if network.split_backward:
                orders[workers[slot]].append(2 * count + slot)
    return replayed(network, rules, np.array([code for order in orders for code in order]))
