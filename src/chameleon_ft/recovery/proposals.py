"""All kinds of plans that policies propose: `Proposer` lists them, and `ProposalsOnWorkers` makes them."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.plan.layouts import proportional_shares
from chameleon_ft.recovery import repartition
from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.recovery.layout import largest_symmetric_layout, uniform_limits
from chameleon_ft.recovery.proposal import Proposal, numbered
from chameleon_ft.registry import PLANNERS
from chameleon_ft.schedule import CostModel, InFlightLimit, default_limits
from chameleon_ft.search import FoundPlan, InfeasibleError, SearchResult, recut_plan, reroute
from chameleon_ft.transfer import remap_plan

_Proposed = TypeVar("_Proposed")


def drop_pipelines(name: str, context: DecisionContext) -> Proposal:
    """Drop pipelines that have lost a worker; their other workers are idle.

    Their micro-batches go to the other pipelines, in proportion to what these have. As soon as there are as many idle
    workers as the first pipeline has stages, they form one like it.
    """
    plan, live = context.plan, set(context.live)
    micro_batches = Counter(route.hops for route in plan.routes)
    whole = [hops for hops in micro_batches if all(hop.worker in live for hop in hops)]
    if not whole:
        return Proposal(name=name, reason="every pipeline has lost a worker")
    template = whole[0]
    idle = iter(sorted(live.difference(hop.worker for hops in whole for hop in hops)))
    formed = [
        tuple(Hop(worker, hop.layers) for worker, hop in zip(group, template, strict=True))
        for group in zip(*[idle] * len(template), strict=False)
    ]
    pipelines = [*whole, *formed][: plan.micro_batches]
    if pipelines == whole and not context.lost:
        return Proposal(name=name, plan=plan, in_flight_limits=context.in_flight_limits)
    # Pipelines with equal cuts get equal shares, give or take one.
    shares: dict[tuple[LayerRange, ...], list[int]] = defaultdict(list)
    for hops, share in micro_batches.items():
        shares[_stages(hops)].append(share)
    counts = proportional_shares([statistics.fmean(shares[_stages(hops)]) for hops in pipelines], plan.micro_batches)
    used = [(hops, count) for hops, count in zip(pipelines, counts, strict=True) if count]
    taken = [hops for hops, count in used for _ in range(count)]
    # A formed pipeline runs like the first one: each worker recomputes, and splits its backward, as its counterpart.
    counterparts = {hop.worker: model for hops in formed for hop, model in zip(hops, template, strict=True)}
    held, recompute, fused = {}, {}, set()
    for hop in (hop for hops, _ in used for hop in hops):
        model = counterparts.get(hop.worker)
        counterpart = hop.worker if model is None else model.worker
        held[hop.worker] = plan.placement.ranges_of(hop.worker) if model is None else (hop.layers,)
        own = plan.recompute.get(counterpart)
        if own is not None and (own := own if model is None else own.intersection(model.layers)) is not None:
            recompute[hop.worker] = own
        if counterpart in plan.fused_workers:
            fused.add(hop.worker)
    changed = Plan(
        Placement(plan.placement.num_layers, held),
        tuple(map(Route, range(len(taken)), taken)),
        plan.split_backward,
        recompute,
        frozenset(fused),
    )
    limits = {worker: limit for worker, limit in context.in_flight_limits.items() if worker in held}
    return Proposal(name=name, plan=changed, in_flight_limits=limits)


def _stages(hops: Sequence[Hop]) -> tuple[LayerRange, ...]:
    return tuple(hop.layers for hop in hops)


class RivalPlanner(Protocol):
    """A planner of the registry, to compare with."""

    def plan(self, costs: CostModel, *, current: Placement | None) -> FoundPlan | None:
        """Return its plan for all workers, with fused backward; None if it finds none.

        Args:
            costs: costs of the workload on the live workers.
            current: layers that they hold now, for the bytes to move.
        """

    def propose(self, name: str, proposer: ProposalsOnWorkers) -> list[Proposal]:
        """Propose its plans for the context of `proposer`."""


class Proposer(ABC, Generic[_Proposed]):
    """The kinds of plans of `policies.Kind`: a method for each, which gets the name of its proposals.

    Runs propose plans on named workers, and simulations of thousands of workers propose pipelines that are counted by
    class. A method returns no proposal, or one with the reason, if there is no plan of its kind.
    """

    @abstractmethod
    def reroute(self, name: str) -> list[_Proposed]:
        """Have peers of the lost workers take their micro-batches; nothing moves. The same plan if none is lost."""

    @abstractmethod
    def reroute_decoupled(self, name: str) -> list[_Proposed]:
        """Reroute with the fused backward of the plan split, so that more of it fits bubbles."""

    @abstractmethod
    def rejoin(self, name: str) -> list[_Proposed]:
        """Have idle workers take the places of lost ones, and peers do the share of places that stay empty."""

    @abstractmethod
    def repair(self, name: str) -> list[_Proposed]:
        """Cut broken pipelines anew over their remaining workers and idle ones; the others stay."""

    @abstractmethod
    def repartition(self, name: str) -> list[_Proposed]:
        """Form the fastest pipelines of all live workers, or slower ones that move less or survive more losses."""

    @abstractmethod
    def begin_anew(self, name: str) -> list[_Proposed]:
        """Read the plans of `repartition` from a checkpoint, if there is one: nothing has to move for them."""

    @abstractmethod
    def drop_pipelines(self, name: str) -> list[_Proposed]:
        """Drop broken pipelines; as soon as there are enough idle workers, they form new ones."""

    @abstractmethod
    def restart(self, name: str) -> list[_Proposed]:
        """Form equal pipelines of all live workers, from a checkpoint."""

    @abstractmethod
    def planned_by(self, planner: str) -> list[_Proposed]:
        """Propose what a planner of the registry does, under its name."""


class ProposalsOnWorkers(Proposer[Proposal]):
    """Proposes plans on named workers.

    Args:
        context: the active plan, and which workers are live.
        horizon_s: expected seconds until the next incident.
        searches: True if `repartition` is called too, so that `repair` can use its search.
    """

    def __init__(self, context: DecisionContext, horizon_s: float, *, searches: bool = False) -> None:
        self.context = context
        self.horizon_s = horizon_s
        self._searches = searches

    @cached_property
    def _found(self) -> SearchResult | InfeasibleError:
        return repartition.search(self.context, self.horizon_s)

    def reroute(self, name: str) -> list[Proposal]:
        """Propose the plan as `search.reroute` changes it; the plan as it is if no worker is lost."""
        return [self._rerouted(name, self.context.plan, self.context.lost, self.context.in_flight_limits)]

    def reroute_decoupled(self, name: str) -> list[Proposal]:
        """Propose rerouting with backward split, and up to one and two pipeline depths of micro-batches in flight.

        Nothing if backward is split in the plan already, no worker is lost, or some layer has no holder.
        """
        context = self.context
        if context.plan.split_backward or not context.lost or context.placement.unheld_layers:
            return []
        plan = replace(context.plan, split_backward=True)
        depth = max(len(route.hops) for route in plan.routes)
        return [
            self._rerouted(numbered(name, number), plan, context.lost, uniform_limits(plan.workers, number * depth))
            for number in (1, 2)
        ]

    def rejoin(self, name: str) -> list[Proposal]:
        """Propose `context.home` with idle workers in the places of lost ones, and detours around empty places."""
        home, live = self.context.home, set(self.context.live)
        if home is None:
            return []
        # A worker that has returned to its own place holds nothing either.
        idle = live.difference(home.workers) | live.difference(self.context.plan.workers)
        back = idle.intersection(home.workers)
        empty = [worker for worker in home.workers if worker not in live]
        if not idle or not (back or empty):
            return []
        newcomers = sorted(idle - back)
        roles = {worker: worker for worker in home.workers} | dict(zip(empty, newcomers, strict=False))
        limits = self.context.home_in_flight_limits
        in_flight_limits = {roles[place]: limit for place, limit in limits.items() if place in roles}
        return [self._rerouted(name, remap_plan(home, roles), empty[len(newcomers) :], in_flight_limits)]

    def repair(self, name: str) -> list[Proposal]:
        """Propose the plan of `recut_plan`, with backward split if it was: only the broken pipelines change.

        If all workers of the plan are live, and no others, the plan stays as it is.
        """
        context = self.context
        if unheld := context.placement.unheld_layers:
            return [Proposal(name=name, reason=str(NoHolderError(unheld)))]
        if context.live == context.plan.workers:
            return self.reroute(name)
        split = context.plan.split_backward
        recuts: tuple[FoundPlan, ...] = ()
        # The search for a re-partition recuts pipelines too, of all that workers hold.
        if self._searches and context.holdings is None and isinstance(self._found, SearchResult):
            recuts = self._found.recuts
        found = next((each for each in recuts if each.plan.split_backward == split), None) or recut_plan(
            context.costs, context.placement, split_backward=split, effort=context.effort
        )
        if found is None:
            reason = "no pipeline is whole, or its memory and that of repaired ones does not hold all micro-batches"
            return [Proposal(name=name, reason=reason)]
        return [Proposal.of(name, found)]

    def repartition(self, name: str) -> list[Proposal]:
        return repartition.repartition(name, self._found, self.context)

    def begin_anew(self, name: str) -> list[Proposal]:
        """Propose to read the best plan of the search from a checkpoint, with layers that could move as well.

        A stop costs minutes, but what is read needs no memory beside what is held. If no worker is lost, a checkpoint
        is written first. Nothing if there is no checkpoint, or some layer has no holder: `repartition` proposes it.
        """
        context = self.context
        if not context.has_checkpoints or not (context.lost or context.saves_first) or context.held.unheld_layers:
            return []
        if isinstance(self._found, InfeasibleError):
            return []
        return [Proposal.of(name, self._found.best, from_checkpoint=True)]

    def drop_pipelines(self, name: str) -> list[Proposal]:
        return [drop_pipelines(name, self.context)]

    def restart(self, name: str) -> list[Proposal]:
        """Propose the largest layout of equal pipelines, of the depth of the plan if that is possible.

        A run does not restart for a worker that joins: it waits for the next loss.
        """
        context = self.context
        if not context.lost:
            return []
        plan = largest_symmetric_layout(
            live=context.live,
            layer_costs=context.costs.workload.layer_times_s,
            micro_batches=context.costs.workload.micro_batches,
            preferred_pp=max(len(route.hops) for route in context.plan.routes),
            split_backward=context.plan.split_backward,
        )
        return [Proposal(name=name, plan=plan, in_flight_limits=default_limits(plan), from_checkpoint=True)]

    def planned_by(self, planner: str) -> list[Proposal]:
        rival: RivalPlanner = PLANNERS[planner]
        return rival.propose(planner, self)

    def _rerouted(
        self, name: str, plan: Plan, lost: tuple[int, ...] | list[int], in_flight_limits: Mapping[int, InFlightLimit]
    ) -> Proposal:
        try:
            rerouted = reroute(
                plan,
                lost,
                self.context.costs,
                in_flight_limits=in_flight_limits,
                searches=self.context.effort != 0,
            )
        except NoHolderError as error:
            return Proposal(name=name, reason=str(error))
        left = rerouted.placement.ranges
        limits = {worker: limit for worker, limit in in_flight_limits.items() if worker in left}
        return Proposal(name=name, plan=rerouted, in_flight_limits=limits)
