"""The fastest program that completes an interrupted step."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from chameleon_ft.errors import ProgramError
from chameleon_ft.estimate import estimate_rest, workload_memory
from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.plan.rest import RestOfStep, StepProgress
from chameleon_ft.recovery.salvage import Salvage, salvage
from chameleon_ft.schedule import CostModel, InFlightLimit, ScheduledRest, check_rest, rest_schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvagedStep:
    """The program of the rest of an interrupted step.

    Attributes:
        rest: what remains.
        scheduled: in which order.
        rest_s: predicted seconds until all gradients are reduced.
        repeated_share: share of the step's work that is done twice.
    """

    rest: RestOfStep
    scheduled: ScheduledRest
    rest_s: float
    repeated_share: float


def complete_step(
    plan: Plan,
    progress: Mapping[int, StepProgress],
    costs: CostModel,
    in_flight_limits: Mapping[int, InFlightLimit],
    *,
    before: RestOfStep | None = None,
) -> SalvagedStep | None:
    """Return the fastest program that completes a step, which is checked; see `salvage` for the arguments.

    None if there is no way to complete it, or none of which an order of the operations was found in which messages
    arrive as they are taken.

    Args:
        in_flight_limits: limits of the plan; a worker whose memory is known may exceed its limit as far as that allows.
    """
    limits = limits_by_memory(plan, costs, in_flight_limits)
    steps = [
        _estimated(found, rest_schedules(found.rest, costs, in_flight_limits=limits), costs)
        for found in salvage(plan, progress, costs, tied=costs.workload.tied_layers, before=before)
    ]
    # Most are never needed: the check takes as long as several schedules, and the fastest one hardly ever fails it.
    for step in heapq.merge(*steps, key=lambda step: step.rest_s):
        with contextlib.suppress(ProgramError):
            check_rest(step.scheduled.program, step.scheduled.resends, step.rest)
            return step
    return None


def _estimated(found: Salvage, schedules: Iterable[ScheduledRest], costs: CostModel) -> Iterator[SalvagedStep]:
    for scheduled in schedules:
        rest_s = estimate_rest(found.rest, scheduled, costs).rest_s
        yield SalvagedStep(rest=found.rest, scheduled=scheduled, rest_s=rest_s, repeated_share=found.repeated_share)


def limits_by_memory(plan: Plan, costs: CostModel, limits: Mapping[int, InFlightLimit]) -> Mapping[int, InFlightLimit]:
    """Return how many micro-batches each worker can keep; those in `limits` fit in any case.

    A micro-batch is counted with all layers of the worker, without recomputation; one is left out for the messages and
    the operation that runs.
    """
    layers, found = costs.workload.layers, dict(limits)
    memory = workload_memory(costs.workload)

    @cache
    def bytes_of(ranges: tuple[LayerRange, ...]) -> tuple[int, int]:
        """Return the bytes that are always there, and those of a micro-batch."""
        own = [layers[layer] for each in ranges for layer in each]
        hop_bytes = sum(max(each.activation_bytes, each.weight_grad_bytes) + each.output_bytes for each in own)
        working = max(max(each.working_bytes, each.working_in_halves) for each in own)
        return memory.state_of(ranges, plan.placement).total_bytes + working, hop_bytes

    for worker in costs.cluster.workers:
        ranges = plan.placement.ranges_of(worker.id) if worker.id in found else ()
        if worker.memory_bytes is None or not ranges:
            continue
        fixed_bytes, hop_bytes = bytes_of(ranges)
        fits = (worker.memory_bytes - fixed_bytes) // max(1, hop_bytes) - 1
        limit = found[worker.id]
        if fits > limit.in_flight:
            deferred = None if limit.deferred is None else max(limit.deferred, fits)
            found[worker.id] = InFlightLimit(fits, max(limit.kept, fits), deferred)
    return found
