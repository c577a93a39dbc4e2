"""Migration: layers move to new holders while another plan trains, so that no worker waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from chameleon_ft.cluster import Cluster
from chameleon_ft.estimate import estimate_parts, peak_bytes_of
from chameleon_ft.plan import LayerRange, Placement, Plan
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.scoring import Candidate, CourseDraft
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule.best import ScheduledPart
from chameleon_ft.transfer import Message, Transfer
from chameleon_ft.workload import Workload

__all__ = [
    "MigratingPlan",
    "migration_of",
    "pull_s",
    "sums_s",
    "with_migrations",
    "with_shadow_holders",
    "without_shadow_holders",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratingPlan:
    """A plan under which layers move.

    Attributes:
        plan: the routes of the plan in force. Workers that receive layers are among their holders: as shadow holders,
            they receive the sum of the gradients and apply updates, but run no operation of these layers.
        step_s: predicted seconds of a step.
        missing_bytes: worker -> bytes that it lacks at its worst moment; empty if the plan fits the memory.
    """

    plan: Plan
    step_s: float
    missing_bytes: Mapping[int, int]


def migration_of(
    plan: Plan, target: Placement, messages: Sequence[Message], costs: CostModel, *, parts: Sequence[ScheduledPart]
) -> MigratingPlan:
    """Return the plan under which layers move from the placement in force to another one.

    Args:
        plan: the plan in force, without lost workers.
        target: the placement after the migration.
        messages: what moves.
        costs: with the workers of both.
        parts: the schedules of `plan`, by `best_parts`; also those of the result, whose program is `program_of` them.
    """
    migrating = with_shadow_holders(plan, target)
    estimate = estimate_parts(plan, parts, costs)
    more = replace(estimate, peak_bytes=peak_bytes_of(migrating, parts, costs))
    return MigratingPlan(
        plan=migrating,
        step_s=estimate.step_s + sums_s(messages, costs.workload, costs.cluster),
        missing_bytes=more.over_capacity(costs),
    )


def with_shadow_holders(plan: Plan, target: Placement) -> Plan:
    """Return the plan with each worker as a holder of the layers of `target` too, and its routes as they are."""
    held: dict[int, set[int]] = defaultdict(set)
    for placement in (plan.placement, target):
        for worker, ranges in placement.ranges.items():
            held[worker].update(layer for layers in ranges for layer in layers)
    by_worker = {worker: tuple(_runs(sorted(layers))) for worker, layers in held.items()}
    return replace(plan, placement=Placement(target.num_layers, by_worker))


def without_shadow_holders(placement: Placement, transfer: Transfer) -> Placement:
    """Return the placement of the plan in force, from that of the plan under which the layers of `transfer` move."""
    arriving: dict[int, set[int]] = defaultdict(set)
    for message in transfer.messages:
        arriving[message.destination].update(message.layers)
    held = {
        worker: tuple(_runs([layer for each in ranges for layer in each if layer not in arriving[worker]]))
        for worker, ranges in placement.ranges.items()
    }
    return Placement(placement.num_layers, {worker: ranges for worker, ranges in held.items() if ranges})


def _runs(layers: Sequence[int]) -> list[LayerRange]:
    found = []
    for _, run in groupby(enumerate(layers), key=lambda each: each[1] - each[0]):
        own = [layer for _, layer in run]
        found.append(LayerRange(own[0], own[-1] + 1))
    return found


def pull_s(messages: Sequence[Message], cluster: Cluster) -> float:
    """Return the seconds until all layers have arrived, if nothing interrupts them.

    A destination pulls its layers one by one: for each, a request and an answer cross the link. Destinations pull at
    the same time, and a source that serves several shares its bandwidth among them. So the time is that of the busiest
    end, with b bytes at bandwidth beta and latency alpha for each layer:

        max(max over destinations of sum(2 alpha + b / beta), max over sources of sum(b / beta))

    Messages of training, which layers give way to, are left out, and so are layers that wait for the next step.
    """
    return _busiest_s(messages, cluster, num_bytes=lambda message: message.num_bytes, latencies=2)


def sums_s(messages: Sequence[Message], workload: Workload, cluster: Cluster) -> float:
    """Return the seconds by which a step takes longer, because sources send the sums of gradients to shadow holders.

    They do so once all reductions are complete. The time is that of the busiest end, as in `pull_s`, without requests.
    """

    def gradient_bytes(message: Message) -> int:
        return sum(workload.layers[layer].gradient_bytes for layer in message.layers)

    return _busiest_s(messages, cluster, num_bytes=gradient_bytes, latencies=1)


def _busiest_s(
    messages: Sequence[Message], cluster: Cluster, *, num_bytes: Callable[[Message], int], latencies: int
) -> float:
    received_s: dict[int, float] = defaultdict(float)
    sent_s: dict[int, float] = defaultdict(float)
    for message in messages:
        link = cluster.link(message.source, message.destination)
        carry_s = num_bytes(message) / link.bytes_per_s
        sent_s[message.source] += carry_s
        received_s[message.destination] += carry_s + latencies * link.latency_s * len(message.layers)
    return max((*received_s.values(), *sent_s.values()), default=0.0)


def with_migrations(
    measured: Sequence[tuple[Candidate, CourseDraft | None]], context: DecisionContext
) -> list[tuple[Candidate, CourseDraft | None]]:
    """Return the candidates as they are if layers move beside training.

    The first feasible candidate that moves nothing takes over at once: after a loss it is rerouting, with the stall and
    the rest of the interrupted step; without a loss it is the plan in force, and nothing stops. All others that move
    nothing are reached as soon as it is. Of those that move layers, each has this stall, then trains with the first
    candidate's routes to the end of the step in which the last layer arrives, and then as its own plan. The transfer
    stops training as before if some worker lacks memory for the layers beside training, or if no candidate moves
    nothing.
    """
    first = next(((own, draft) for own, draft in measured if draft is not None and _stays_in_place(draft)), None)
    if first is None:
        return list(measured)
    return [(_migrating(own, draft, *first, context), draft) for own, draft in measured]


def _stays_in_place(draft: CourseDraft) -> bool:
    return draft.transfer is not None and not draft.transfer.messages


def _migrating(
    candidate: Candidate,
    draft: CourseDraft | None,
    first: Candidate,
    first_draft: CourseDraft,
    context: DecisionContext,
) -> Candidate:
    if draft is None or draft.transfer is None:
        return candidate
    if _stays_in_place(draft):
        return replace(candidate, stall_s=first.stall_s)
    costs = CostModel(context.costs.workload, context.senders)
    messages = draft.transfer.messages
    migration = migration_of(first_draft.plan, draft.plan.placement, messages, costs, parts=first_draft.parts)
    if migration.missing_bytes:
        return candidate
    return replace(
        candidate,
        stall_s=first.stall_s,
        transfer_s=0.0,
        migration_s=pull_s(messages, context.senders) * context.migration_factor,
        migration_step_s=migration.step_s * context.step_factor,
        is_join=any(message.destination not in context.placement.ranges for message in messages),
    )
