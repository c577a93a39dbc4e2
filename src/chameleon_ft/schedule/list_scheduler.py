"""List scheduling of networks under limits and preferences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.schedule.network import Network
from chameleon_ft.schedule.records import Floats, HopPath, Integers, distinct_paths


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
    """Return the limits under which the list scheduler makes 1F1B, and with split backward ZB-H1.

    In flight: the worker's largest distance from the end of a route, which is p - i at stage i of a plain pipeline of
    depth p. Kept: the length of the longest route through the worker, which is what stage 0 of 1F1B keeps, and ZB-H1
    (Qi et al., Zero Bubble Pipeline Parallelism, 2023) lets every stage keep.
    """
    return limits_of_paths(plan.workers, distinct_paths(route.hops for route in plan.routes)[0])


def limits_of_paths(workers: Iterable[int], paths: Iterable[HopPath]) -> dict[int, InFlightLimit]:
    """Return `default_limits` of these workers and the paths of their routes."""
    in_flight = dict.fromkeys(workers, 1)
    kept = dict(in_flight)
    for hops in paths:
        for position, hop in enumerate(hops):
            in_flight[hop.worker] = max(in_flight[hop.worker], len(hops) - position)
            kept[hop.worker] = max(kept[hop.worker], len(hops))
    return {worker: InFlightLimit(in_flight[worker], kept[worker]) for worker in in_flight}


def limits_of_array(limits: Integers) -> list[InFlightLimit]:
    """Return the limits in an int64 [3, workers] array; `deferred` is None where `kept` is as tight."""
    return [
        InFlightLimit(in_flight, kept, deferred if deferred < kept else None)
        for in_flight, kept, deferred in limits.T.tolist()
    ]


def limits_array(workers: Iterable[int], limits: Mapping[int, InFlightLimit]) -> Integers:
    """Return in flight, kept and deferred of these workers, `UNLIMITED` if `limits` lacks one; int64 [3, workers]."""
    own = [limits.get(worker, UNLIMITED) for worker in workers]
    deferred = [limit.kept if limit.deferred is None else limit.deferred for limit in own]
    return np.array([[limit.in_flight for limit in own], [limit.kept for limit in own], deferred], np.int64)


# With this patience and free messages, split schedules of plain pipelines under the default limits meet the bound for
# every ratio of F, I and W in the tests.
_PATIENCE: Final = 0.75


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """How workers choose among their ready operations.

    Attributes:
        limits: micro-batches in flight, kept and deferred by worker index, as in `InFlightLimit`; int64 [3, workers].
        forward_first: a forward goes before a backward when both are ready and the limits allow it.
        patience: a worker delays a W if the input of an F, B or I will arrive before this share of the W is done.
        gradients_only: only gradients may be sent ahead into a full channel. Blocked sends then form cycles in one
            direction only: fewer choices, but hardly ever a dead end.
    """

    limits: Integers
    forward_first: bool
    patience: float = _PATIENCE
    gradients_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The order of operations on each worker, and the times that result.

    Attributes:
        first: the place in `codes` of each worker's first operation, and in the end their number; int64 [workers + 1].
        rules: rules that made the schedule, which keeps their limits unless `beyond_limits`.
        codes: all operations, worker by worker, each worker's in its order; int64 [operations].
        ends_s: end of each operation by its code, from the replay without blocking sends; float64 [operations].
        step_s: the latest of these.
        strained: activations could be sent ahead, and a send that could close a cycle of blocked workers was denied, or
            a limit exceeded: rules with `gradients_only` may be better.
        beyond_limits: a limit was exceeded because otherwise no worker could run anything.
    """

    first: Integers
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
        return [self.codes[start:stop] for start, stop in pairwise(self.first.tolist())]

    @property
    def last_s(self) -> tuple[float, ...]:
        """By worker index, the end of its last operation; zero for a worker that has none."""
        last = self.ends_s[self.codes[np.maximum(self.first[1:], 1) - 1]]
        return tuple(np.where(self.first[1:] > self.first[:-1], last, 0.0).tolist())


