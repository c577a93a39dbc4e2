"""Pipelines with their programs: scheduled once for all that differ only in which worker is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import CostModel, Program, best_program, replay
from chameleon_ft.schedule._engine import Schedule
from chameleon_ft.schedule._orders import build_program, schedule
from chameleon_ft.schedule._trials import Trials
from chameleon_ft.search._cuts import Cuts, Stops
from chameleon_ft.search._kinds import Crew, Shape

# F, and B or I and W.
_OPERATIONS_PER_HOP: Final = 3
# When there is little time: schedules that are tried, and how close to its bound one is good enough.
_TRIALS: Final = 4
_CLOSE: Final = 0.005


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """A pipeline with a program.

    Attributes:
        shape: kinds of its workers.
        stops: where its stages stop.
        micro_batches: its share.
        plan: it alone, on some workers.
        program: what they run.
        program_s: seconds until the last operation has ended.
        ends_s: seconds until the last operation of each stage has ended; it makes gradients.
    """

    shape: Shape
    stops: Stops
    micro_batches: int
    plan: Plan
    program: Program
    program_s: float
    ends_s: tuple[float, ...]


class Timer:
    """Schedules pipelines and remembers them.

    `operations` is the effort so far: how many were to be scheduled, counted once for each pipeline.
    """

    def __init__(self, costs: CostModel, crew: Crew, cuts: Cuts) -> None:
        self.operations = 0
        self._costs = costs
        self._crew = crew
        self._cuts = cuts
        self._hosts = {worker.id: worker.host for worker in costs.cluster.workers}
        self._known: dict[tuple[object, ...], TimedPipeline] = {}

    def sample(self, shape: Shape, stops: Stops, micro_batches: int, *, best: bool) -> TimedPipeline:
        """The pipeline on the first workers of its kinds."""
        return self.timed(self._crew.sample(shape), shape, stops, micro_batches, best=best)

    def timed(
        self, workers: Sequence[int], shape: Shape, stops: Stops, micro_batches: int, *, best: bool
    ) -> TimedPipeline:
        """The pipeline on these workers, or on others that are linked alike.

        With its `best_program`, or with one that takes a fraction of the time to find and is usually nearly as good.
        """
        same_host = tuple(self._hosts[a] == self._hosts[b] for a, b in pairwise(workers))
        key = shape, stops, micro_batches, same_host, best
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._scheduled(workers, shape, stops, micro_batches, best=best)
        return found

    def _scheduled(
        self, workers: Sequence[int], shape: Shape, stops: Stops, micro_batches: int, *, best: bool
    ) -> TimedPipeline:
        self.operations += _OPERATIONS_PER_HOP * len(stops) * micro_batches
        hops = hops_of(workers, stops)
        plan = Plan(
            Placement(stops[-1], {hop.worker: (hop.layers,) for hop in hops}),
            tuple(Route(number, hops) for number in range(micro_batches)),
            self._cuts.split_backward,
        )
        ceiling = dict(zip(workers, self._cuts.limits(shape, stops, micro_batches), strict=True))
        if best:
            program = best_program(plan, self._costs, ceiling=ceiling).program
        else:
            program = build_program(plan, _quickly([hops] * micro_batches, Trials(plan, self._costs, ceiling)).orders)
        timeline = replay(program, self._costs)
        ends_s = {timed.worker: timed.end_s for timed in timeline.operations}
        return TimedPipeline(
            shape=shape,
            stops=stops,
            micro_batches=micro_batches,
            plan=plan,
            program=program,
            program_s=timeline.step_s,
            ends_s=tuple(ends_s[worker] for worker in workers),
        )


def _quickly(routes: list[tuple[Hop, ...]], trials: Trials) -> Schedule:
    """The fastest of the first schedules that are tried, or the first that is close to its lower bound."""
    network = trials.network(routes)
    bound_s = network.lower_bound_s()
    found: list[Schedule] = []
    for rules in islice(trials.rules_to_try(routes), _TRIALS):
        found.append(schedule(network, rules))
        if found[-1].step_s <= bound_s * (1 + _CLOSE) and not found[-1].beyond_limits:
            break
    return min(found, key=lambda each: (each.beyond_limits, each.step_s))


def hops_of(workers: Sequence[int], stops: Stops) -> tuple[Hop, ...]:
    """The route through these workers."""
    starts = (0, *stops[:-1])
    return tuple(
        Hop(worker, LayerRange(start, stop)) for worker, start, stop in zip(workers, starts, stops, strict=True)
    )