def schedule(network: Network, rules: Rules, by_priority: Integers | None = None) -> Schedule:
    """Return the list schedule under `rules`; after a dead end, with `gradients_only`; then under smaller limits; in
    the end one micro-batch at a time, which cannot deadlock.

    Dead ends occur if routes share workers in many ways, or if a route visits a worker more than once. `by_priority`
    has the first slots of the routes; `network.by_priority` when None.
    """
    by_priority = network.by_priority if by_priority is None else by_priority
    while True:
        found = schedule_under(network, rules, by_priority)
        if found is None and not rules.gradients_only:
            found = schedule_under(network, replace(rules, gradients_only=True), by_priority)
        if found is not None:
            return found
        in_flight, *others = rules.limits
        if in_flight.max() == 1:
            return _one_by_one(network, rules)
        rules = replace(rules, limits=np.stack([np.maximum(1, in_flight // 2), *others]))


def schedule_under(network: Network, rules: Rules, by_priority: Integers) -> Schedule | None:
    """Return the list schedule under exactly these rules, or None at a dead end; the kernel defines both."""
    # Imported here, as everywhere: importing a kernel loads numba, and most users of this module run none.
    from chameleon_ft.schedule._kernels import scheduler_state as state
    from chameleon_ft.schedule._kernels.list_scheduler import run_scheduler

    num_slots, num_workers, count = len(network.slots), len(network.workers), int(network.first[-1])
    run = state.Run(
        slots=network.slots,
        channels=network.channels,
        first=network.first,
        limits=rules.limits,
        by_priority=by_priority,
        forward_first=rules.forward_first,
        patience=rules.patience,
        gradients_only=rules.gradients_only,
        hops=np.zeros(num_slots, state.HOP),
        workers=np.zeros(num_workers, state.WORKER),
        queues=np.zeros(len(network.channels) + 2 * num_workers, state.QUEUE),
        codes=np.empty(count, np.int64),
        # An operation adds three events at most: its end, an arrival, and its sender's wake-up; a wake-up after a
        # denial follows an event of the denied worker's own. A message that is sent again adds its arrival.
        events=np.empty(3 * (count + num_workers) + 2 * num_slots, state.EVENT),
        state=np.zeros(1, state.STATE),
    )
    ended, strained, beyond_limits = run_scheduler(run)
    return replayed(network, rules, run.codes, strained=strained, beyond_limits=beyond_limits) if ended else None


def replayed(
    network: Network, rules: Rules, codes: Integers, *, strained: bool = False, beyond_limits: bool = False
) -> Schedule:
    """Return the schedule with these codes, as in `Schedule`, timed by a replay."""
    from chameleon_ft.schedule._kernels.replay import longest_path

    ends_s = longest_path(network.operations, codes, network.first)[1]
    return Schedule(
        first=network.first,
        rules=rules,
        codes=codes,
        ends_s=ends_s,
        step_s=float(ends_s.max()),
        strained=strained,
        beyond_limits=beyond_limits,
    )


def _one_by_one(network: Network, rules: Rules) -> Schedule:
    """One micro-batch after the other through all its operations: slow, but it cannot deadlock."""
    slots, count = network.slots, len(network.slots)
    orders: list[list[int]] = [[] for _ in network.workers]
    runs = np.concatenate([slots["runs_forward"], slots["runs_backward"], slots["runs_weight_grad"]]).tolist()
    for start, stop in pairwise([*sorted(network.by_priority.tolist()), count]):
        route = range(start, stop)
        codes = [*route, *(count * phase + slot for slot in reversed(route) for phase in (1, 2))]
        for code in filter(runs.__getitem__, codes):
            orders[slots["worker"][code % count]].append(code)
    return replayed(network, rules, np.array([code for order in orders for code in order]))
